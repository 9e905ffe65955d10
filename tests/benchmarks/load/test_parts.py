"""Parts of the benches of load: sources, policies, costs, and simulations of a real engine."""

import json
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.load.requests import with_acceptance
from benchmarks.load.simulate.figures import figure_3, figure_5, figure_sssd
from benchmarks.load.simulate.world import LENGTH, World, llama_3_cost
from hf_smartspec.commands.common.recordings import Recording
from hf_smartspec.commands.common.setup import Setup, merged
from hf_smartspec.commands.load import runs as load_runs
from hf_smartspec.commands.load.costs import Calibration
from hf_smartspec.commands.load.policies import Policies, is_fixed
from hf_smartspec.commands.load.runs import Exploration, Twin, new_requests, with_draft_model
from hf_smartspec.goodput import CostModel, DraftCost, FixedLength, NoSpeculation
from hf_smartspec.goodput.papers.policies import BatchLookupTable
from hf_smartspec.prepare.sources import resolve
from hf_smartspec.simulator import LoadResult, SimulatedEngine, TableCandidates
from hf_smartspec.simulator.oracle import DraftOracle
from tests.generate.helpers import noisy_copy, tiny_llama

COST = CostModel(alpha=1e-6, gamma=1e-3, delta=20e-3)


# --- Sources


def new_setup(**kwargs):
    target = tiny_llama()
    prompts = [np.random.default_rng(index).integers(3, 40, 12) for index in range(4)]
    return Setup(target, noisy_copy(target, 0.05), prompts, max_new_tokens=40, max_batch_size=2, seed=0, **kwargs)


def test_sources_are_what_assistants_are_but_know_nothing():
    setup = new_setup()
    hybrid, listed = setup.new_source("hybrid"), resolve(["suffix", setup.draft], setup.model).source
    assert type(hybrid) is type(listed)
    assert [type(source) for source in hybrid.stages] == [type(source) for source in listed.stages]
    for name in ("default_num_nodes", "most_nodes", "threshold", "vocab_size"):
        assert getattr(hybrid, name) == getattr(listed, name)
    auto = resolve("auto", setup.model).source
    auto.add_outputs([[1, 2, 3]], progress=False)
    assert setup.new_source("auto") is auto and auto.num_cached_tokens() == 0


def test_the_wrong_source_is_sure_of_what_nobody_says():
    setup = new_setup(responses=[np.array([63, 62])] * 4, replays=True)
    source = setup.new_source("wrong")
    (tree,) = source.propose(["a"], [3])
    assert tree.tokens.tolist() == [setup.wrong_token] * 3 and (tree.probs > 0.85).all()
    assert (
        setup.wrong_token not in np.concatenate([*setup.prompts, *setup.responses])
        and setup.wrong_token != setup.end_id
    )


def test_shuffled_prompts_keep_their_responses():
    setup = new_setup(responses=[np.array([index]) for index in range(4)], replays=True)
    known = {prompt.tobytes(): response for prompt, response in zip(setup.prompts, setup.responses)}
    orders = set()
    for seed in range(8):
        mixed = replace(setup, seed=seed).shuffled()
        orders.add(tuple(item.item() for item in mixed.responses))
        assert all(known[prompt.tobytes()] is response for prompt, response in zip(mixed.prompts, mixed.responses))
        assert orders >= {tuple(item.item() for item in replace(setup, seed=seed).shuffled().responses)}
    assert len(orders) > 2 and all(sorted(order) == [0, 1, 2, 3] for order in orders)
    assert new_setup().shuffled().responses is None, "they are not known yet"


def test_samples_and_merged_data_sets():
    first = new_setup(responses=[np.array([index]) for index in range(4)], replays=True)
    second = replace(first, prompts=[*first.prompts[2:], np.array([9])], responses=[np.array([7])] * 3)
    both = merged([first, second])
    assert [item.tolist() for item in both.responses] == [[0], [1], [2], [3], [7]] and len(both.prompts) == 5
    assert [item.tolist() for item in both.sample(3).responses] == [[0], [2], [7]]


# --- What simulations of a real engine rest on


def test_calibrations_come_back_from_json_as_they_were():
    cost = CostModel(1e-6, 1e-3, 20e-3, knots=(1, 8), curve=(0.02, 0.03))
    cost.observe(100, 8, 0.05)
    calibration = Calibration(cost, DraftCost(1e-3), 1e-4, 1e-5, 5, drafter=DraftCost(2e-3, is_autoregressive=True))
    again = Calibration.from_dict(json.loads(json.dumps(calibration.as_dict())))
    assert again == calibration and again.cost.seconds(100, 8) == cost.seconds(100, 8) != cost.profiled(100, 8, 1)


def test_a_hybrid_is_simulated_with_the_time_of_both():
    """The draft model drafts where trees draft nothing, and its time counts."""
    setup = new_setup(responses=[np.tile(np.arange(20, 30), 3)] * 4, replays=True)
    requests = new_requests(setup, np.zeros(4), np.random.default_rng(0))
    trees = Calibration(COST, DraftCost(1e-3), 0.0, 0.0, 16)
    draft = Calibration(COST, DraftCost(per_call=5e-3, is_autoregressive=True), 0.0, 0.0, 5)
    hybrid = Calibration.of_hybrid(trees, draft)
    results, explanations = zip(*[
        Twin(setup, "hybrid", item).run_logged(requests, lambda _: FixedLength(3))
        for item in (hybrid, replace(hybrid, drafter=replace(draft.draft, per_call=0.0)))
    ])  # fmt: skip
    counts = [result.statistics for result in results]
    names = list(explanations[0].report.acceptance)
    assert len(names) == 2, "each source's drafts by themselves"
    assert {part for name in names for part in name.split(" + ")} == {"SuffixTreeCandidates", "TableCandidates"}
    assert counts[0].drafted_tokens == counts[1].drafted_tokens > 0
    assert counts[0].seconds_draft > counts[1].seconds_draft + 3 * 5e-3


