"""The demo, run through its own entry point on tiny models."""

import json
import re
import sys
from pathlib import Path

import pytest
import torch
from transformers.utils import logging
from transformers.utils.logging import set_verbosity_error

from hf_smartspec.decoding.call import Request
from tests.folders import save_tiny_models

DEMOS = Path(__file__).resolve().parents[2] / "demos"
SHORT = ["--num-prompts", "3", "--max-new-tokens", "10", "--repetitions", "1", "--threads", "1", "--device", "cpu"]
SHORT += ["--dtype", "float32"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny_models(tmp_path_factory.mktemp("models"))


@pytest.fixture
def demo(monkeypatch):
    monkeypatch.syspath_prepend(str(DEMOS))
    import demo

    verbosity = logging.get_verbosity()
    yield demo
    logging.set_verbosity(verbosity)
    logging.enable_progress_bar()
    for name in ("demo", "compare"):
        del sys.modules[name]


@pytest.fixture
def prompts(tmp_path):
    rows = [
        {"category": "math", "prompt": "1 + 1 = 2, 2 + 2 ="},
        {"category": "math", "prompt": "3 + 3 ="},
        {"category": "code", "prompt": "def f(x): return x"},
    ]
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.fixture
def arguments(folder, prompts):
    """Tiny models, and what keeps the demo short."""
    models = ["--target", str(folder / "target"), "--draft", str(folder / "draft")]
    return [*models, "--prompts", str(prompts), *SHORT]


@pytest.mark.end_to_end
def test_demo_streams_measures_and_compares(demo, arguments, tmp_path, capsys):
    file = tmp_path / "results.json"
    assert demo.main([*arguments, "--dtype", "float32", "bfloat16", "--json", str(file)]) == 0
    out = capsys.readouterr().out
    assert "1 + 1 = 2" in out and "drafted tokens accepted" in out
    text = " ".join(out.split())  # lines are as long as the terminal is wide
    assert "float32: 24 of 24 greedy rows and 3 of 3 sampled have the tokens of plain generate" in text
    assert re.search(r"bfloat16: \d+ of 24 greedy rows and . of 3 sampled have the tokens of ours without drafts", text)
    assert max(map(len, out.splitlines())) <= 100

    results = json.loads(file.read_text())["results"]
    by_name = {(item["name"], item["dtype"], item["batch_size"]): item for item in results}
    assert len(by_name) == len(results) == 28
    for name in ("transformers, draft model", "transformers, prompt lookup"):
        assert by_name[name, "float32", 1]["refusal"] is None
        assert "batch_size = 1" in by_name[name, "float32", 3]["refusal"]
    for item in results:
        if item["refusal"] is None:
            assert item["num_tokens"] > 0 and len(item["seconds"]) == 1
            assert item["dtype"] != "float32" or item["num_different_rows"] == 0
    item = by_name["ours, draft model", "float32", 1]
    assert 0 < item["num_accepted"] < item["num_drafted"]
    # Every step of a row yields one token besides those that it accepts.
    assert item["num_accepted"] + item["num_steps"] == item["num_tokens"]


def test_speeds_are_relative_to_plain_decoding_of_the_same_turn_and_prompts(demo):
    from compare import Result

    rows = [[[1, 2], [3, 4]]] * 3
    plain = Result("", "float32", 1, False, seconds=[[1.0, 4.0], [2.0, 2.0], [9.0, 9.0]], rows=rows)
    own = Result("", "float32", 1, True, seconds=[[1.0, 1.0], [1.0, 2.0], [3.0, 3.0]], rows=rows)
    assert own.speedup(plain) == 2.5 and own.speedup(plain, [0]) == 2 and own.speedup(plain, [1]) == 3
    assert plain.tokens_per_second == 4 / 5 and plain.spread == 5 / 4
    assert own.num_different(plain) == 0
    own.rows = [[[1, 2], [3, 4]], [[1, 2], [3]], [[1], [3]]]
    assert own.num_different(plain) == 2 and own.num_tokens() == 2


def test_the_real_model_is_the_default_where_no_argument_belongs_to_another(demo, monkeypatch):
    def chosen(*arguments):
        args = demo.parse_args(list(arguments))
        demo.choose_models(args)
        return Path(args.target).name, args.draft and Path(args.draft).name, args.parameters, args.prompts.name

    monkeypatch.setattr(demo, "real_model", lambda: "/cache/SmolLM2")
    assert chosen() == ("SmolLM2", None, None, "real_prompts.jsonl")
    assert chosen("--target", "other") == ("other", None, None, "real_prompts.jsonl")
    assert chosen("--target", "other", "--parameters", "3e8")[2] == 3e8
    assert chosen("--parameters", "0") == ("target", "draft", 0, "prompts.jsonl")
    assert chosen("--draft", "other") == ("target", "other", 200e6, "prompts.jsonl")
    monkeypatch.setattr(demo, "real_model", lambda: None)
    assert chosen() == ("target", "draft", 200e6, "prompts.jsonl")


def test_the_output_says_why_the_embedded_models_serve(demo, monkeypatch):
    def title(*arguments):
        args = demo.parse_args(list(arguments))
        demo.choose_models(args)
        return demo.title(args, [{"category": "math"}, {"category": "code"}], [[1, 2], [3]])

    prompts = ": 2 prompts (math, code), 1 to 2 tokens"
    monkeypatch.setattr(demo, "real_model", lambda: None)
    assert title("--target", "folder/other") == "other" + prompts
    assert title("--parameters", "0") == "the embedded models" + prompts
    why = "since SmolLM2-135M-Instruct is not here (`make setup` fetches it)"
    assert title() == f"the embedded models, {why}{prompts}"


def test_demo_measures_an_enlarged_target(demo, arguments, capsys):
    assert demo.main([*arguments, "--parameters", "1e5"]) == 0
    out = capsys.readouterr().out
    assert "cost-matched" in out and "target 0.1 M" in out and "24 of 24 greedy rows" in out
    assert demo.main([*arguments, "--parameters", "3"]) == 2
    assert "num_parameters" in capsys.readouterr().err


def test_demo_fails_where_ours_differ(demo, arguments, monkeypatch, capsys):
    append = Request.append
    monkeypatch.setattr(Request, "append", lambda row, token: append(row, 7 if row.num_generated == 4 else token))
    monkeypatch.setattr(Request, "extend", lambda row, tokens: [row.append(token) for token in tokens])
    assert demo.main(arguments) == 1
    out = capsys.readouterr().out
    # A row may hold the planted token anyway: which rows differ depends on the random weights.
    assert re.search(r"\d of 6 ", out) and "24 of 24" not in out


def test_drafts_are_left_as_they_were(demo, folder, prompts):
    from compare import Method, compare
    from hf_smartspec.commands.common.models import load_model

    set_verbosity_error()  # transformers' own assisted decoding announces a deprecation of its own
    target, draft = (load_model(str(folder / name)) for name in ("target", "draft"))
    before = draft.generation_config.to_dict()
    compare(target, [Method("", {}), Method("", {"assistant_model": draft})], [[5, 6, 7]], 1, 6, repetitions=1)
    assert draft.generation_config.to_dict() == before


def test_nothing_is_remembered_from_turn_to_turn(demo, folder):
    from compare import Method, ready_for
    from hf_smartspec.commands.common.models import load_model
    from hf_smartspec.prepare.presets import suffix_trees

    model, auto = load_model(str(folder / "target")), Method("ours, auto", {"assistant": "auto"})
    with ready_for(model, auto):
        model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=6, pad_token_id=0, **auto.arguments)
    assert suffix_trees(model).num_cached_tokens() > 0
    with ready_for(model, auto):
        assert suffix_trees(model).num_cached_tokens() == 0


