"""`python -m benchmarks published`: run end to end on a tiny model, and its claims."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks.decode.published.arguments import Way
from benchmarks.decode.published.command import claims, speed_ups
from hf_smartspec.goodput import BatchLookupTable
from hf_smartspec.target_model.cost import profiling
from hf_smartspec.target_model.cost.tables import keep_table
from tests.folders import save_tiny_models

from ...commands.helpers import save_fitted_heads
from .. import helpers

TINY = ["--dtype", "float32", "--device", "cpu", "--max-new-tokens", "8", "--batch-sizes", "1", "3"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = save_tiny_models(tmp_path_factory.mktemp("models"))
    prompts = [f"{n} and {n} and" for n in range(8)]
    (folder / "data.jsonl").write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    save_fitted_heads(folder, prompts)
    return folder


def call(folder, *arguments):
    return helpers.bench("published", folder / "data.jsonl", "--model", folder / "target", *TINY, *arguments)


def test_ways_are_compared_at_every_batch_size(folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(profiling, "HF_HOME", str(tmp_path / "home"))
    model = AutoModelForCausalLM.from_pretrained(folder / "target", dtype=torch.float32)
    keep_table(model, "prompt_lookup", BatchLookupTable({1: 3, 2: 1}))
    heads, path = folder / "medusa", tmp_path / "results.json"
    ways = ["sssd@roofline", "prompt_lookup@k=2", "prompt_lookup@table", "suffix_decoding@nodes=64", f"auto+{heads}"]
    asked = ["--remember", "3", "--ways", *ways, "--json", path, "--plot", tmp_path / "plot.svg"]
    assert call(folder, *asked) in (0, 1), "tiny models gain nothing"
    rows = json.loads(path.read_text())["results"]["published"]
    shown = ["none", *ways[:-1], "auto+medusa"]
    assert list(rows) == [f"batch {size}, {way}" for size in (1, 3) for way in shown]
    assert len({tuple(row["checksums"]) for row in rows.values()}) == 1, "no way changes what is generated"
    assert len(rows["batch 1, none"]["checksums"]) == 5 and rows["batch 1, none"]["per_step"] == 1
    assert rows["batch 1, auto+medusa"]["per_step"] > 1
    out = capsys.readouterr().out
    assert "yes all outputs are those of none" in out and "prompt_lookup@table is not slower than the best" in out


def row(way, size, per_token, checksums=(1, 2)):
    return {"way": way, "batch_size": size, "per_token": per_token, "checksums": list(checksums)}


def judged(*rows, is_exact=False):
    ways = [Way("none"), Way("pld", "k=2"), Way("pld", "table"), Way("auto")]
    found = claims(dict(enumerate(rows)), ways, 0.03, is_exact)
    return [claim.holds for claim in found]


def test_no_way_that_the_auction_decides_may_be_slower_than_none():
    ways = [Way("none"), Way("pld", "k=2"), Way("heads"), Way("auto")]
    rows = [row("none", 1, 4.0), row("pld@k=2", 1, 5.0), row("heads", 1, 4.2), row("auto", 1, 2.0)]
    found = claims(dict(enumerate(rows)), ways, 0.03, is_exact=False)
    assert [claim.text for claim in found if not claim.holds] == ["heads is not slower than none at any batch size"]
    found = claims(dict(enumerate(rows)), ways[:2], 0.03, is_exact=False)
    assert [claim.holds for claim in found] == [False], "the default, though its policy is given"


def test_the_default_must_not_be_slower():
    plain = [row("none", 1, 4.0), row("none", 4, 4.0)]
    cells = {"none": {1: plain[0], 4: plain[1]}, "auto": {1: row("auto", 1, 2.0)}}
    assert speed_ups(cells, "auto") == {1: 2.0}, "batch sizes that both have"
    assert judged(*plain, row("auto", 1, 2.0), row("auto", 4, 4.1)) == [True], "noise counts for nothing"
    assert judged(*plain, row("auto", 1, 2.0), row("auto", 4, 4.2)) == [False]
    table, fixed = row("pld@table", 1, 3.0), row("pld@k=2", 1, 2.5)
    assert judged(plain[0], fixed, table, row("auto", 1, 2.8)) == [True, False, True, False]
    assert judged(plain[0], row("auto", 1, 2.0, (1, 3)), is_exact=True) == [True, False]


@pytest.mark.parametrize(
    ("ways", "message"),
    [
        (["auto@often"], "must be DRAFTER or DRAFTER@POLICY with one of roofline"),
        (["auto@"], "must be DRAFTER or"),
        (["auto@k=0"], "must be DRAFTER or"),
        (["nonsense"], "--ways: "),
        (["./nowhere"], "nowhere"),
        (["pld@table"], "no look-up table for drafts of 'prompt_lookup'"),
    ],
)
def test_ways_that_mean_nothing(folder, capsys, ways, message):
    assert call(folder, "--ways", *ways) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
