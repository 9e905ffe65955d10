"""`smartspec bench load | batch | timeline | simulate`: run end to end on tiny settings, and how results are told."""

import json
import math
from dataclasses import replace

import pytest

from benchmarks.decode.batch.command import best_length
from benchmarks.load.timeline import command as timeline
from benchmarks.load.timeline.command import groups, phase_latencies
from hf_smartspec.commands.common.names import SOURCES
from hf_smartspec.commands.load import command as load_bench
from hf_smartspec.commands.load import runs as load_runs
from hf_smartspec.commands.load.report import Cell, Point, summaries, verdicts
from hf_smartspec.goodput import CostModel
from hf_smartspec.simulator import LoadResult, Served
from tests.covering import exhaustive
from tests.folders import save_tiny_models

from .. import helpers

TINY = ["--dtype", "float32", "--device", "cpu", "--max-new-tokens", "8", "--limit", "6"]
COST = CostModel(alpha=1e-6, gamma=1e-3, delta=20e-3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = save_tiny_models(tmp_path_factory.mktemp("models"))
    rows = [{"prompt": f"{n} and {n} and", "response": f" {n} and {n} and {n}."} for n in range(12)]
    for name in ("data", "other"):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        rows = [{"prompt": f"({row['prompt']})", "response": row["response"][1:]} for row in rows]
    return folder


@pytest.fixture(autouse=True)
def _own_profiles(monkeypatch):
    monkeypatch.setattr(load_runs, "load_or_profile", lambda model: COST)  # measuring takes seconds


def call(*arguments):
    return helpers.bench(*arguments)


def models(folder):
    return [folder / "data.jsonl", "--model", folder / "target", "--draft", folder / "draft", *TINY]


# --- Commands


@pytest.mark.end_to_end
def test_load_measures_every_source_rate_and_policy(folder, tmp_path, capsys):
    out = tmp_path / "load.json", tmp_path / "load.png"
    asked = ["--rates", "40", "80", "--seconds", "0.05", "--policies", "k=2", "auction", "--sources", "draft", "suffix"]
    code = call("load", *models(folder), *asked, "--repeats", "2", "--simulated", "--json", out[0], "--plot", out[1])
    assert code in (0, 1), "tiny models gain nothing"
    report = json.loads(out[0].read_text())
    rows = {(row["source"], row["rate"], row["policy"]): row for row in report["results"]}
    names = ("none", "k=2", "auction")
    assert set(rows) == {(s, r, p) for s in ("draft", "suffix") for r in (40, 80) for p in names}
    for (_, rate, name), row in rows.items():
        assert row["requests"] == 2 * round(rate * 0.05) and row["mean_latency"] > 0 and row["simulated_latency"] > 0
        assert 0 < row["first_token"] <= row["mean_latency"] <= row["p99_latency"]
        assert row["drafted_per_step"] == 0 or name != "none"
        assert len(row["simulation_errors"]) == len(row["simulation_factors"]) == 2
    for source, rate in ((s, r) for s in ("draft", "suffix") for r in (40, 80)):
        same = [row for key, row in rows.items() if key[:2] == (source, rate)]
        assert len({row["tokens"] for row in same}) == 1, "no policy changes what is generated"
        assert sum(row["is_best_fixed"] for row in same) == 1
    text = capsys.readouterr().out
    assert "best fixed choice" in text and "Simulation: mean latency" in text and out[1].stat().st_size > 0


def test_load_finds_rates_by_itself(folder, tmp_path):
    out = tmp_path / "load.json"
    asked = ["--sources", "prompt_lookup", "--policies", "none", "--seconds", "0.05", "--remember", "3", "--json", out]
    assert call("load", *models(folder), *asked) == 0
    rates = [row["rate"] for row in json.loads(out.read_text())["results"]]
    assert len(rates) == 2 and rates[1] == pytest.approx(0.8 / 0.3 * rates[0], rel=0.1)


@pytest.mark.exhaustive  # all at once; other tests cover each option with fewer sources
def test_load_replays_every_data_set_with_every_source_after_a_past(folder, tmp_path, capsys):
    out = tmp_path / "load.json", tmp_path / "load.png"
    files = [folder / "data.jsonl", folder / "other.jsonl"]
    models = ["--model", folder / "target", "--draft", folder / "draft", *TINY]
    asked = ["--replay", "--remember", "4", "--rates", "60", "--seconds", "0.1", "--policies", "k=2", "auction"]
    code = call("load", *files, *models, *asked, "--sources", *SOURCES, "--explain", "--json", out[0], "--plot", out[1])
    assert code in (0, 1)
    rows = json.loads(out[0].read_text())["results"]
    assert {(row["data_set"], row["source"]) for row in rows} == {
        (str(path), name) for path in files for name in SOURCES
    }
    assert {row["tokens"] for row in rows} == {6 * 8}, "one token a byte, cut to what is asked for"
    accepted = {(row["source"], row["policy"]): row["acceptance_rate"] for row in rows}
    assert accepted["wrong", "k=2"] == 0 and min(accepted["suffix", "k=2"], accepted["auto", "k=2"]) > 0.3
    explained = {(row["source"], row["policy"]): row["explanations"][0] for row in rows}
    assert explained["wrong", "k=2"]["drafted"] > 0 == explained["wrong", "none"]["drafted"]
    assert all(item["wait"] >= 0 for item in explained.values())
    text = capsys.readouterr().out
    assert "data: latencies" in text and "other: latencies" in text and f"of {2 * len(SOURCES)} loads" in text
    assert "at the worst rate" in text and "Why: other, hybrid, 60/s" in text and out[1].stat().st_size > 0


@pytest.mark.end_to_end
def test_virtual_sweeps_are_reproducible_with_a_profile(folder, tmp_path, monkeypatch, capsys):
    out = tmp_path / "load.json"
    asked = ["--virtual", "--profile", tmp_path / "profile.json", "--remember", "3", "--policies", "k=2", "table"]
    asked += ["auction", "oracle", "--sources", *SOURCES, "--rates", "200", "--seconds", "0.1", "--json", out]
    served = []
    monkeypatch.setattr(load_bench, "serve", lambda *_: served.append(None))
    monkeypatch.setattr(load_bench, "calibrate", with_known_costs)
    monkeypatch.setattr(load_runs, "_TABLE_BATCHES", 4)
    monkeypatch.setattr(load_runs, "_TABLE_LENGTH", 3)
    results = []
    for _ in range(2):
        assert call("load", *models(folder), *asked) in (0, 1)
        results.append(json.loads(out.read_text())["results"])
        monkeypatch.setattr(load_bench, "calibrate", lambda *_: pytest.fail("the profile has it all"))
    assert results[0] == results[1] and not served
    assert len(results[0]) == len(SOURCES) * 5
    latency = {(row["source"], row["policy"]): row["mean_latency"] for row in results[0]}
    for source, name in latency:
        if source == "prompt_lookup":
            assert latency[source, "oracle"] <= 1.01 * latency[source, name]
    assert "virtual time" in capsys.readouterr().out


def with_known_costs(setup, source):
    """Calibrate, and replace what was measured on this machine."""
    found = load_runs.calibrate(setup, source)
    draft = replace(found.draft, per_call=5e-4, per_row=1e-4)
    return replace(found, cost=COST, draft=draft, step_seconds=1e-3, request_seconds=1e-3)


def test_profiles_of_other_machines_and_files_are_refused(folder, tmp_path, capsys):
    profile = tmp_path / "profile.json"
    asked = ["--virtual", "--profile", profile, "--policies", "none", "--rates", "50", "--seconds", "0.1"]
    assert call("load", *models(folder), *asked, "--sources", "prompt_lookup") == 0
    assert call("load", *models(folder), *asked, "--parameters", "1e6") == 2
    assert "was measured on a target of" in capsys.readouterr().err
    profile.write_text('{"machine": {}}')
    assert call("load", *models(folder), *asked) == 2
    assert "is no profile of an earlier run" in capsys.readouterr().err


def test_batch_marks_the_best_length(folder, tmp_path, capsys):
    out = tmp_path / "batch.json", tmp_path / "batch.png"
    asked = ["--batch-sizes", "1", "3", "--lengths", "0", "2", "--sources", "draft", "suffix"]
    assert call("batch", *models(folder), *asked, "--json", out[0], "--plot", out[1]) == 0
    results = json.loads(out[0].read_text())["results"]
    rows = [row for section in results.values() for row in section.values()]
    assert set(results) == {"draft", "suffix"} and len(rows) == 2 * 2 * 2
    assert all(row["seconds_per_token"] > 0 for row in rows)
    assert "Best lengths" in capsys.readouterr().out and out[1].stat().st_size > 0
    assert best_length({0: 3.0, 1: 2.0, 2: 2.5}) == 1


@pytest.mark.parametrize(
    "simulated", [["--replay", "--remember", "2", "--explain"], *exhaustive([["--simulated", "--explain"]])]
)
def test_timeline_tells_busy_from_quiet(folder, tmp_path, capsys, simulated):
    out = tmp_path / "time.json", tmp_path / "time.png"
    asked = ["--rates", "60", "20", "--period", "0.1", "--group", "2", "--source", "prompt_lookup", *simulated]
    assert call("timeline", *models(folder), *asked, "--json", out[0], "--plot", out[1]) in (0, 1), (
        "tiny models gain nothing"
    )
    results = json.loads(out[0].read_text())["results"]["timeline"]
    assert set(results) == {"none", "k=2", "k=4", "auction"}
    assert all(row["requests"] == 16 and len(row["groups"]) == 8 for row in results.values())
    text = " ".join(capsys.readouterr().out.split())  # lines are broken anywhere
    assert "busy" in text and "accepted: % of levels" in text and out[1].stat().st_size > 0
    assert "times better than the best fixed choice's: " in text
    for row in results.values():
        (explanation,) = row["explanations"]
        assert explanation["seconds"]["verify"] > 0
        assert set(explanation["acceptance"]) <= {"PromptLookupCandidates"}, "virtual or not"
    assert results["k=4"]["explanations"][0]["acceptance"]


def test_timeline_policies_take_turns_in_every_repetition(folder, tmp_path, monkeypatch):
    """Later repetitions have other arrivals; what becomes slower from run to run does not favour a policy."""
    order, latencies = [], iter([1.0, 0.8, 0.5, 0.75, 1.2, 1.5])

    def noted(setup, source, policy, requests, result):
        order.append((type(policy).__name__, [item.arrival for item in requests]))
        result.served += result_of(next(latencies)).served

    monkeypatch.setattr(timeline, "serve", noted)
    monkeypatch.setattr(timeline, "warm_up", lambda *_: None)
    out = tmp_path / "time.json"
    asked = ["--rates", "60", "20", "--period", "0.1", "--source", "prompt_lookup", "--policies", "k=1", "auction"]
    assert call("timeline", *models(folder), *asked, "--repeats", "2", "--json", out) == 0, "1.6 times better holds"
    names = ["NoSpeculation", "FixedLength", "GoodputAuction"]
    assert [name for name, _ in order] == names + names[::-1]
    arrivals = [times for _, times in order]
    assert arrivals[0] == arrivals[2] and arrivals[3] == arrivals[5] != arrivals[0]
    results = json.loads(out.read_text())["results"]["timeline"]
    assert [name for name, row in results.items() if row["is_best_fixed"]] == ["k=1"]
    assert results["auction"]["gains"] == pytest.approx([0.8 / 0.5, 1.2 / 0.75])
    assert results["none"]["gain"] == pytest.approx((0.8 / 1.0 + 1.2 / 1.5) / 2)


def test_timeline_plays_the_arrivals_of_a_trace(folder, tmp_path, monkeypatch, capsys):
    """The trace's intervals are kept; the requests take as long as the phases would."""
    trace, loads = tmp_path / "trace.csv", []
    rows = [f"{1000 * second},5,5\n" for second in (0, 1, 1, 4, 6, 6, 7, 10, 20, 21, 22, 23, 25, 28, 29, 30, 31)]
    trace.write_text("timestamp_ms,input_length,output_length\n" + "".join(rows))
    monkeypatch.setattr(timeline, "serve", lambda *args: loads.append(args[-2]) or args[-1].served.extend(
        result_of(1.0).served
    ))  # fmt: skip
    monkeypatch.setattr(timeline, "warm_up", lambda *_: None)
    asked = ["--rates", "60", "20", "--period", "0.05", "--source", "prompt_lookup", "--policies", "none"]
    assert call("timeline", *models(folder), *asked, "--trace", trace, "--repeats", "2") == 0
    first, second = ([item.arrival for item in load] for load in loads)
    assert first == pytest.approx([0.2 * when / 10 for when in (0, 1, 1, 4, 6, 6, 7, 10)])
    assert second == pytest.approx([0.2 * (when - 20) / 10 for when in (20, 21, 22, 23, 25, 28, 29, 30)])
    assert "arrivals of trace.csv, 40 requests/s on average" in " ".join(capsys.readouterr().out.split())
    assert call("timeline", *models(folder), *asked, "--trace", trace, "--repeats", "3") == 2
    assert "has 17 requests, too few for turn 3" in capsys.readouterr().err and len(loads) == 2, "before any work"


def test_timeline_whose_claim_fails_says_no_and_exits_with_1(folder, tmp_path, monkeypatch, capsys):
    latencies = iter([1.0, 0.8, 0.75])  # of no speculation, one token and the auction
    monkeypatch.setattr(timeline, "serve", lambda *args: args[-1].served.extend(result_of(next(latencies)).served))
    monkeypatch.setattr(timeline, "warm_up", lambda *_: None)
    asked = ["--rates", "60", "20", "--period", "0.1", "--source", "prompt_lookup", "--policies", "k=1", "auction"]
    assert call("timeline", *models(folder), *asked) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert "NO the auction's latency is at least 1.10 times better" in said and ": 1.07 times" in said


_ALL_FIGURES = {f"SmartSpec, Figure {number}" for number in (1, 3, 5, 11, 12, 14, 15, 16)}
_ALL_FIGURES |= {"Su et al., Figure 5", "SSSD, Figure 7"}


@pytest.mark.parametrize(
    ("asked", "names"),
    [
        (["--figures", "1", "12"], {"SmartSpec, Figure 1", "SmartSpec, Figure 12"}),
        *exhaustive(([], _ALL_FIGURES)),
    ],
    ids=["some", "all"],
)
def test_simulate_plays_figures_and_traces(folder, tmp_path, capsys, asked, names):
    trace = tmp_path / "trace.csv"
    lines = [f"{900 * index},{20 + index},{5 + index},{index % 2}" for index in range(12)]
    trace.write_text("\n".join(["timestamp_ms,input_length,output_length,hash_ids", *lines]) + "\n")
    out, plots = tmp_path / "simulate.json", tmp_path / "plots"
    asked = [*asked, "--requests", "2", "--tokenizer", folder / "target", "--json", out, "--plots", plots]
    code = call("simulate", folder / "data.jsonl", *asked, "--traces", trace, "--trace-rate", "3")
    assert code in (0, 1), "two requests prove nothing"
    results = json.loads(out.read_text())["results"]
    found = [item for section in results.values() for row in section.values() for item in row["figures"]]
    figures = {figure["name"]: figure for figure in found}
    assert set(figures) == names | {"trace trace.csv"}
    assert all(figure["panels"] and figure["claims"] for figure in figures.values())
    values = [y for figure in figures.values() for panel in figure["panels"].values()
              for series in panel.values() for y in series.values()]  # fmt: skip
    assert min(values) > 0 and all(map(math.isfinite, values))
    assert len(list(plots.iterdir())) == len(figures)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["load", "--policies", "k=x"], "none, k=NUMBER"),
        (["load", "--rates", "0"], "must be positive"),
        (["load", "--rates", "1", "--shares", "1"], "--rates and --shares exclude each other"),
        (["load", "--seconds", "x"], "is no number"),
        (["load", "--json", "/nowhere/x.json"], "no such folder"),
        (["load", "--policies", "oracle"], "only simulations have an oracle"),
        (["load", "--profile", "x.json"], "--profile goes with --virtual"),
        (["load", "--virtual", "--simulated"], "--simulated goes with the real engine"),
        (["load", "--virtual", "--profile", "/nowhere/x.json"], "no such folder"),
        (["load", "--remember", "-1"], "at least 0"),
        (["timeline", "--policies", "oracle"], "only simulations have an oracle"),
        (["batch", "--lengths", "-1"], "at least 0"),
        (["timeline", "--rates", "3"], "expected 2 arguments"),
        (["simulate", "--figures", "7"], "invalid choice"),
        (["simulate", "--figures", "5", "--traces", "/nowhere.csv"], "--traces: "),
    ],
)
def test_bad_arguments_are_refused_in_one_line(arguments, message, capsys):
    assert call(*arguments) == 2
    assert message in capsys.readouterr().err


