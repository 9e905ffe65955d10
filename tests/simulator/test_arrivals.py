"""Arrival processes have the rate and variation that were asked for."""

import numpy as np
import pytest

from hf_smartspec.simulator import gamma, poisson

from .helpers import rng


@pytest.mark.parametrize("rate", [0.5, 20.0])
@pytest.mark.parametrize("variation", [0.0, 0.5, 1.0, 2.0])
def test_intervals_have_the_asked_mean_and_variation(rate, variation):
    """With 20,000 intervals, both lie within 6 standard errors: one false alarm in 10^8."""
    times = gamma(rate, variation, 20_000, rng())
    intervals = np.diff(times, prepend=0.0)
    assert (intervals >= 0).all()
    assert intervals.mean() * rate == pytest.approx(1, abs=6 * max(variation, 1e-9) / np.sqrt(20_000))
    assert intervals.std() / intervals.mean() == pytest.approx(variation, rel=0.15, abs=1e-9)


def test_poisson_is_gamma_of_variation_one_and_repeats_with_its_seed():
    assert poisson(3.0, 50, rng(1)).tolist() == gamma(3.0, 1.0, 50, rng(1)).tolist()
    assert poisson(3.0, 50, rng(1)).tolist() != poisson(3.0, 50, rng(2)).tolist()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: poisson(0.0, 3, rng()), "`rate` must be positive"),
        (lambda: gamma(1.0, -1.0, 3, rng()), "`variation`"),
        (lambda: gamma(1.0, 1.0, -3, rng()), "`num_requests`"),
    ],
)
def test_bad_processes_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
