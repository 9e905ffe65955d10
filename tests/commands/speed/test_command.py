"""`smartspec bench generate`: what is measured, on which prompts, and how results are told."""

import json
import math
import shutil

import numpy as np
import pytest
import torch
from transformers import GenerationConfig

from hf_smartspec.candidates.heads.medusa.heads import MedusaHeads
from hf_smartspec.commands import main as cli
from hf_smartspec.commands.common.models import left_padded, load_model
from hf_smartspec.commands.common.replaying import RecordedText
from hf_smartspec.commands.speed import command as speed_command
from hf_smartspec.commands.speed import loop as speed_loop
from hf_smartspec.commands.speed.loop import PLAIN, Call, DataSet, Method, Settings, Tally, measure
from hf_smartspec.commands.speed.report import has_differences, summaries, worst
from hf_smartspec.commands.verify.drafts import ReplayCandidates
from hf_smartspec.cpu.quantized import is_quantized
from hf_smartspec.generate import enabled
from hf_smartspec.target_model.written.decoder import WrittenDecoder
from tests.folders import save_tiny_models
from tests.models import RECURRENT, VOCAB_SIZE, new_model, noisy_model, shared_model

from .. import helpers

SHORT = ["--dtype", "float32", "--device", "cpu", "--threads", "1", "--max-new-tokens", "10"]
PROMPT_LOOKUP = {"prompt_lookup_num_tokens": 10}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = save_tiny_models(tmp_path_factory.mktemp("models"))
    for name in ("first", "second"):
        rows = [{"prompt": f"{name} {n} and {n} and", "response": f" {n} and {n}."} for n in range(3)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def call(*arguments):
    return helpers.call("bench", "generate", *arguments)


def greedy(model):
    model.generation_config = GenerationConfig(eos_token_id=2, pad_token_id=0)
    return model


def new_data(num_requests=3, num_tokens=(4, 9, 6)):
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, VOCAB_SIZE, length).tolist() for length in range(3, 3 + num_requests)]
    return DataSet("data", prompts, [rng.integers(3, VOCAB_SIZE, num_tokens[n % 3]) for n in range(num_requests)])


def run_measure(model, methods, data, batch_sizes=(1, 2), replays=False, repetitions=1, max_new_tokens=12):
    results = {}
    measure(model, methods, [data], batch_sizes, Settings(max_new_tokens, replays, repetitions), results)
    return results


# --- The command


def test_responses_are_needed_where_they_are_replayed_only(folder, tmp_path, capsys):
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{n} and {n} and"}) + "\n" for n in range(3)))
    asked = [path, "--model", folder / "target", "--assistant", "prompt_lookup", "--remember", "1", *SHORT]
    out = tmp_path / "results.json"
    assert call(*asked, "--json", out) == 0
    assert {row["method"] for row in json.loads(out.read_text())["results"]} >= {PLAIN, "prompt_lookup"}
    assert call(*asked, "--replay") == 2
    assert 'has no text under "response"' in capsys.readouterr().err


def test_command_measures_every_method_data_set_and_batch_size(folder, tmp_path, capsys, deprecated_by_itself):
    files = [folder / "first.jsonl", folder / "second.jsonl"]
    out = tmp_path / "results.json", tmp_path / "results.png"
    settings = ["--model", folder / "target", "--assistant", "auto", folder / "draft", "--batch-size", "1", "3"]
    assert call(*files, *settings, *SHORT, "--json", out[0], "--plot", out[1]) == 0

    report = json.loads(out[0].read_text())
    own, others = {PLAIN, "auto", "draft"}, {"transformers, prompt lookup", "transformers, draft"}
    for path in map(str, files):
        for batch_size, methods in ((1, own | others), (3, own)):  # transformers refuses batches
            rows = [row for row in report["results"] if (row["data_set"], row["batch_size"]) == (path, batch_size)]
            assert {row["method"] for row in rows} == methods
            assert all(row["num_different_rows"] == row["num_tied_rows"] == 0 for row in rows)
            assert all(len(row["calls"]) == 3 / batch_size for row in rows)
    drafted = {row["method"]: row["statistics"]["drafted_tokens"] for row in report["results"]}
    assert drafted["plain generate"] == 0 and drafted["draft"] > 0 and drafted["transformers, draft"] > 0
    assert report["worst_speedup"]["auto"] == min(
        row["speedup"] for row in report["results"] if row["method"] == "auto"
    )
    assert out[1].stat().st_size > 1000
    printed = capsys.readouterr().out
    assert "first, batch 1" in printed and "Where the time goes" in printed and "worst" in printed


