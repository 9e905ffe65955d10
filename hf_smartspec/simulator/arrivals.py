"""Arrival times of requests."""

import numpy as np


def poisson(rate: float, num_requests: int, rng: np.random.Generator) -> np.ndarray:
    """Draw arrival times of a Poisson process of `rate` requests per second, `[num_requests]` float64, in seconds."""
    return gamma(rate, 1.0, num_requests, rng)


def gamma(rate: float, variation: float, num_requests: int, rng: np.random.Generator) -> np.ndarray:
    """
    Draw arrival times whose intervals follow a Gamma distribution (Su et al., section 5.3).

    Args:
        rate (`float`): Requests per second.
        variation (`float`): Coefficient of variation of the intervals: 0 for regular arrivals, 1 for a Poisson process,
            more for bursts.

    Returns:
        `np.ndarray` of shape `[num_requests]`, float64: seconds, rising.
    """
    if not np.isfinite(rate) or rate <= 0:
        raise ValueError(f"`rate` must be positive, got {rate!r}.")
    if not np.isfinite(variation) or variation < 0:
        raise ValueError(f"`variation` must be a number of at least 0, got {variation!r}.")
    if num_requests < 0:
        raise ValueError(f"`num_requests` must be at least 0, got {num_requests!r}.")
    of_mean_1 = rng.gamma(variation**-2, variation**2, num_requests) if variation else np.ones(num_requests)
    return np.cumsum(of_mean_1) / rate
