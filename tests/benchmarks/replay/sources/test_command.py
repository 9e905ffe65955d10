"""`python -m benchmarks sources`: its sources with parts taken away, the claims it checks, and the command."""

import json
import sys

import numpy as np
import pytest
import torch
from tokenizers import normalizers

from benchmarks.replay.sources import claims as ablation_claims
from benchmarks.replay.sources import command as ablation
from benchmarks.replay.sources import runs as ablation_runs
from benchmarks.replay.sources.claims import count_claim, ratio_claim
from benchmarks.replay.sources.sources import (
    GlobalTreeOnly,
    datastore_settings,
    length_settings,
    read_splits,
    size_settings,
    tree_settings,
)
from hf_smartspec.commands import main as cli
from hf_smartspec.commands.common.arguments import UsageError
from hf_smartspec.commands.common.outputs import draw
from hf_smartspec.commands.common.recordings import Recording
from hf_smartspec.commands.replay.loop import Replayer, Tally

from .... import sources
from ....commands.replay.test_command import write
from ....covering import IS_EXHAUSTIVE
from ....folders import byte_tokenizer, save_tiny_models
from ....generate.helpers import tiny_llama
from ... import helpers

# --- A request without a tree of its own ------------------------------------------------------------------------------


def draft(source, *texts):
    """The draft for a new request with this prompt and this output."""
    prompt, *outputs = (np.array(text) for text in texts)
    source.start("a", prompt)
    for output in outputs:
        source.observe("a", output)
    (tree,) = source.propose(["a"], [4])
    source.stop("a")
    return tree.best_chain().tokens.tolist()


def test_without_its_own_tree_a_request_repeats_nothing_of_itself():
    text = np.arange(40)
    source = GlobalTreeOnly(keep_outputs=False)
    assert draft(source, [*text, 3, 4]) == []
    assert draft(source, text, [3], [4]) == []
    assert draft(source, text, [3], [4]) == []  # nor of the request before
    assert draft(GlobalTreeOnly([np.array([3, 4, 9, 8])], keep_outputs=False), text, [3], [4]) == [9, 8]


def test_outputs_join_the_global_tree_when_they_end():
    source = GlobalTreeOnly()
    assert draft(source, [50, 51], [3, 4], [9, 8]) == []
    assert draft(source, [60, 51], [3]) == [4, 9, 8]
    assert draft(source, [60, 51])[:2] == [3, 4]  # how outputs begin is known, too


def test_the_global_tree_follows_the_contract():
    rng = np.random.default_rng(0)
    recordings = [Recording(rng.integers(0, 5, 30), rng.integers(0, 5, 30)) for _ in range(6)]
    listening = sources.Recording(GlobalTreeOnly())
    tally = Tally.of(6)
    for _ in Replayer(listening, batch_size=3).run(recordings, tally):
        pass
    assert not listening.errors and listening.is_idle
    assert tally.summary()["accepted_tokens"] > 0


# --- What is replayed -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limit", "num_earlier", "replayed", "before"),
    [(2, 3, "de", "abc"), (4, 9, "efgh", "abcd"), (9, 9, "efgh", "abcd")],  # half of them at most
)
def test_the_last_requests_are_replayed_and_those_before_are_known(tmp_path, limit, num_earlier, replayed, before):
    path = write(tmp_path / "set.jsonl.gz", [{"prompt": "say:", "response": letter} for letter in "abcdefgh"])
    tokenizer = byte_tokenizer()
    (split,) = read_splits([path], limit, num_earlier, tokenizer)
    assert split.name == "set" and [item.response for item in split.texts] == list(replayed)
    for recordings, letters in ((split.replayed, replayed), (split.earlier, before)):
        assert [tokenizer.decode(item.response) for item in recordings] == list(letters)
    assert tokenizer.decode(split.outputs[0]) == "say:\n" + before[0]


def without_spaces():
    """A tokenizer to which a response of spaces is none."""
    tokenizer = byte_tokenizer()
    tokenizer.backend_tokenizer.normalizer = normalizers.Strip()
    return tokenizer


def test_responses_without_tokens_are_left_out_with_their_texts(tmp_path):
    rows = [{"prompt": "say:", "response": letter} for letter in ("a", "b", "c", " ", "d", "  ")]
    (split,) = read_splits([write(tmp_path / "set.jsonl", rows)], 2, 9, tokenizer := without_spaces())
    assert [item.response for item in split.texts] == ["c", "d"]
    assert [tokenizer.decode(item.response) for item in split.replayed] == ["c", "d"]
    assert len(split.earlier) == 2
    with pytest.raises(UsageError, match="holds 1 responses that have tokens"):
        read_splits([write(tmp_path / "few.jsonl", rows[2:4])], 2, 9, tokenizer)


