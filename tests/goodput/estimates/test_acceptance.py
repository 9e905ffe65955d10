"""Acceptance rates and expected lengths."""

import numpy as np
import pytest

from hf_smartspec.goodput import AcceptanceEstimator, PowerLaw, expected_length, expected_tree_length, optimal_length


def watch(estimator, rates, steps, seed=0, depth=4):
    """Shows drafts of `depth` levels, of requests with these acceptance rates (one each, or one per depth)."""
    rng = np.random.default_rng(seed)
    rates = np.broadcast_to(np.asarray(rates, float).reshape(len(rates), -1), (len(rates), depth))
    for _ in range(steps):
        succeeded = np.logical_and.accumulate(rng.random(rates.shape) < rates, axis=1)
        tried = np.concatenate([np.ones((len(rates), 1), bool), succeeded[:, :-1]], axis=1)
        estimator.update(range(len(rates)), tried, succeeded)


def test_the_prior_holds_before_anything_is_known():
    estimator = AcceptanceEstimator(prior=0.6)
    assert estimator.rate == pytest.approx(0.6)
    assert estimator.of_requests(["a", "b"], 3) == pytest.approx(np.full((2, 3), 0.6))


def test_converges_globally_and_per_request():
    estimator = AcceptanceEstimator(half_life=1e5, request_half_life=1e4)
    watch(estimator, [0.9, 0.5, 0.2], steps=600)
    assert estimator.rates(range(3)) == pytest.approx([0.9, 0.5, 0.2], abs=0.06)
    assert estimator.rates(["unknown"])[0] == pytest.approx(estimator.rate)


def test_converges_per_depth():
    estimator = AcceptanceEstimator(half_life=1e5)
    watch(estimator, [[0.9, 0.7, 0.5, 0.3]] * 2, steps=1000)
    assert estimator.by_depth(4) == pytest.approx([0.9, 0.7, 0.5, 0.3], abs=0.05)
    assert estimator.by_depth(6)[4:] == pytest.approx(estimator.by_depth(4)[3]), "deeper ones are like the deepest"


def test_follows_a_change():
    estimator = AcceptanceEstimator()
    watch(estimator, [0.95], steps=400)
    assert estimator.rate > 0.9
    watch(estimator, [0.1], steps=1200, seed=1)
    assert estimator.rate < 0.2 and estimator.rates([0])[0] < 0.2


def test_the_luck_of_the_only_request_counts_once():
    estimator = AcceptanceEstimator()
    for is_hit in (True, True, False, False, False, False, False, True):
        estimator.update([0], np.ones((1, 1), bool), np.full((1, 1), is_hit))
    assert estimator.rate == pytest.approx((3 + 4 * 0.7) / 12, abs=0.01), "the prior counts as four levels"
    assert estimator.rates([0])[0] > (3 + 0.5) / 8, "and is not lost where the request is judged"


def test_the_less_was_seen_the_more_is_in_doubt():
    estimator, doubts = AcceptanceEstimator(half_life=1e5), []
    for _ in range(3):
        doubts.append(estimator.doubt)
        watch(estimator, [0.6], steps=150)
    assert doubts == sorted(doubts, reverse=True) and doubts[0] > 0.1 and doubts[-1] < 0.03
    watch(estimator, [0.0], steps=5000)
    assert estimator.doubt < 0.01, "what never comes true is in no doubt"


def test_requests_come_and_go():
    estimator = AcceptanceEstimator(half_life=1e5)
    for name in range(100):
        succeeded = np.full((1, 4), name % 2 == 0)
        estimator.update([name], np.ones((1, 4), bool), succeeded)
        if name >= 10:
            estimator.forget(name - 10)
    rates = estimator.rates(range(90, 100))
    assert len(estimator._requests) == 10 and len(estimator._request_succeeded) <= 16, "places are used again"
    assert (rates[::2] > estimator.rate).all() and (rates[1::2] < estimator.rate).all()
    assert estimator.rates([5])[0] == pytest.approx(estimator.rate)


def test_a_forgotten_request_is_like_any_other():
    estimator = AcceptanceEstimator()
    watch(estimator, [0.9, 0.1], steps=100)
    assert estimator.rates([1])[0] < 0.3
    estimator.forget(1)
    estimator.forget("unknown")
    assert estimator.rates([1])[0] == pytest.approx(estimator.rate)


@pytest.mark.parametrize("arguments", [{"half_life": 0}, {"request_half_life": -1}, {"prior": 1.5}])
def test_bad_settings_are_refused(arguments):
    with pytest.raises(ValueError, match=next(iter(arguments))):
        AcceptanceEstimator(**arguments)


# --- Expected lengths. Monte Carlo of 40,000 draws: five standard deviations are below 0.06 tokens. -------------------


@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.8, 1.0])
@pytest.mark.parametrize("num_nodes", [0, 1, 5])
def test_equation_8_by_monte_carlo(alpha, num_nodes):
    hits = np.random.default_rng(0).random((40_000, num_nodes)) < alpha
    lengths = 1 + np.logical_and.accumulate(hits, axis=1).sum(axis=1)
    assert expected_length(alpha, num_nodes) == pytest.approx(lengths.mean(), abs=0.06)