def test_command_replays_and_enlarges(folder, tmp_path, capsys):
    out = tmp_path / "results.json"
    settings = ["--model", folder / "target", "--assistant", "prompt_lookup", "--batch-size", "1", "2"]
    assert call(folder / "first.jsonl", *settings, *SHORT, "--replay", "--parameters", "1e6", "--json", out) == 0
    report = json.loads(out.read_text())
    assert report["parameters"] == pytest.approx(1e6, rel=0.05)
    # One token a byte, and the end of sequence; as many as asked for at most.
    assert {row["statistics"]["generated_tokens"] for row in report["results"]} == {3 * min(len(" 0 and 0.") + 1, 10)}
    assert "first, replayed, batch 1" in capsys.readouterr().out


@pytest.mark.skipif("qwen3_5_text" not in RECURRENT, reason="hybrids are decoded without speculation")
def test_command_enlarges_hybrids_and_leaves_out_what_transformers_refuses(folder, tmp_path, capsys):
    hybrid, out = shutil.copytree(folder / "target", tmp_path / "hybrid"), tmp_path / "results.json"
    new_model("qwen3_5_text", vocab_size=load_model(str(hybrid)).config.vocab_size).save_pretrained(hybrid)
    settings = ["--model", hybrid, "--parameters", "1e6", "--batch-size", "1", "2", "--json", out]
    assert call(folder / "first.jsonl", *settings, "--assistant", "none", "suffix", folder / "draft", *SHORT) == 0
    report = json.loads(out.read_text())
    assert report["parameters"] == pytest.approx(1e6, rel=0.05)
    assert {row["method"] for row in report["results"]} == {PLAIN, "none", "suffix", "draft"}
    assert all(row["num_different_rows"] == 0 for row in report["results"])


def test_command_quantizes_the_target(folder, monkeypatch, deprecated_by_itself):
    targets, original = [], speed_command.measure
    monkeypatch.setattr(speed_command, "measure", lambda model, *rest: (targets.append(model), original(model, *rest)))
    settings = ["--model", folder / "target", "--assistant", folder / "draft", "--batch-size", "1", "3"]
    assert call(folder / "first.jsonl", *settings, *SHORT, "--quantize", "int8") == 0
    assert is_quantized(targets[0])