def test_files_that_cannot_be_split_are_refused(tmp_path):
    path = write(tmp_path / "set.jsonl", [{"prompt": "a", "response": "b"}])
    with pytest.raises(UsageError, match="holds 1 responses that have tokens"):
        read_splits([path], 5, 5, byte_tokenizer())
    with pytest.raises(UsageError, match="the same name"):
        read_splits([path, path], 5, 5, byte_tokenizer())


@pytest.fixture
def split(tmp_path):
    rows = [{"prompt": f"q{index}", "response": f"answer {index % 3} is {index}"} for index in range(40)]
    return read_splits([write(tmp_path / "set.jsonl", rows)], 5, 35, byte_tokenizer())[0]


@pytest.mark.parametrize("settings", [tree_settings, length_settings, size_settings, datastore_settings])
def test_every_setting_makes_a_source(split, settings):
    specs = settings(split)
    assert len({(spec.name, spec.text) for spec in specs}) == len(specs)
    for number, spec in enumerate(specs):
        source, tally = spec.build(), Tally.of(2)
        if not number % 3 or IS_EXHAUSTIVE:
            for _ in Replayer(source, spec.num_nodes).run(split.replayed[:2], tally):
                pass
            assert tally.summary()["requests"] == 2


def test_larger_trees_hold_more_of_the_earlier_outputs(split):
    specs = size_settings(split)
    assert [spec.text for spec in specs] == ["0", "10", "30"]
    tokens = [spec.build().num_cached_tokens() for spec in specs]
    assert tokens[0] == 0 < tokens[1] < tokens[2] < sum(map(len, split.outputs))


def said(claim):
    return f"{claim.text}: {'yes' if claim.holds else 'no'}, {claim.detail}"


# --- Claims -----------------------------------------------------------------------------------------------------------


def test_claims_say_whether_and_how_much():
    assert (
        said(ratio_claim("A is better", {"x": 1.25, "y": 1.25, "z": 0.64}))
        == "A is better: no, +0% (in 2 of 3 data sets)"
    )
    assert said(ratio_claim("A is better", {"x": 1.21, "y": 1.1})) == "A is better: yes, +15% (in 2 of 2 data sets)"
    assert not ratio_claim("A is better", {"x": 4.0, "y": 1.0}).holds  # in one of two data sets
    assert said(ratio_claim("A is better", {"x": 0.5})) == "A is better: no, -50% (in 0 of 1 data set)"
    assert not ratio_claim("A is about the same", {"x": 1.5}, least=0.9, most=1.1).holds
    assert said(count_claim("B", {"x": True, "y": False})) == "B: no, in 1 of 2 data sets"


def numbers(tokens_per_step, **others):
    return {"tokens_per_step": tokens_per_step, "accepted_per_step": tokens_per_step - 1, **others}


def curve(*points):
    return {
        str(index): {"drafted_per_step": drafted, "accepted_per_step": accepted, "acceptance_rate": accepted / drafted}
        for index, (drafted, accepted) in enumerate(points)
    }


def counts(unsure, sure):
    return {"0.2": {"count": unsure}, "0.9": {"count": sure}}


