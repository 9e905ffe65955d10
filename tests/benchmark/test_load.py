"""`smartspec bench load | batch | timeline | simulate`: run end to end on tiny settings, and how results are told."""

import json
import math

import numpy as np
import pytest
from transformers.utils import logging

from hf_smartspec import cli
from hf_smartspec.benchmark import load_runs
from hf_smartspec.benchmark.batch import best_length
from hf_smartspec.benchmark.load_report import Cell, Point, summaries, verdicts
from hf_smartspec.benchmark.load_runs import Calibration, Exploration, new_requests, simulate, with_draft_model
from hf_smartspec.benchmark.load_setup import Policies, Setup, is_fixed
from hf_smartspec.benchmark.simulate_figures import figure_5
from hf_smartspec.benchmark.simulate_world import DraftOracle, World
from hf_smartspec.benchmark.timeline import groups, phase_latencies
from hf_smartspec.goodput import CostModel, DraftCost, FixedLength, NoSpeculation
from hf_smartspec.goodput.policies import BatchLookupTable
from hf_smartspec.simulator import LoadResult, Served, SimulatedEngine, TableCandidates, with_acceptance
from tests.folders import save_tiny_models
from tests.generate.helpers import noisy_copy, tiny_llama

TINY = ["--dtype", "float32", "--device", "cpu", "--max-new-tokens", "8", "--limit", "6"]
COST = CostModel(alpha=1e-6, gamma=1e-3, delta=20e-3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = save_tiny_models(tmp_path_factory.mktemp("models"))
    rows = [{"prompt": f"{n} and {n} and", "response": f" {n} and {n} and {n}."} for n in range(12)]
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture(autouse=True)
def _own_profiles_and_progress_bars(tmp_path, monkeypatch):
    monkeypatch.setattr(load_runs, "load_or_profile", lambda model: COST)  # measuring takes seconds
    yield
    logging.enable_progress_bar()


def call(*arguments):
    try:
        return cli.main(["bench", *map(str, arguments)])
    except SystemExit as error:
        return error.code


def models(folder):
    return [folder / "data.jsonl", "--model", folder / "target", "--draft", folder / "draft", *TINY]


# --- Commands


def test_load_measures_every_source_rate_and_policy(folder, tmp_path, capsys):
    out = tmp_path / "load.json", tmp_path / "load.png"
    asked = ["--rates", "40", "80", "--seconds", "0.05", "--policies", "k=2", "table", "step", "auction"]
    code = call("load", *models(folder), *asked, "--repeats", "2", "--simulated", "--json", out[0], "--plot", out[1])
    assert code in (0, 1), "tiny models gain nothing"
    report = json.loads(out[0].read_text())
    rows = {(row["source"], row["rate"], row["policy"]): row for row in report["results"]}
    names = ("none", "k=2", "table", "step", "auction")
    assert set(rows) == {(s, r, p) for s in ("draft", "prompt_lookup", "suffix") for r in (40, 80) for p in names}
    for (_, rate, name), row in rows.items():
        assert row["requests"] == 2 * round(rate * 0.05) and row["mean_latency"] > 0 and row["simulated_latency"] > 0
        assert 0 < row["first_token"] <= row["mean_latency"] <= row["p99_latency"]
        assert row["drafted_per_step"] == 0 or name != "none"
    for source, rate in ((s, r) for s in ("draft", "suffix") for r in (40, 80)):
        same = [row for key, row in rows.items() if key[:2] == (source, rate)]
        assert len({row["tokens"] for row in same}) == 1, "no policy changes what is generated"
        assert sum(row["is_best_fixed"] for row in same) == 1
    text = capsys.readouterr().out
    assert "best fixed choice" in text and "Simulation: mean latency" in text and out[1].stat().st_size > 0


def test_load_finds_rates_by_itself(folder, tmp_path):
    out = tmp_path / "load.json"
    asked = ["--sources", "prompt_lookup", "--policies", "none", "--seconds", "0.05", "--json", out]
    assert call("load", *models(folder), *asked) == 0
    rates = [row["rate"] for row in json.loads(out.read_text())["results"]]
    assert len(rates) == 3 and rates[2] == pytest.approx(3 * rates[0], rel=0.1)


def test_batch_marks_the_best_length(folder, tmp_path, capsys):
    out = tmp_path / "batch.json", tmp_path / "batch.png"
    asked = ["--batch-sizes", "1", "3", "--lengths", "0", "2", "--sources", "draft", "suffix"]
    assert call("batch", *models(folder), *asked, "--json", out[0], "--plot", out[1]) == 0
    rows = json.loads(out[0].read_text())["results"]
    assert len(rows) == 2 * 2 * 2 and sum(row["is_best"] for row in rows) == 4
    assert all(row["seconds_per_token"] > 0 for row in rows)
    assert "Best lengths" in capsys.readouterr().out and out[1].stat().st_size > 0
    assert best_length({1: [3.0, 1.0, 2.0], 2: [2.5, 0.5, 2.5]}) == 1, "medians"


@pytest.mark.parametrize("simulated", [[], ["--simulated"]])
def test_timeline_tells_busy_from_quiet(folder, tmp_path, capsys, simulated):
    out = tmp_path / "time.json", tmp_path / "time.png"
    asked = ["--rates", "60", "20", "--period", "0.1", "--group", "2", "--source", "prompt_lookup", *simulated]
    assert call("timeline", *models(folder), *asked, "--json", out[0], "--plot", out[1]) == 0
    results = json.loads(out[0].read_text())["results"]
    assert set(results) == {"none", "k=2", "k=4", "table", "auction"}
    assert all(row["requests"] == 16 and len(row["groups"]) == 8 for row in results.values())
    assert "busy" in capsys.readouterr().out and out[1].stat().st_size > 0


def test_simulate_plays_figures_and_traces(folder, tmp_path, capsys):
    trace = tmp_path / "trace.csv"
    lines = [f"{900 * index},{20 + index},{5 + index},{index % 2}" for index in range(12)]
    trace.write_text("\n".join(["timestamp_ms,input_length,output_length,hash_ids", *lines]) + "\n")
    out, plots = tmp_path / "simulate.json", tmp_path / "plots"
    asked = ["--requests", "4", "--tokenizer", folder / "target", "--json", out, "--plots", plots]
    code = call("simulate", folder / "data.jsonl", *asked, "--traces", trace, "--trace-rate", "3")
    assert code in (0, 1), "four requests prove nothing"
    figures = {figure["name"]: figure for figure in json.loads(out.read_text())}
    numbers = {f"SmartSpec, Figure {number}" for number in (1, 5, 11, 12, 14, 15, 16)}
    assert set(figures) == numbers | {"Su et al., Figure 5", "trace trace.csv"}
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
        (["load", "--seconds", "x"], "is no number"),
        (["load", "--json", "/nowhere/x.json"], "no such folder"),
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
    assert call("load", folder / "data.jsonl", "--model", folder / "target", *TINY) == 2
    assert "--sources: draft needs --draft" in capsys.readouterr().err


def test_interrupted_benches_show_what_is_there(folder, tmp_path, monkeypatch, capsys):
    out = tmp_path / "load.json"
    real, calls = load_runs.Engine.add_request, []

    def interrupted(self, *args, **kwargs):
        calls.append(None)
        if len(calls) == 24:
            raise KeyboardInterrupt
        return real(self, *args, **kwargs)

    monkeypatch.setattr(load_runs.Engine, "add_request", interrupted)
    asked = ["--sources", "prompt_lookup", "--policies", "none", "--rates", "50", "--seconds", "0.2", "--json", out]
    assert call("load", *models(folder), *asked) == 130
    (row,) = json.loads(out.read_text())["results"]
    assert row["requests"] < 10 and "prompt_lookup, 50 requests/s" in capsys.readouterr().out


# --- How results are told


def result_of(latency, num_tokens=10, count=3):
    return LoadResult([Served(float(index), index + 0.1, index + latency, num_tokens) for index in range(count)])


def test_the_auction_is_marked_where_it_is_slower_than_no_speculation():
    cells = {
        Point("draft", 1.0): {"none": Cell([result_of(1.0)]), "k=1": Cell([result_of(0.8)]),
                              "auction": Cell([result_of(1.03)], [result_of(1.0)])},
        Point("draft", 2.0): {"none": Cell([result_of(1.0)]), "auction": Cell([result_of(1.01)])},
        Point("draft", 3.0): {"none": Cell([LoadResult()])},
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


def test_groups_and_phases():
    result = result_of(2.0, count=5)
    assert groups(result, 2) == [(0.0, 2.0), (2.0, 2.0), (4.0, 2.0)]
    slow = LoadResult([Served(0.5, 1, 1.5, 1), Served(1.5, 3, 4.5, 1), Served(2.5, 3, 5.5, 1)])
    assert phase_latencies(slow, 1.0) == (2.0, 3.0)
    assert math.isnan(phase_latencies(LoadResult(), 1.0)[0])


# --- What simulations of a real engine rest on


def test_policies_by_name_have_costs_of_their_own():
    policies = Policies(COST, BatchLookupTable({1: 4, 4: 2}))
    assert isinstance(policies.new("none"), NoSpeculation) and policies.new("k=3").num_nodes == 3
    assert policies.new("table").length(2) == 2
    costs = [policies.new(name).cost for name in ("step", "request", "auction", "auction")]
    assert all(cost is not COST for cost in costs) and len(set(map(id, costs))) == 4
    assert [is_fixed(name) for name in ("none", "k=1", "table", "auction")] == [True, True, False, False]


def test_a_draft_model_is_simulated_by_one_forward_over_each_text():
    """The drafts that the table tells are accepted at the same places as the model's own."""
    target = tiny_llama()
    draft = noisy_copy(target, 0.05)
    prompts = [np.random.default_rng(index).integers(3, 40, 12) for index in range(4)]
    setup = Setup(target, draft, prompts, max_new_tokens=40, max_batch_size=2, seed=0)
    policy = FixedLength(3)
    real = LoadResult()
    requests = new_requests(setup, np.zeros(4), np.random.default_rng(0))
    load_runs.serve(setup, "draft", policy, requests, real)
    engine = load_runs.Engine(target, "none")
    outputs = [np.array(output.generated_tokens) for output in engine.generate(prompts, max_new_tokens=40)]
    requests = new_requests(setup, np.zeros(4), np.random.default_rng(0), outputs)
    calibration = Calibration(COST, DraftCost(is_autoregressive=True), 0.0, 0.0, 5)
    twin = simulate(setup, "draft", calibration, policy, requests)
    assert twin.num_tokens == real.num_tokens == sum(map(len, outputs))
    for name in ("accepted_tokens", "steps"):
        assert getattr(twin.statistics, name) == getattr(real.statistics, name)
    assert 0 < twin.statistics.acceptance_rate < 1
    ranks = with_draft_model(requests, draft)[0].ranks
    assert set(ranks.tolist()) == {0, 1}


def test_exploration_finds_costs_and_acceptance():
    cost = CostModel(alpha=0.0, gamma=0.5e-3, delta=10e-3)  # half of the truth
    times = np.zeros(8)
    requests = with_acceptance(World(8, {}).same_lengths(times), 0.7, np.random.default_rng(0))
    policy, draft = Exploration(cost), DraftCost(per_call=2e-3, per_row=1e-4, is_autoregressive=True)
    SimulatedEngine(COST, TableCandidates((1,) * 5, True), draft).run(requests, policy)
    assert policy.cost.seconds(0, 32) == pytest.approx(COST.seconds(0, 32), rel=0.1)
    per_call, per_row = policy.timer.seconds(DraftCost(is_autoregressive=True))
    assert per_call + 8 * per_row == pytest.approx(2e-3 + 8 * 1e-4, rel=0.05), "of a level of all eight"
    assert policy.acceptance.rate == pytest.approx(0.7, abs=0.1)


def test_the_oracle_of_figure_14_drafts_only_what_comes_true():
    world = World(8, {})
    requests = with_acceptance(world.same_lengths(np.zeros(8)), 0.5, world.rng(0))
    made = []
    result = world.run_draft(requests, lambda engine: made.append(world.policy("oracle")(engine)) or made[0])
    assert isinstance(made[0], DraftOracle)
    assert result.statistics.drafted_tokens == result.statistics.accepted_tokens > 0
    assert result.mean_latency < world.run_draft(requests, world.policy("k=3")).mean_latency


def test_figure_5_needs_no_load():
    figure = figure_5(World(1, {}))
    assert all(claim.holds for claim in figure.claims)