def test_equation_9_is_a_sum_over_requests():
    alphas, lengths = np.array([0.2, 0.9, 1.0]), np.array([3, 0, 2])
    total = expected_length(alphas, lengths).sum()
    assert total == pytest.approx(1 + 0.2 + 0.04 + 0.008 + 1 + 3)


@pytest.mark.parametrize(
    ("alphas", "widths"), [([0.4, 0.3, 0.5], [3, 2, 3]), ([0.6], [1]), ([0.5, 0.9], [0, 4]), ([], [])]
)
def test_equation_10_by_monte_carlo(alphas, widths):
    rng = np.random.default_rng(0)
    heads = [(rng.random((40_000, width)) < alpha).any(axis=1) for alpha, width in zip(alphas, widths)]
    hits = np.array(heads, bool).reshape(len(heads), 40_000)
    lengths = 1 + np.logical_and.accumulate(hits, axis=0).sum(axis=0)
    assert expected_tree_length(alphas, widths) == pytest.approx(lengths.mean(), abs=0.06)


def test_equation_10_with_heads_of_one_is_equation_8():
    assert expected_tree_length([0.7] * 4, [1] * 4) == pytest.approx(float(expected_length(0.7, 4)))


@pytest.mark.parametrize("call", [
    lambda: expected_length(1.2, 3), lambda: expected_length(0.5, -1), lambda: expected_tree_length([0.5], [1, 2]),
    lambda: expected_tree_length([2.0], [1]), lambda: PowerLaw.fit([1, 1], [0.5, 0.5]),
    lambda: PowerLaw.fit([1, 2], [0, 1]),
    lambda: optimal_length(PowerLaw(0.9, 0.5), -1.0, 1.0),
])  # fmt: skip
def test_nonsense_is_refused(call):
    with pytest.raises(ValueError, match="must"):
        call()


# --- Su et al. --------------------------------------------------------------------------------------------------------


def test_a_power_law_is_recovered():
    law = PowerLaw.fit([1, 2, 4, 8], [0.9 * s**0.548 for s in (1, 2, 4, 8)])
    assert law == pytest.approx((0.9, 0.548))


def test_the_optimal_length_minimises_the_time_per_token():
    law = PowerLaw(0.9, 0.548)  # the paper's own
    lengths = np.linspace(1, 60, 5901)
    found = []
    for per_node in (0.02, 0.05, 0.1, 0.2):
        seconds = (per_node * lengths + 1.0) / (law.scale * lengths**law.exponent + 1)
        found.append(optimal_length(law, per_node, 1.0))
        assert found[-1] == pytest.approx(lengths[seconds.argmin()], abs=0.02)
    assert found == sorted(found, reverse=True), "the dearer a node, the fewer"
    assert optimal_length(law, 0.0, 1.0) == 1024 and optimal_length(law, 2.0, 1.0) == 0


def test_what_was_observed_may_be_doubted():
    """A source that has learnt gets a chance, and what it does then soon decides."""
    estimator = AcceptanceEstimator()
    for _ in range(60):
        estimator.update(["a"], np.ones((1, 4), bool), np.zeros((1, 4), bool))
    before = estimator.rate
    estimator.decay_counts()
    assert before < 0.1 and estimator.rate > 3 * before
    for _ in range(10):
        estimator.update(["a"], np.ones((1, 4), bool), np.ones((1, 4), bool))
    assert estimator.rate > 0.7 and estimator.rates(["a"])[0] > 0.7


def test_counts_decay_and_grow_when_a_draft_is_deeper_than_any_before():
    rng, estimator, names = np.random.default_rng(5), AcceptanceEstimator(), [f"request {n}" for n in range(20)]
    levels, own = np.zeros((2, 12)), {name: np.zeros((2, 8)) for name in names}
    for step in range(100):
        chosen = rng.choice(names, 4, replace=False).tolist()
        tried = rng.random((4, rng.integers(1, 2 + step // 10))) < 0.6
        succeeded = tried & (rng.random(tried.shape) < 0.5)
        estimator.update(chosen, tried, succeeded)
        levels *= 0.5 ** (tried.sum() / estimator.half_life)
        levels[:, : tried.shape[1]] += tried.sum(axis=0), succeeded.sum(axis=0)
        for name, *lines in zip(chosen, tried, succeeded):
            own[name] *= 0.5 ** (lines[0].sum() / estimator.request_half_life)
            for counts, line in zip(own[name], lines):
                np.add.at(counts, np.minimum(np.flatnonzero(line), 7), 1)
    num_depths = len(estimator._levels.tries)
    assert num_depths > 8 and estimator._levels.tries == pytest.approx(levels[0, :num_depths])
    assert estimator._levels.hits == pytest.approx(levels[1, :num_depths])
    for name, line in estimator._requests.items():
        assert estimator._request_tried[line] == pytest.approx(own[name][0])
        assert estimator._request_succeeded[line] == pytest.approx(own[name][1].sum())