def test_a_draft_must_be_there_to_be_measured(folder, capsys):
    assert call("load", folder / "data.jsonl", "--model", folder / "target", *TINY, "--sources", "draft") == 2
    assert "--sources: draft needs --draft" in capsys.readouterr().err
    assert call("timeline", folder / "data.jsonl", "--model", folder / "target", *TINY, "--source", "hybrid") == 2
    assert "--source: hybrid needs --draft" in capsys.readouterr().err


def test_something_must_be_left_to_ask(folder, capsys):
    assert call("load", *models(folder), "--remember", "12") == 2
    assert "has 12 requests, of which 12 leave none to ask" in capsys.readouterr().err


def test_interrupted_benches_show_what_is_there(folder, tmp_path, monkeypatch, capsys):
    out = tmp_path / "load.json"
    real, calls = load_runs.Engine.add_request, []

    def interrupted(self, *args, **kwargs):
        calls.append(None)
        if len(calls) == 24:
            raise KeyboardInterrupt
        return real(self, *args, **kwargs)

    monkeypatch.setattr(load_runs.Engine, "add_request", interrupted)
    monkeypatch.setenv("COLUMNS", "200")  # one request in no time makes large figures
    asked = ["--sources", "prompt_lookup", "--policies", "none", "--rates", "50", "--seconds", "0.2", "--json", out]
    assert call("load", *models(folder), *asked) == 130
    (row,) = json.loads(out.read_text())["results"]
    text = capsys.readouterr().out
    assert row["requests"] < 10 and "prompt_lookup" in text and "50/s" in text