def test_rehearsals_tell_how_slow_the_machine_is():
    """The factor is that of the steps, for any rehearsed requests."""
    setup = new_setup(responses=[np.tile(np.arange(20, 30), 3)] * 4, replays=True)
    requests = new_requests(setup, np.array([0.0, 0.3]), np.random.default_rng(0))
    calibration = Calibration(COST, DraftCost(1e-3), 0.0, 0.0, 16)
    twin = Twin(setup, "prompt_lookup", calibration)
    slow = [twin.scaled(factor).run(requests, lambda _: FixedLength(2)) for factor in (1.6, 1.8)]
    assert twin.slowness(requests, lambda _: FixedLength(2), slow) == pytest.approx(1.7, rel=0.01)


def test_policies_by_name_have_costs_of_their_own():
    policies = Policies(COST, BatchLookupTable({1: 4, 4: 2}))
    assert isinstance(policies.new("none"), NoSpeculation) and policies.new("k=3").num_nodes == 3
    assert policies.new("table").length(2) == 2
    costs = [policies.new(name).cost for name in ("step", "request", "tree", "confidence", "auction", "auction")]
    assert all(cost is not COST for cost in costs) and len(set(map(id, costs))) == 6
    assert [is_fixed(name) for name in ("none", "k=1", "table", "auction")] == [True, True, False, False]


def test_a_draft_model_is_simulated_by_one_forward_over_each_text():
    """The drafts that the table tells are accepted at the same places as the model's own."""
    target = tiny_llama()
    draft = noisy_copy(target, 0.05)
    prompts = [np.random.default_rng(index).integers(3, 40, 12) for index in range(4)]
    setup = Setup(target, draft, prompts, max_new_tokens=40, max_batch_size=2, seed=0)
    policy = FixedLength(3)
    real = LoadResult()
    load_runs.serve(setup, "draft", policy, new_requests(setup, np.zeros(4), np.random.default_rng(0)), real)
    engine = load_runs.Engine(target, "none")
    setup.responses = [np.array(output.generated_tokens) for output in engine.generate(prompts, max_new_tokens=40)]
    requests = new_requests(setup, np.zeros(4), np.random.default_rng(0))
    calibration = Calibration(COST, DraftCost(is_autoregressive=True), 0.0, 0.0, 5)
    twin = Twin(setup, "draft", calibration).run(requests, lambda _: policy)
    assert twin.num_tokens == real.num_tokens == sum(map(len, setup.responses))
    for name in ("accepted_tokens", "steps"):
        assert getattr(twin.statistics, name) == getattr(real.statistics, name)
    assert 0 < twin.statistics.acceptance_rate < 1
    ranks = with_draft_model(requests, draft, {})[0].ranks
    assert set(ranks.tolist()) == {0, 1}


def test_exploration_finds_costs_and_acceptance():
    cost = CostModel(alpha=0.0, gamma=0.5e-3, delta=10e-3)  # half of the truth
    times = np.zeros(8)
    requests = with_acceptance(World(8, {}).same_lengths(times), 0.7, np.random.default_rng(0))
    policy, draft = Exploration(cost), DraftCost(per_call=2e-3, per_row=1e-4, is_autoregressive=True)
    SimulatedEngine(COST, TableCandidates((1,) * 5, True), draft).run(requests, policy)
    assert policy.cost.seconds(0, 32) == pytest.approx(COST.seconds(0, 32), rel=0.1)
    (timer,) = policy.timers.values()
    per_call, per_row = timer.seconds(DraftCost(is_autoregressive=True))
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


def test_figure_3_counts_tokens_and_steps():
    """One request at a time at the lowest rate: a token of each, and k drafted ones, in a step."""
    world = World(12, {})
    sizes, steps = figure_3(world).panels.values()
    for rate in (2.0, 22.0):
        assert sorted(sizes, key=lambda name: sizes[name][rate]) == ["none", "k=1", "k=3", "k=5"]
    assert steps["none"][2.0] == LENGTH and steps["k=5"][2.0] < steps["k=3"][2.0] < steps["k=1"][2.0] < LENGTH


def test_sssd_s_figure_7_plays_mixed_text_in_batches():
    """Its device is idle up to some hundred tokens: without drafts, time per token is that of reading the weights."""
    rng, world = np.random.default_rng(0), World(6, {})
    passages = [rng.integers(0, 50, 30) for _ in range(2)]
    world.recordings = {
        name: [Recording(np.append(passage[:10], number), passage) for number in range(8)]
        for name, passage in zip("ab", passages)
    }
    figure = figure_sssd(world)
    assert figure.claims[0].holds
    latency, spent = figure.panels.values()
    assert spent["none"][1] == latency["none"][1] == pytest.approx(1e3 * llama_3_cost().seconds(0, 1), rel=0.1)
    assert latency["SSSD"][64] == pytest.approx(64 * spent["SSSD"][64])
