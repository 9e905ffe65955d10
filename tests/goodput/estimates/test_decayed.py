"""Decayed means and rates give what the formulas give that stand in their place elsewhere, to the last bit."""

import math
import random

import numpy as np
import pytest

from hf_smartspec.goodput.estimates.decayed import DecayedMean, DecayedRate, shrunk


@pytest.fixture
def values() -> list[float]:
    rng = random.Random(7)
    return [rng.lognormvariate(0, 2) * rng.choice([-1, 1]) for _ in range(500)]


def test_a_mean_is_plain_at_first(values):
    mean = DecayedMean(0.1)
    for num, value in enumerate(values[:10], start=1):
        mean.add(value)
        assert mean.mean == pytest.approx(sum(values[:num]) / num)


@pytest.mark.parametrize("weight, start, num", [(0.1, 0.0, 0), (0.1, 1.0, 1), (0.05, 1.0, 1), (0.02, 0.0, 0)])
def test_means_that_begin_plain(values, weight, start, num):
    mean, expected, count = DecayedMean(weight, start, num), start, num
    for value in values:
        count += 1
        expected += max(weight, 1 / count) * (value - expected)
        mean.add(value)
        assert (mean.mean, mean.num) == (expected, count)


@pytest.mark.parametrize("weight, start", [(0.05, 0.0), (0.02, 1.0)])
def test_means_whose_newest_value_has_one_weight_always(values, weight, start):
    mean, expected = DecayedMean(weight, start, math.inf), start
    for value in values:
        expected += weight * (value - expected)
        mean.add(value)
        assert mean.mean == expected


def test_a_rate_with_a_lasting_prior(values):
    """Of float32 sums of probabilities, and counts, by 0.96 per step: how calibrated drafts fare."""
    rate, expected, observed = DecayedRate(1.0, 3.0), 0.0, 0.0
    for num, value in enumerate(values):
        tries, hits = np.array([abs(value)], np.float32).sum(), np.array([num % 3], np.int64).sum()
        expected, observed = expected * 0.96 + tries, observed * 0.96 + hits
        rate.add(tries, hits, 0.96)
        ratio = (observed + 3.0) / (expected + 3.0)
        assert rate.rate == ratio and type(rate.rate) is type(ratio)


def test_a_rate_whose_prior_decays(values):
    """Tokens of steps by those of plain decoding, and what a level of a draft promises by the level above."""
    speedup, tokens, plain = DecayedRate(tries=10.0, hits=10.0), 10.0, 10.0
    outlook, above, below = DecayedRate(tries=1.0, hits=0.7), 1.0, 0.7
    for num, value in enumerate(map(abs, values)):
        tokens, plain = tokens * 0.98 + num % 9, plain * 0.98 + value
        speedup.add(value, num % 9, 0.98)
        assert speedup.rate == tokens / plain
        above, below = 0.8 * above + value, 0.8 * below + num / 7
        outlook.add(value, num / 7, 0.8)
        assert outlook.rate == below / above


def test_a_rate_without_a_prior(values):
    """Steps in which nothing was proposed, by all of the latest 256."""
    rate, steps, idle, decay = DecayedRate(), 0.0, 0.0, 1 - 1 / 256
    for value in values:
        share = min(abs(value), 1.0)
        steps, idle = steps * decay + 1, idle * decay + share
        rate.add(1, share, decay)
        assert rate.rate == idle / steps and rate.tries == steps


def test_rates_of_cells_that_decay_apart():
    """Levels that came true, and of these the new ones, by what the drafts promised that were there before."""
    rng = np.random.default_rng(3)
    rate, true, new = DecayedRate(strength=4.0, tries=np.zeros(5), hits=np.zeros(5)), np.zeros(5), np.zeros(5)
    prior = rng.random(5)
    for _ in range(300):
        tries = rng.integers(0, 6, 5).astype(float)
        hits = np.minimum(tries, rng.integers(0, 6, 5))
        decay = 0.5 ** (tries / 300.0)
        true, new = true * decay + tries, new * decay + hits
        rate.add(tries, hits, decay)
        assert np.array_equal(shrunk(rate.hits, rate.tries, prior, 4.0), (new + 4.0 * prior) / (true + 4.0))