# --- How results are told


def result_of(latency, num_tokens=10, count=3):
    return LoadResult([Served(float(index), index + 0.1, index + latency, num_tokens) for index in range(count)])


def test_the_auction_is_marked_where_it_is_slower_than_no_speculation():
    cells = {
        Point("a.jsonl", "draft", 1.0): {"none": Cell([result_of(1.0)]), "k=1": Cell([result_of(0.8)]),
                              "auction": Cell([result_of(1.03)], simulated=[result_of(1.0)], factors=[1.0])},
        Point("a.jsonl", "draft", 2.0): {"none": Cell([result_of(1.0)]), "auction": Cell([result_of(1.01)])},
        Point("a.jsonl", "draft", 3.0): {"none": Cell([LoadResult()])},
    }  # fmt: skip
    rows = summaries(cells)
    assert [(row["rate"], row["policy"], row["is_too_slow"], row["is_best_fixed"]) for row in rows] == [
        (1.0, "none", False, False), (1.0, "k=1", False, True), (1.0, "auction", True, False),
        (2.0, "none", False, True), (2.0, "auction", False, False),
    ]  # fmt: skip
    assert rows[1]["speedup"] == pytest.approx(1.25)
    assert rows[2]["simulation_error"] == pytest.approx(1.0 / 1.03 - 1)
    text = "\n".join(verdicts(rows))
    assert "at 1 of 2 loads" in text and "worst 1.29" in text and "within 10% of the engine's in 1 of 1 rows" in text
    assert "p99 of latency by the best fixed choice's: worst 1.29 (a, draft, 1/s), above 1.03 at 1 of 2 loads" in text
    assert rows[0]["p50_per_token"] == pytest.approx((1.0 - 0.1) / 9), "nine tokens after the first"
    assert rows[2]["percentiles_by_best_fixed"]["p99_per_token"] == pytest.approx((1.03 - 0.1) / (0.8 - 0.1))


