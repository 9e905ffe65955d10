"""The demo, run through its own entry point on tiny models."""

import json
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
SHORT += ["--parameters", "0"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny_models(tmp_path_factory.mktemp("models"))


@pytest.fixture
def demo(monkeypatch):
    monkeypatch.syspath_prepend(str(DEMOS))
    import demo

    threads, verbosity = torch.get_num_threads(), logging.get_verbosity()
    yield demo
    torch.set_num_threads(threads)
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


def test_demo_streams_measures_and_compares(demo, folder, prompts, tmp_path, capsys):
    file = tmp_path / "results.json"
    assert demo.main(["--models", str(folder), "--prompts", str(prompts), *SHORT, "--json", str(file)]) == 0
    out = capsys.readouterr().out
    assert "1 + 1 = 2" in out and "drafted tokens accepted" in out
    assert "Ours: plain generate's tokens in every row." in out
    assert max(map(len, out.splitlines())) <= 100

    results = json.loads(file.read_text())["results"]
    by_name = {(item["name"], item["batch_size"]): item for item in results}
    assert len(by_name) == len(results) == 14
    for name in ("transformers, draft model", "transformers, prompt lookup"):
        assert by_name[name, 1]["refusal"] is None
        assert "batch_size = 1" in by_name[name, 3]["refusal"]
    for item in results:
        if item["refusal"] is None:
            assert item["num_different_rows"] == 0 and item["num_tokens"] > 0 and len(item["seconds"]) == 1
    for name in ("transformers, draft model", "ours, draft model", "ours, draft model, trees"):
        item = by_name[name, 1]
        assert 0 < item["num_accepted"] < item["num_drafted"]
        assert item["mean_accepted_length"] > 1
        # Every step of a row yields one token besides those that it accepts.
        assert item["num_accepted"] + item["num_steps"] == item["num_tokens"]
    assert by_name["plain generate", 1]["mean_accepted_length"] == 1


def test_demo_enlarges_the_embedded_target_only(demo):
    assert demo.parse_args([]).parameters == 200e6
    assert demo.parse_args(["--target", "other"]).parameters == 0
    assert demo.parse_args(["--target", "other", "--parameters", "3e8"]).parameters == 3e8


def test_demo_measures_an_enlarged_target(demo, folder, prompts, capsys):
    arguments = ["--models", str(folder), "--prompts", str(prompts), *SHORT, "--parameters"]
    assert demo.main([*arguments, "1e5"]) == 0
    out = capsys.readouterr().out
    assert "cost-matched" in out
    assert "Target 0.1 M parameters" in out and "Ours: plain generate's tokens in every row." in out
    assert demo.main([*arguments, "3"]) == 2
    assert "num_parameters" in capsys.readouterr().err


def test_demo_fails_where_ours_differ(demo, folder, prompts, monkeypatch, capsys):
    append = Request.append
    monkeypatch.setattr(Request, "append", lambda row, token: append(row, 7 if row.num_generated == 4 else token))
    monkeypatch.setattr(Request, "extend", lambda row, tokens: [row.append(token) for token in tokens])
    assert demo.main(["--models", str(folder), "--prompts", str(prompts), *SHORT]) == 1
    out = capsys.readouterr().out
    # A row may hold the planted token anyway: which rows differ depends on the random weights.
    assert "rows of ours differ" in out and "no: " in out


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
    ("arguments", "message"),
    [
        (["--models", "/no/models"], "no models in /no/models"),
        (["--prompts", "/no/prompts.jsonl"], "cannot read"),
        (["--target", "./no-target", "--draft", "./no-draft"], "no such model folder: './no-target'"),
    ],
)
def test_what_is_missing_gets_one_line(demo, folder, prompts, arguments, message, capsys):
    defaults = ["--models", str(folder), "--prompts", str(prompts), *SHORT]
    assert demo.main([*defaults, *arguments]) == 2
    err = capsys.readouterr().err
    assert message in err and err.count("\n") == 1


def test_bad_numbers_are_refused(demo, capsys):
    with pytest.raises(SystemExit) as error:
        demo.main(["--repetitions", "0"])
    assert error.value.code == 2
    assert "--repetitions must be at least 1, got 0" in capsys.readouterr().err


def test_ctrl_c(demo, folder, prompts, monkeypatch, capsys):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "stream_answer", interrupted)
    assert demo.main(["--models", str(folder), "--prompts", str(prompts), *SHORT]) == 130
    assert capsys.readouterr().err == "demo.py: interrupted\n"
