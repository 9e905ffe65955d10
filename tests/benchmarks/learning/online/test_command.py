"""`python -m benchmarks online` on tiny models: every part, its tables, figures and what it refuses."""

import json

import pytest
from huggingface_hub.errors import StrictDataclassError

from tests.covering import exhaustive
from tests.folders import save_tiny_models

from ....commands.helpers import EMBEDDED, save_fitted_heads
from ... import helpers

SHORT = ["--device", "cpu", "--threads", "1", "--dtype", "float32", "--max-new-tokens", "8"]
SHORT += ["--requests", "12", "--test", "3", "--interval", "4"]
NOT_FAILED = (0, 1)  # tiny models hardly learn, so that claims may fail


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = save_tiny_models(tmp_path_factory.mktemp("models"))
    for name in ("first", "second", "base"):
        rows = [{"prompt": f"{n} {name} {n * n}", "language": "en" if n % 2 else "fr"} for n in range(30)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def call(folder, *arguments, files=("first.jsonl", "second.jsonl")):
    models = ["--model", folder / "target", "--draft", folder / "draft"]
    return helpers.bench("online", *[folder / name for name in files], *models, *SHORT, *arguments)


def parts_of(text):
    """Rows by part, of which none has failed."""
    report = json.loads(text)
    assert not report["failures"]
    return {part: rows[part] for part, rows in report["results"].items()}


@pytest.mark.end_to_end
def test_replayed_parts(folder, tmp_path, capsys, monkeypatch):
    out, page, plots = tmp_path / "results.json", tmp_path / "page.md", tmp_path / "plots"
    outputs = ["--json", out, "--markdown", page, "--plots", plots]
    assert call(folder, "--base", folder / "base.jsonl", *outputs) in NOT_FAILED
    parts = parts_of(out.read_text())
    for task in ("first", "second"):
        assert set(parts["table"]["rows"][task]) == {"original", "FT", "TF", "SF", "MixF", "TF, reverse KL", "TF, JSD"}
        online = parts["online"]["rows"][task]
        assert len(online["online"]) == len(online["static"]) == 12
        assert online["learning"]["updates"] == 3
        assert len(online["alpha"]) == 12 and all(0 <= alpha <= 1 for alpha in online["alpha"])
        tokens = online["tokens"]
        assert 0 < tokens["share"] <= 1 and len(tokens["texts"]) == len(tokens["online"]["recall"])
        assert all(rate is None or 0 <= rate <= 1 for rate in tokens["online"]["precision"])
        # Nothing is learnt yet when the first requests come.
        assert online["online"][:4] == online["unchanged"][:4]
        several = parts["several"]["rows"][task]
        assert len(several["one drafter"]) == len(several["its own"]) == 12
    for shift in ("sudden", "gradual"):
        row = parts["shift"]["rows"][shift]
        assert len(row["online"]) == 24 and row["tasks"].count("first") == 12
        assert all(len(values) == 2 for values in row["test after each phase"].values())
    assert parts["shift"]["rows"]["sudden"]["tasks"] == ["first"] * 12 + ["second"] * 12
    for rows in parts["shift"]["static"].values():
        assert {share: len(rates) for share, rates in rows.items()} == dict.fromkeys(["30%", "50%", "70%", "100%"], 12)
    (mixed,) = parts["mix"]["rows"].values()
    assert len(mixed["online"]) == 24 and mixed["half"] == 12 and mixed["tasks"].count("first") == 12
    assert set(parts["costs"]["rows"]) >= {"Vicuna-7B, LLaMA-160M", "this target and drafter"}
    drawn = {"online.png", "tokens.png", "shift.png", "static.png", "mix.png", "several.png"}
    assert {path.name for path in plots.iterdir()} == drawn
    text = page.read_text()
    titles = (
        "table 1",
        "figure 3",
        "figure 7",
        "table 6",
        "A sudden shift",
        "A gradual shift",
        "A.6",
        "figures 5 and 6",
    )
    for title in (*titles, "tables 5 and 9", "tables 7 and 8"):
        assert title in text
    assert "Acceptance rate" in capsys.readouterr().out
    # What is there is not measured again.
    before = out.read_text()
    assert call(folder, "--base", folder / "base.jsonl", "--json", out, "--resume") in NOT_FAILED
    assert parts_of(out.read_text()) == parts_of(before)


def test_algorithm_1_as_published_on_sampled_answers(folder, tmp_path):
    out = tmp_path / "results.json"
    arguments = ["--parts", "online", "--preset", "published", "--sampled", "--requests", "8", "--json", out]
    assert call(folder, *arguments, files=["first.jsonl"]) in NOT_FAILED
    (row,) = parts_of(out.read_text())["online"]["rows"].values()
    assert row["learning"]["updates"] == 2 and row["learning"]["rollbacks"] == 0
    assert all(0 < rate < 1 for rate in row["online"])  # sums of min(p, q), not shares of equal tokens


def test_a_file_of_several_languages_is_several_tasks(folder, tmp_path):
    out = tmp_path / "results.json"
    assert call(folder, "--parts", "several", "--json", out, "--requests", "8", files=["first.jsonl:language"]) == 0
    assert set(parts_of(out.read_text())["several"]["rows"]) == {"en", "fr"}


@pytest.mark.parametrize("kind", ["draft", *exhaustive(["medusa"], ["eagle3"])])
def test_live_parts(folder, tmp_path, kind):
    out = tmp_path / "results.json"
    arguments = ["--parts", "speed", "live", "--random", kind, "--parameters", "0", "--json", out]
    assert call(folder, *arguments) in NOT_FAILED
    parts = parts_of(out.read_text())
    rows = parts["speed"]["rows"]["first"]
    assert {"none", "draft", "draft + algorithm 1", "draft + online"} <= set(rows)
    assert all(row["different"] == 0 and row["speed-up"] > 0 for row in rows.values())
    assert len(parts["live"]["requests"]) == 24 and parts["live"]["different"] == 0
    assert parts["live"]["requests"][-1]["learning"] > 0


def test_heads_learn_too(folder, tmp_path, capsys):
    heads = save_fitted_heads(folder, ["0 first 0", "1 first 1"])
    out, arguments = tmp_path / "results.json", ["--draft", heads, "--parameters", "0"]
    assert call(folder, *arguments, "--parts", "online", "speed", "--json", out, files=["first.jsonl"]) in NOT_FAILED
    parts = parts_of(out.read_text())
    assert parts["online"]["rows"]["first"]["learning"]["updates"] == 3
    rows = parts["speed"]["rows"]["first"]
    assert rows["none"]["acceptance"] is None and rows["none"]["tokens per step"] == 1
    assert "draft + online, auction" in rows and not any(row["different"] for row in rows.values())
    assert "more is accepted than before, drafter + algorithm 1: first, draft" in " ".join(
        capsys.readouterr().out.split()
    )


@pytest.mark.end_to_end
def test_latency_beside_learning(folder, tmp_path, capsys):
    out = tmp_path / "results.json"
    assert call(folder, "--parts", "load", "--parameters", "0", "--load-requests", "2", "--json", out) == 0
    rows = parts_of(out.read_text())["load"]["rows"]
    assert all(len(row["on"]) == len(row["off"]) == 8 for row in rows.values())
    assert "Latency beside learning" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--resume"], "--resume goes with --json"),
        (["--requests", "1", "--test", "500"], "are for judging"),
        (["--base", "nowhere.jsonl"], "cannot read"),
        (["--draft", EMBEDDED.parent / "medusa", "--parts", "online"], "--draft: "),
    ],
)
def test_what_is_refused(folder, arguments, message, capsys):
    assert call(folder, *arguments) == 2
    assert message in capsys.readouterr().err


def test_heads_that_cannot_be_made_are_refused(folder, capsys, monkeypatch):
    def refuse(*args, **kwargs):
        raise StrictDataclassError("18 heads of 1088")

    monkeypatch.setattr("benchmarks.learning.online.live.new_heads", refuse)
    assert call(folder, "--parts", "live", "--random", "eagle3", "--parameters", "0") == 2
    assert "--random eagle3: heads of this target cannot be made" in capsys.readouterr().err