def test_command_fuses_lists_and_remembers(folder, tmp_path, capsys):
    rows = [{"prompt": f"{n} plus", "response": f" apples and pears {n % 2}."} for n in range(6)]
    (folder / "alike.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    accepted = []
    for remembered in (0, 3):
        out = tmp_path / "results.json"
        names = ["auto", f"suffix+{folder / 'draft'}"]
        asked = ["--model", folder / "target", "--assistant", *names, "--batch-size", "3", "--limit", "3", "--replay"]
        asked += ["--remember", remembered, "--json", out]
        assert call(folder / "alike.jsonl", *asked, *SHORT[:-1], "20") == 0
        rows = {row["method"]: row["statistics"] for row in json.loads(out.read_text())["results"]}
        assert set(rows) == {PLAIN, "auto", "suffix+draft"}, "lists are this library's only"
        assert rows["suffix+draft"]["drafted_tokens"] > 0
        accepted.append(rows["auto"]["accepted_tokens"])
    assert 2 * accepted[0] < accepted[1], "one batch has nothing to draft from but itself and the past"
    assert "3 remembered by suffix trees" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("larger", [[], ["--parameters", "300000"]])
def test_command_takes_learned_drafters(folder, tmp_path, larger, monkeypatch, deprecated_by_itself):
    heads, out = helpers.save_fitted_heads(folder, ["0 and 0 and"]), tmp_path / "results.json"
    loaded, original = [], MedusaHeads.from_pretrained
    monkeypatch.setattr(MedusaHeads, "from_pretrained", lambda *given: loaded.append(given) or original(*given))
    names = [heads, f"suffix+{heads}", folder / "draft"]
    asked = ["--model", folder / "target", "--assistant", *names, "--batch-size", "1", "2", *larger, "--json", out]
    assert call(folder / "first.jsonl", *asked, *SHORT) == 0
    rows = json.loads(out.read_text())["results"]
    others = {"transformers, prompt lookup", "transformers, draft"}
    assert {row["method"] for row in rows} == {PLAIN, "medusa", "suffix+medusa", "draft"} | others
    assert all(row["num_different_rows"] == 0 for row in rows)
    assert all(row["statistics"]["drafted_tokens"] > 0 for row in rows if "medusa" in row["method"])
    assert len(loaded) == 1


def test_interrupted_prints_what_was_measured(folder, tmp_path, monkeypatch, capsys):
    original = speed_loop._Group._call

    def interrupted(group, method, start, turn):
        if turn == 1 and start == 2:
            raise KeyboardInterrupt
        return original(group, method, start, turn)

    monkeypatch.setattr(speed_loop._Group, "_call", interrupted)
    out = tmp_path / "results.json"
    settings = ["--model", folder / "target", "--assistant", "prompt_lookup", "--batch-size", "1", "--json", out]
    assert call(folder / "first.jsonl", *settings, *SHORT) == cli.INTERRUPTED
    assert "prompt_lookup" in capsys.readouterr().out
    assert all(len(row["calls"]) == 2 for row in json.loads(out.read_text())["results"])


def test_other_tokens_fail_the_command(folder, monkeypatch, capsys):
    original = speed_loop._Group._call

    def wrong(group, method, start, turn):
        rows = original(group, method, start, turn)
        return rows if method.name == PLAIN else [[(row[0] + 1) % 256, *row[1:]] for row in rows]

    monkeypatch.setattr(speed_loop._Group, "_call", wrong)
    settings = ["--model", folder / "target", "--assistant", "none", "--batch-size", "1"]
    assert call(folder / "first.jsonl", *settings, *SHORT) == 1
    assert "NO: 3" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{folder}/missing.jsonl"], "cannot read"),
        (["--model", "{folder}/bare"], "has no tokenizer"),
        (["--model", "{folder}/target", "--parameters", "10"], "--parameters: `num_parameters` must be at least"),
        (["--model", "{folder}/target", "--assistant", "sufix"], "--assistant: Unknown `assistant` preset 'sufix'"),
        (["--model", "{folder}/target", "--assistant", "{folder}/nothing"], "no such model folder"),
        (["--model", "{folder}/target", "--max-new-tokens", "300"], "--max-new-tokens: 300 leave no room"),
        (["--model", "{folder}/target", "--assistant", "suffix+sufix"], "--assistant: Unknown `assistant` preset"),
        (["--model", "{folder}/target", "--assistant", "suffix+"], "the name of a drafter is empty in 'suffix+'"),
        (["--model", "{folder}/target", "--remember", "3"], "has 3 requests, of which 3 leave none to ask"),
        (["--batch-size", "0"], "must be at least 1"),
        (["--json", "{folder}"], "cannot write"),
        (["--plot", "{folder}/plot.xyz"], "its suffix must be one of"),
        (["--model", "{folder}/target", "--parameters", "nan"], "and finite, got nan"),
    ],
)
def test_refuses_before_any_work(folder, capsys, arguments, message):
    files = [] if arguments[0].endswith("missing.jsonl") else [folder / "first.jsonl"]
    arguments = [text.format(folder=folder) for text in arguments]
    assert call(*files, *SHORT, *arguments) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


# --- Measuring