# Figures of one data set in which every claim of an ablation holds, and such in which none does.
FIGURES = {
    "tree": (
        {"trees": {"per request": numbers(1.5), "global": numbers(2.0), "both": numbers(2.1)}},
        {"trees": {"per request": numbers(2.0), "global": numbers(1.5), "both": numbers(1.9)}},
    ),
    "length": (
        {"alpha": curve((1, 0.5), (4, 1.6)), "fixed": curve((1, 0.4), (4, 1.5)), "learned": curve((1, 0.6), (4, 1.7))},
        {"alpha": curve((1, 0.5), (4, 0.4)), "fixed": curve((1, 0.6), (4, 0.9)), "learned": curve((1, 0.1), (4, 0.2))},
    ),
    "size": (
        {"size": {str(n): numbers(1 + n, acceptance_rate=0.5, us_per_node=9 + n) for n in range(3)}},
        {"size": {str(n): numbers(3 - n, acceptance_rate=0.5 / (1 + n), us_per_node=1 + n * n)
                  for n in range(3)}},
    ),
    "shift": (
        {"second half": {"kept": numbers(2.0), "frozen": numbers(1.5), "fresh": numbers(2.05)}},
        {"second half": {"kept": numbers(2.0), "frozen": numbers(2.1), "fresh": numbers(2.5)}},
    ),
    "datastore": (
        {"sources": {"own text": numbers(2.0), "datastore": numbers(2.0), "both": numbers(2.95),
                     "SSSD": numbers(2.5), "REST": numbers(2.0), "PIA": numbers(2.4)}},
        {"sources": {"own text": numbers(2.0), "datastore": numbers(2.0), "both": numbers(1.9),
                     "SSSD": numbers(2.0), "REST": numbers(2.1), "PIA": numbers(1.4)}},
    ),
    "temperature": (
        {"SSSD": {"0": numbers(2.0), "0.5": numbers(2.0), "1": numbers(1.99), "2": numbers(1.8)}},
        {"SSSD": {"0": numbers(2.0), "0.5": numbers(2.0), "1": numbers(1.8), "2": numbers(1.9)}},
    ),
    "confidence": (
        {"accepted": counts(1, 8), "rejected": counts(3, 1)},
        {"accepted": counts(2, 2), "rejected": counts(3, 4)},
    ),
    "hybrid": (
        {"tau": {"suffix": numbers(2.0, speed_up=2.0), "learned": numbers(3.0, speed_up=2.5),
                 "draft": numbers(2.5, speed_up=1.1)}},
        {"tau": {"suffix": numbers(2.0, speed_up=2.0), "learned": numbers(1.9, speed_up=1.5),
                 "draft": numbers(2.5, speed_up=1.1)}},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FIGURES)
def test_claims_are_computed_from_the_figures(name):
    check = getattr(ablation_claims, f"{name}_claims")
    holding, failing = FIGURES[name]
    assert [claim.text for claim in check({"x": holding}) if not claim.holds] == []
    assert [claim.text for claim in check({"x": failing}) if claim.holds] == []


# --- The command ------------------------------------------------------------------------------------------------------

TABLE = [{"prompt": f"find row {i}: ", "response": f"SELECT name FROM table WHERE row = {i}"} for i in range(30)]
CHAT = [{"prompt": f"say {i}: ", "response": f"well, {i} it is, or so they say {i}"} for i in range(30)]


@pytest.fixture
def bench(monkeypatch, tmp_path, capsys):
    """Calls the command on two small files, with a tokenizer of bytes; returns (status, out, err)."""
    monkeypatch.setenv("COLUMNS", "200")
    for name, value in (("PROMPTS", 2), ("PROMPT_LEN", 40), ("NEW_TOKENS", 12)):
        monkeypatch.setattr(ablation_runs, f"_HYBRID_{name}", value)
    save_tiny_models(tmp_path)
    files = [write(tmp_path / "table.jsonl.gz", TABLE), write(tmp_path / "chat.jsonl", CHAT)]

    def call(*arguments, files=files):
        fixed = ["--tokenizer", tmp_path / "target", "--limit", "6", "--earlier", "20"]
        return helpers.bench("sources", *files, *fixed, *arguments), *capsys.readouterr()

    return call


@pytest.mark.end_to_end
def test_every_ablation_is_measured_judged_and_drawn(bench, tmp_path):
    pytest.importorskip("matplotlib", reason="figures are optional")
    path, folder = tmp_path / "report.json", tmp_path / "plots"
    status, out, _ = bench("--models", tmp_path, "--json", path, "--plots", folder)
    report = json.loads(path.read_text())
    assert list(report["results"]) == list(ablation.ABLATIONS) and not report["failures"]
    assert report["data_sets"]["table"] == {"earlier": 20, "replayed": 6}
    figures = {name: {key: row["figures"] for key, row in rows.items()} for name, rows in report["results"].items()}
    claims = []
    for name, item in ablation.ABLATIONS.items():
        assert (folder / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        assert item.title in out
        for claim in item.claims(figures[name]):
            assert f"{'yes' if claim.holds else 'NO '} {claim.text}: {claim.detail}" in out
            claims.append(claim.holds)
    assert status == (0 if all(claims) else 1) and len(claims) > 10
    trees = figures["trees"]["table"]["trees"]
    assert trees["both"]["tokens_per_step"] > trees["per request"]["tokens_per_step"]
    assert trees["global"]["tokens_per_step"] > trees["neither"]["tokens_per_step"]
    assert list(figures["size"]["chat"]["size"]) == ["0", "10"]
    shift = figures["shift"]["table > chat"]
    assert shift["second half"]["kept"]["tokens_per_step"] > shift["second half"]["frozen"]["tokens_per_step"]
    assert [len(shift["means"][name]["moving_mean"]) for name in ("before", "kept", "fresh")] == [6, 26, 26]
    assert all(numbers["speed_up"] > 0 for numbers in figures["hybrid"]["chat"]["tau"].values())


def test_accepted_tokens_over_the_temperature(bench, tmp_path):
    """SSSD, section 4.2: answers are sampled by the target, and drafts accepted where they hold the sampled tokens."""
    path = tmp_path / "report.json"
    _, out, _ = bench("--only", "temperature", "--models", tmp_path, "--json", path)
    assert "SSSD: accepted tokens per step" in out
    (row, _) = json.loads(path.read_text())["results"]["temperature"].values()
    for settings in row["figures"].values():
        assert list(settings) == ["0", "0.5", "1", "2"]
        assert all(numbers["generated_tokens"] > 0 for numbers in settings.values())


def test_confidences_of_accepted_and_rejected_tokens(bench, tmp_path):
    """SmartSpec, figure 17: all judged tokens of the draft model's chains, by the probability that it gave them."""
    path = tmp_path / "report.json"
    _, out, _ = bench("--only", "confidence", "--models", tmp_path, "--json", path)
    assert "accepted: share of all accepted" in out
    (row, _) = json.loads(path.read_text())["results"]["confidence"].values()
    for bins in row["figures"].values():
        assert list(bins) == [f"0.{first}" for first in range(10)]
        assert sum(numbers["share"] for numbers in bins.values()) == pytest.approx(1.0)


def test_a_draft_model_that_is_the_target_is_accepted_for_certain():
    model = tiny_llama(eos_token_id=None)
    prompt = torch.tensor([[5, 9, 5, 9]])
    answer = model.generate(prompt, max_new_tokens=13, do_sample=False, eos_token_id=None)[0, 4:].numpy()
    bins = ablation_runs._confidences(model, [Recording(prompt[0].numpy(), answer)])
    counts = {name: sum(numbers["count"] for numbers in line.values()) for name, line in bins.items()}
    assert counts == {"rejected": 0, "accepted": 5 + 5 + 1}, "the target's own token comes after each draft"


def test_one_file_has_no_shift(bench, tmp_path):
    path = write(tmp_path / "alone.jsonl", CHAT)
    status, out, _ = bench("--only", "trees", files=[path])
    assert status == (1 if "NO" in out else 0) and "trees:" in out and "size:" not in out
    status, _, err = bench("--only", "shift", files=[path])
    assert status == 2 and "--only shift: a shift needs two files" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--only", "nonsense"), "invalid choice"),
        (("--limit", "0"), "at least 1"),
        (("--models", "/no/such/folder"), "holds no model"),
        (("--json", "/no/such/folder/file"), "cannot write"),
        (("--plots", "/dev/null/plots"), "cannot make the folder"),
    ],
)
def test_bad_arguments_are_refused(bench, arguments, message):
    status, _, err = bench(*arguments)
    assert status == 2 and message in err


