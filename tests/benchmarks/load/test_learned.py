"""Learned drafters under load: on the real engine, with a target that was enlarged after they had been trained."""

import json

import pytest

from hf_smartspec.commands.load import runs as load_runs
from hf_smartspec.goodput import CostModel
from tests.folders import save_tiny_models

from ...commands.helpers import save_fitted_heads
from .. import helpers

TINY = ["--dtype", "float32", "--device", "cpu", "--max-new-tokens", "12", "--limit", "6", "--parameters", "300000"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = save_tiny_models(tmp_path_factory.mktemp("models"))
    prompts = [f"{n} and {n} and" for n in range(9)]
    (folder / "data.jsonl").write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    save_fitted_heads(folder, prompts)
    return folder


@pytest.fixture(autouse=True)
def _own_profiles(monkeypatch):
    cost = CostModel(alpha=0.0, gamma=1e-5, delta=20e-3)  # where drafts pay
    monkeypatch.setattr(load_runs, "load_or_profile", lambda model: cost)
    # Of a step that took long beside other work, an auction would learn not to draft.
    monkeypatch.setattr(CostModel, "observe", lambda *_: None)


def call(command, folder, *arguments):
    return helpers.bench(command, folder / "data.jsonl", "--model", folder / "target", *TINY, *arguments)


@pytest.mark.end_to_end
def test_load(folder, tmp_path):
    out = tmp_path / "load.json"
    names = [folder / "medusa", f"suffix+{folder / 'medusa'}", folder / "draft"]
    asked = ["--rates", "40", "--seconds", "0.2", "--policies", "k=4", "auction", "--sources", *names, "--explain"]
    assert call("load", folder, *asked, "--json", out) in (0, 1), "tiny models gain nothing"
    rows = {(row["source"], row["policy"]): row for row in json.loads(out.read_text())["results"]}
    assert {source for source, _ in rows} == {"medusa", "suffix+medusa", "draft"}
    assert len({row["tokens"] for row in rows.values()}) == 1, "no drafter changes what is generated"
    for (_, policy), row in rows.items():
        if policy == "none":
            assert row["drafted_per_step"] == 0
        else:
            assert row["acceptance_rate"] > 0


def test_rates_are_found(folder, tmp_path):
    out = tmp_path / "load.json"
    asked = ["--seconds", "0.05", "--policies", "auction", "--sources", folder / "medusa", "--json", out]
    assert call("load", folder, *asked) in (0, 1)
    assert len({row["rate"] for row in json.loads(out.read_text())["results"]}) == 2


def test_batch(folder, tmp_path):
    out = tmp_path / "batch.json"
    asked = ["--batch-sizes", "2", "--lengths", "0", "3", "--sources", folder / "medusa", "--json", out]
    assert call("batch", folder, *asked) == 0
    results = json.loads(out.read_text())["results"]
    assert {(name, row["length"]) for name, rows in results.items() for row in rows.values()} == {
        ("medusa", 0),
        ("medusa", 3),
    }


@pytest.mark.exhaustive
def test_timeline(folder, tmp_path):
    out = tmp_path / "timeline.json"
    asked = ["--rates", "60", "20", "--period", "0.1", "--phases", "2", "--source", folder / "medusa", "--json", out]
    assert call("timeline", folder, *asked) in (0, 1)
    assert json.loads(out.read_text())["results"]


@pytest.mark.parametrize(
    ("command", "options"),
    [
        ("load", ["--virtual", "--sources"]),
        ("load", ["--simulated", "--sources"]),
        ("load", ["--policies", "table", "--sources"]),
        ("timeline", ["--simulated", "--source"]),
        ("timeline", ["--policies", "table", "--source"]),
    ],
)
def test_what_is_simulated_has_no_hidden_states(folder, capsys, command, options):
    assert call(command, folder, *options, folder / "medusa") == 2
    assert "real engine only" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "message"), [("nonsense", "must be one of"), ("suffix+wrong", "must be one of"), ("./nowhere", "nowhere")]
)
def test_names_that_mean_nothing(folder, capsys, name, message):
    assert call("load", folder, "--sources", name) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