class Spy(ReplayCandidates):
    """Drafts nothing and notes what it is told."""

    def __init__(self):
        super().__init__([], VOCAB_SIZE)
        self.seen = []

    def begin(self, request):
        self.seen.append((request.namespace, request.prompt.tolist()))

    def propose(self, request_ids, max_nodes):
        raise NotImplementedError


def test_every_round_starts_with_trees_of_its_own_and_sees_requests_in_order():
    data, spy = new_data(), Spy()
    run_measure(greedy(new_model("llama")), [Method("spy", assistant=spy)], data, repetitions=2)
    rounds = list(dict.fromkeys(namespace for namespace, _ in spy.seen))
    assert len(rounds) == 2 * 3  # batch sizes, rounds with the one that is not timed
    for name in rounds:
        assert [prompt for namespace, prompt in spy.seen if namespace == name] == data.prompts


def test_transformers_draft_is_left_as_it_was(deprecated_by_itself):
    draft = noisy_model("llama")
    before = draft.generation_config.to_dict()
    method = Method("draft", arguments={"assistant_model": draft}, draft=draft)
    results = run_measure(greedy(new_model("llama")), [method], new_data(), batch_sizes=[1])
    assert draft.generation_config.to_dict() == before
    counts = results["data", 1]["draft"].statistics
    assert 0 < counts.accepted_tokens <= counts.drafted_tokens
    assert counts.generated_tokens == results["data", 1][PLAIN].statistics.generated_tokens
    assert counts.steps + counts.accepted_tokens == counts.generated_tokens


def test_times_are_those_of_the_call_and_its_prefill():
    results = run_measure(greedy(new_model("llama")), [Method("prompt_lookup", "prompt_lookup")], new_data())
    for tallies in results.values():
        for tally in tallies.values():
            assert sum(item.num_rows for item in tally.calls) == 3
            assert all(0 < item.prefill_seconds < item.seconds for item in tally.calls)


@pytest.mark.parametrize("replays", [False, True])
def test_timed_calls_of_ours_run_as_they_do_without_a_bench(replays, monkeypatch):
    """Hooks on the target would keep it from being written out."""
    calls, now = [], []
    compute, measured = WrittenDecoder.__call__, speed_loop._Group._call

    def counted(*args):
        calls.extend(now)
        return compute(*args)

    def noted(group, method, start, turn):
        now[:] = [(method.name, turn)]
        return measured(group, method, start, turn)

    monkeypatch.setattr(WrittenDecoder, "__call__", counted)
    monkeypatch.setattr(speed_loop._Group, "_call", noted)
    model = greedy(new_model("llama"))
    results = run_measure(model, [Method("none", "none")], new_data(), batch_sizes=[2], replays=replays)
    assert calls.count(("none", 1)) == results["data", 2]["none"].statistics.forwards > 10
    assert calls.count((PLAIN, 1)) == 0


def test_a_tie_is_told_from_a_wrong_token():
    model = greedy(new_model("llama", tie_word_embeddings=False))
    data = new_data(1)
    group = speed_loop._Group(model, [], data, 1, Settings(8, False, 1), speed_loop._rounding(model, [data], 1))
    with torch.no_grad():
        best = int(model(torch.tensor(data.prompts)).logits[0, -1].argmax())
        twin, other = (best + 1) % VOCAB_SIZE, (best + 2) % VOCAB_SIZE
        model.lm_head.weight[twin] = model.lm_head.weight[best]
    for token, is_tie in ((twin, True), (other, False)):
        tally = Tally()
        group._compare(tally, 0, [[best, 5, 6]], [[token, 5, 6]])
        assert [item.is_tie for item in tally.differences.values()] == [is_tie]


# --- Replaying