def test_simulations_are_judged_run_by_run_below_saturation():
    queued = result_of(1.0)
    queued.seconds_waited = 0.5
    rows = summaries({
        Point("a", "draft", 1.0): {"none": Cell([result_of(1.0), result_of(2.0), result_of(1.0)],
                                                simulated=[result_of(1.05), result_of(1.0), result_of(1.02)],
                                                factors=[0.9, 1.0, 1.1])},
        Point("a", "draft", 9.0): {"none": Cell([queued], simulated=[result_of(3.0)], factors=[1.0])},
    })  # fmt: skip
    assert rows[0]["simulation_errors"] == pytest.approx([0.05, -0.5, 0.02])
    assert rows[0]["simulation_error"] == pytest.approx(0.02), "one run out of three does not count"
    assert [row["is_saturated"] for row in rows] == [False, True]
    text = "\n".join(verdicts(rows))
    assert "in 1 of 1 rows below saturation" in text and "worst of single runs 50.0%" in text
    assert "took 0.90 to 1.10 times" in text


def test_ratios_are_medians_over_neighbouring_repetitions():
    """The machine becomes slower; what finished in one of the two only does not count."""
    plain = Cell([result_of(1.0), result_of(2.0), result_of(4.0)])
    auction = Cell([result_of(0.5), result_of(1.6), result_of(3.6), result_of(9.0, count=1)])
    cut = Cell([result_of(0.1, count=2)])
    rows = summaries({Point("a", "draft", 1.0): {"none": plain, "auction": auction, "k=1": cut}})
    assert rows[1]["speedups"] == pytest.approx([2.0, 1.25, 4 / 3.6]) and rows[1]["speedup"] == pytest.approx(1.25)
    assert rows[1]["mean_latency"] == pytest.approx((0.5 + 1.6 + 3.6) / 3), "an interrupted one is no repetition"
    assert rows[2]["speedup"] is None and not rows[2]["is_too_slow"]


def test_policies_take_turns_in_going_first(folder, tmp_path, monkeypatch):
    order = []

    def noted(setup, source, policy, requests, result):
        order.append((type(policy).__name__, len(requests)))
        result.served += result_of(1.0).served

    monkeypatch.setattr(load_bench, "serve", noted)
    asked = ["--sources", "prompt_lookup", "--policies", "k=1", "--rates", "50", "--seconds", "0.1", "--repeats", "3"]
    assert call("load", *models(folder), *asked) == 0
    names = [name for name, _ in order]
    assert names == ["NoSpeculation", "FixedLength", "FixedLength", "NoSpeculation", "NoSpeculation", "FixedLength"]


def test_groups_and_phases():
    result = result_of(2.0, count=5)
    assert groups(result, 2) == [(0.0, 2.0), (2.0, 2.0), (4.0, 2.0)]
    slow = LoadResult([Served(0.5, 1, 1.5, 1), Served(1.5, 3, 4.5, 1), Served(2.5, 3, 5.5, 1)])
    assert phase_latencies(slow, 1.0) == (2.0, 3.0)
    assert math.isnan(phase_latencies(LoadResult(), 1.0)[0])
