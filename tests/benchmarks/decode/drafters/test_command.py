"""`python -m benchmarks drafters` on a tiny target: what it measures, goes on with, and refuses."""

import json

import pytest
from transformers import AutoModelForCausalLM

from benchmarks.decode.drafters import command, runs
from benchmarks.decode.drafters.report import block_claims, flat
from hf_smartspec.commands.speed.loop import PLAIN
from hf_smartspec.training.eagle import new_heads
from hf_smartspec.training.new_blocks import new_drafter
from tests.folders import save_tiny_models

from ....commands.helpers import save_fitted_heads
from ... import helpers

SHORT = ["--device", "cpu", "--threads", "1", "--max-new-tokens", "10", "--limit", "2", "--dtype", "float32"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = save_tiny_models(tmp_path_factory.mktemp("models"))
    save_fitted_heads(folder, [f"{n} and {n} an" for n in range(9)])
    for name in ("first", "second"):
        rows = [{"prompt": f"{n} and {n} an", "category": name} for n in range(3)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def call(folder, *arguments):
    files = [folder / "first.jsonl", folder / "second.jsonl"]
    return helpers.bench("drafters", *files, "--model", folder / "target", *SHORT, *arguments)


def drafters(folder, *more):
    return ["--drafters", "suffix", folder / "draft", folder / "medusa", f"suffix+{folder / 'medusa'}", *more]


@pytest.mark.end_to_end
def test_all_parts(folder, tmp_path, capsys):
    out, page = tmp_path / "results.json", tmp_path / "page.md"
    options = ["--nodes", "3", "6", "--batch-size", "1", "4", "--parameters", "300000", "--markdown", page]
    assert call(folder, *drafters(folder), *options, "--json", out) == 0
    report = json.loads(out.read_text())
    rows = {(row["part"], row["kind"], row["batch_size"], row["nodes"], row["drafter"]): row for row in flat(report)}
    names = ["suffix", "draft", "medusa", "suffix+medusa"]
    for kind in ("first", "second"):
        assert all(("steps", kind, 1, nodes, name) in rows for nodes in (3, 6) for name in ["none", PLAIN, *names])
        assert all(rows["speed", kind, 1, 0, name]["speedup"] > 0 for name in names)
        assert ("trees", kind, 1, 6, "medusa, the best fixed tree") in rows
    assert all(rows["speed", "mixed", 4, 0, name]["statistics"]["steps"] > 0 for name in names)
    assert not any(row["num_different"] or row["num_tied"] for row in flat(report))
    for name in ("draft", "medusa"):
        counts = rows["steps", "first", 1, 6, name]["statistics"]
        assert counts["accepted_tokens"] > 0 and counts["seconds_draft"] > 0
        assert counts["drafted_tokens"] <= 6 * counts["steps"]
    assert report["environment"]["is_enlarged"] and report["drafters"]["medusa"] > 0
    shown, text = capsys.readouterr().out, page.read_text()
    for title in ("Tokens per step", "Medusa heads", "cost-matched to 0 M parameters"):
        assert title in text and title.split()[0] in shown
    assert "| suffix+medusa | 6 |" in text and "x draft" in text and "NO" not in text


def test_blocks_stand_beside_heads_that_draft_for_as_long(folder, tmp_path, capsys):
    target = AutoModelForCausalLM.from_pretrained(folder / "target")
    new_drafter(target, 1, "dspark", block_size=3, num_layers=1, neurons=8).save_pretrained(folder / "blocks")
    new_heads(target, neurons=8).save_pretrained(folder / "eagle")
    out = tmp_path / "results.json"
    names = ["--drafters", folder / "eagle", folder / "blocks", "suffix"]
    options = ["--parts", "blocks", "--nodes", "6", "--levels", "1", "4", "--batch-size", "4"]
    status = call(folder, *names, *options, "--json", out)
    rows = flat(json.loads(out.read_text()))
    (claim,) = block_claims(rows)
    assert status == (0 if claim.holds else 1)
    assert not any(row["num_different"] for row in rows)
    drafts = {row["drafter"]: row for row in rows}
    own = ["blocks, chain of 3 levels, 3 nodes", "blocks, tree of 3 levels, 6 nodes", "blocks, goodput decides"]
    others = [f"eagle, {form}" for form in ("chain of 1 levels, 1 nodes", "tree of 4 levels, 6 nodes")]
    assert {"none", PLAIN, *own, *others, "eagle, goodput decides"} <= set(drafts)
    assert all(row["tokens_per_second"] > 0 and row["batch_size"] == 4 for row in rows)
    own += [f"blocks, chain of a {size} block of 1 levels, 1 nodes" for size in ("short", "whole")]
    for name in (*own[:2], *own[3:]):
        counts = drafts[name]["statistics"]
        assert 0 < counts["drafted_tokens"] <= counts["steps"] * int(name.split()[-2])
    shown = " ".join(capsys.readouterr().out.split())
    for text in ("Blocks, batch 4", "equal drafting time", "1.15 x the tokens per step of its chains, batch 4"):
        assert text in shown


def test_the_part_of_blocks_needs_a_block_drafter(folder, monkeypatch, capsys):
    monkeypatch.setattr(runs, "measure", None)
    assert call(folder, "--drafters", "suffix", "--parts", "blocks") == 2
    assert "no block drafter is among --drafters" in capsys.readouterr().err


def test_other_options_are_no_resumption(folder, tmp_path, capsys):
    out = tmp_path / "results.json"
    options = ["--drafters", "suffix", "--parts", "steps", "--json", out]
    assert call(folder, *options, "--nodes", "4") == 0
    assert call(folder, *options, "--nodes", "5", "--resume") == 2
    assert "other versions or options" in capsys.readouterr().err


def test_what_differs_ends_with_an_error(folder, tmp_path, monkeypatch):
    monkeypatch.setattr("benchmarks.decode.drafters.runs.num_different", lambda tally: 1)
    assert call(folder, "--drafters", "suffix", "--parts", "steps", "--nodes", "4") == 1


def test_what_was_measured_is_shown_and_kept_if_interrupted(folder, tmp_path, monkeypatch, capsys):
    out, measure = tmp_path / "results.json", command.DrafterBench._measured

    def interrupted(self, target, methods, data, *rest):
        if data.name == "second":
            raise KeyboardInterrupt
        return measure(self, target, methods, data, *rest)

    monkeypatch.setattr(command.DrafterBench, "_measured", interrupted)
    assert call(folder, *drafters(folder), "--json", out) == 130
    assert {row["kind"] for row in flat(json.loads(out.read_text()))} == {"first"}
    assert "Tokens per step" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--drafters", "nonsense"], "--drafters: Unknown `assistant` preset 'nonsense'"),
        (["--drafters", "./nowhere"], "nowhere"),
        (["--kinds", "third"], "--kinds: no ['third'] among ['first', 'second']"),
        (["--drafters", "a/medusa", "b/medusa"], "'a/medusa' and 'b/medusa' are both shown as 'medusa'"),
        (["--resume"], "--resume goes with --json"),
        (["--nodes", "0"], "at least 1"),
        (["--json", "/nowhere/x.json"], "cannot write"),
    ],
)
def test_refusals(folder, capsys, options, message):
    assert call(folder, *options) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_what_was_trained_for_the_demo_is_found(folder, tmp_path, monkeypatch):
    models = tmp_path / "models"
    models.mkdir()
    for name in ("target", "medusa", "draft"):
        (models / name).symlink_to(folder / name)
    (models / "notes").mkdir()
    monkeypatch.setattr(command, "find_demo", lambda: tmp_path)
    names = [str(models / name) for name in ("draft", "medusa")]
    assert command.default_names() == ["suffix", *names, *(f"suffix+{name}" for name in names)]
    monkeypatch.setattr(command, "find_demo", lambda: None)
    assert command.default_names() == ["suffix"]