def test_every_way_of_decoding_replays_the_recorded_text(deprecated_by_itself):
    model, draft, data = greedy(new_model("llama")), noisy_model("llama"), new_data()
    methods = [
        Method("own", assistant="prompt_lookup"),
        Method("own draft", assistant=draft, draft=draft),
        Method("prompt lookup", arguments=PROMPT_LOOKUP),
        Method("draft", arguments={"assistant_model": draft}, draft=draft),
    ]
    generated = []
    original = speed_loop._Group._call

    def noted(group, method, start, turn):
        rows = original(group, method, start, turn)
        generated.append((start, rows))
        return rows

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(speed_loop._Group, "_call", noted)
        results = run_measure(model, methods, data, replays=True)
    for start, rows in generated:
        assert rows == [[*data.responses[start + index], 2] for index in range(len(rows))]
    # Drafts do not see what was recorded: random text is not what a model drafts.
    for name in ("own draft", "draft"):
        counts = results["data", 1][name].statistics
        assert counts.drafted_tokens > 0 and counts.acceptance_rate < 0.3


def test_rows_replay_as_independently_as_they_decode():
    model, data = greedy(new_model("llama", eos_token_id=None)), new_data()
    inputs = left_padded(data.prompts, 0, model.device)
    arguments = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": None, "return_dict_in_generate": True}
    texts = model.generate(**inputs, **arguments).sequences[:, inputs["input_ids"].shape[1] :]
    recorded = RecordedText(inputs["input_ids"], texts.numpy(), end_id=2)
    outputs = []
    with enabled(model), recorded.replaying(model):
        for processors in ([], [recorded]):
            source = ReplayCandidates(texts.tolist(), VOCAB_SIZE, error_rate=0.5)
            outputs.append(model.generate(**inputs, **arguments, assistant=source, logits_processor=processors))
    assert torch.equal(outputs[0].sequences, outputs[1].sequences)
    counts = [(item.statistics.steps, item.statistics.forwards, item.statistics.drafted_tokens) for item in outputs]
    assert counts[0] == counts[1] and counts[0][0] > counts[0][1]


def test_rows_of_one_prompt_replay_one_response():
    prompts = torch.tensor([[5, 6], [5, 6]])
    recorded = RecordedText(prompts, [np.array([7, 8]), np.array([9])], end_id=2)
    scores = recorded(torch.cat([prompts, prompts[:, :1]], dim=1), torch.zeros(2, VOCAB_SIZE))
    assert scores.argmax(dim=1).tolist() == [8, 8]


# --- Telling


def tally(*calls):
    return Tally(calls=[Call(*item) for item in calls])


def test_ratios_are_medians_of_neighbouring_calls_per_token():
    plain = tally((10.0, 2.0, 1, 9), (10.0, 2.0, 1, 9), (20.0, 2.0, 1, 10))
    fast = tally((5.0, 1.0, 1, 9), (2.0, 1.0, 1, 9), (20.0, 2.0, 1, 20))
    assert fast.speedup(plain) == pytest.approx(2.0)
    assert fast.decode_speedup(plain) == pytest.approx(np.median([2.0, 8.0, 2 * 19 / 18]))
    assert plain.speedup(plain) == 1.0
    assert (plain.seconds_per_request, plain.tokens_per_second) == pytest.approx((10.0, 0.9))
    single = tally((1.0, 0.9, 1, 1))
    assert math.isnan(single.decode_speedup(single))


def test_worst_is_the_lowest_ratio_and_what_was_not_timed_is_left_out():
    plain = tally((10.0, 1.0, 1, 10))
    results = {
        ("a", 1): {PLAIN: plain, "m": tally((5.0, 1.0, 1, 10))},
        ("b", 1): {PLAIN: plain, "m": tally((20.0, 1.0, 1, 10))},
        ("c", 1): {PLAIN: plain, "m": Tally()},
        ("d", 1): {PLAIN: Tally(), "m": Tally()},
    }
    assert worst(results) == {PLAIN: 1.0, "m": 0.5}
    assert [(row["data_set"], row["method"]) for row in summaries(results)][-1] == ("c", PLAIN)
    assert not has_differences(results, ["m"])


def test_shared_models_are_left_enabled_as_they_were():
    model = shared_model("llama")
    assert "generate" not in vars(model)
    run_measure(model, [Method("none", assistant="none")], new_data(1), batch_sizes=[1])
    assert "generate" not in vars(model)