def test_categories_take_turns(demo):
    rows = [{"category": name, "prompt": str(i)} for i, name in enumerate("aaabbc")]
    assert [row["category"] for row in demo.pick_rows(rows, 5)] == ["a", "b", "c", "a", "b"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["--prompts", "/no/prompts.jsonl"], "cannot read"),
        (["--target", "./no-target"], "no such model folder: './no-target'"),
        (["--draft", "./no-draft"], "no such model folder: './no-draft'"),
    ],
)
def test_what_is_missing_gets_one_line(demo, arguments, changes, message, capsys):
    assert demo.main([*arguments, *changes]) == 2
    err = capsys.readouterr().err
    assert message in err and err.count("\n") == 1


def test_bad_numbers_are_refused(demo, capsys):
    with pytest.raises(SystemExit) as error:
        demo.main(["--repetitions", "0"])
    assert error.value.code == 2
    assert "--repetitions must be at least 1, got 0" in capsys.readouterr().err


def test_ctrl_c(demo, arguments, monkeypatch, capsys):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "stream_answer", interrupted)
    assert demo.main(arguments) == 130
    assert capsys.readouterr().err == "demo.py: interrupted\n"


def test_the_prompts_of_the_real_model_are_of_six_kinds_and_small(demo):
    file = DEMOS / "real_prompts.jsonl"
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    assert {row["category"] for row in demo.pick_rows(rows, 8)} == {"chat", "summary", "math", "code", "sql", "edit"}
    assert len({row["id"] for row in rows}) == len(rows) == 24 and file.stat().st_size < 20_000
    page = (DEMOS / "prompts.md").read_text(encoding="utf-8")
    assert {row["licence"] for row in rows} <= {
        licence for licence in ("MIT", "Apache-2.0", "CC BY 4.0", "CC BY-SA 4.0")
    }
    assert all(row["licence"] in page for row in rows)


@pytest.mark.end_to_end
def test_the_real_model_is_measured_with_its_heads(demo, real_folder, tmp_path, capsys):
    file = tmp_path / "results.json"
    short = ["--num-prompts", "1", "--max-new-tokens", "12", "--repetitions", "1", "--threads", "1", "--device", "cpu"]
    assert demo.main([*short, "--dtype", "float32", "--json", str(file)]) == 0
    results = json.loads(file.read_text())["results"]
    printed = capsys.readouterr().out
    for name in ("ours, EAGLE-3", "ours, auto and EAGLE-3"):
        (item,) = [item for item in results if item["name"] == name]
        assert item["num_different_rows"] == 0 and name in printed