def test_a_hybrid_without_models_is_left_out_or_refused(bench, monkeypatch):
    monkeypatch.setattr(ablation, "find_demo", lambda: None)
    status, _, err = bench("--only", "hybrid")
    assert status == 2 and "--only hybrid: hybrid needs --models" in err


@pytest.mark.parametrize("name", ["figure.xyz", "no such folder/figure.png"])
def test_a_figure_that_cannot_be_written_is_an_error_of_one_line(tmp_path, name):
    pytest.importorskip("matplotlib", reason="figures are optional")
    with pytest.raises(UsageError, match="cannot write"):
        draw(tmp_path / name, 1, lambda figure, axes: None)


def test_a_missing_matplotlib_is_explained(bench, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    status, _, err = bench("--plots", tmp_path / "plots")
    assert status == 2 and "--plots needs matplotlib" in err


def test_interrupted_what_is_done_is_written(bench, tmp_path, monkeypatch):
    def interrupt(workload):
        raise KeyboardInterrupt

    monkeypatch.setitem(ablation.ABLATIONS, "size", ablation.ABLATIONS["size"]._replace(cases=interrupt))
    path = tmp_path / "report.json"
    status, out, _ = bench("--only", "trees", "size", "--json", path)
    assert status == cli.INTERRUPTED and "trees:" in out
    assert list(json.loads(path.read_text())["results"]) == ["trees"]
