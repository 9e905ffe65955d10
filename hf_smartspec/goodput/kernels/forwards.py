"""Costs of forwards of consecutive sizes, and their correction by measured steps."""

import math

import numpy as np

from ...jit import compiled_for, inner


@compiled_for("i8 f8:1 f8:1 f8 f8 f8:1 f8:1 f8:1")
def by_tokens(first, knots, curve, gamma, delta, log_factors, seconds, factors):
    """
    Write the costs of forwards of `first`, `first` + 1, ... tokens: to `seconds` (float64) the time of their tokens by
    the profile, from the curve through (`knots`, `curve`) or, if that is empty, the line; to `factors` (float64) the
    correction of that time, interpolated between `log_factors` at 1, 2, 4, ... tokens.
    """
    at, last = 1, len(knots) - 1
    highest, is_corrected = len(log_factors) - 1.001, False
    for factor in log_factors:
        is_corrected = is_corrected or factor != 0.0
    for number in range(len(seconds)):
        batched = first + number
        if last > 0:
            while at < last and batched >= knots[at]:
                at += 1
            slope = (curve[at] - curve[at - 1]) / (knots[at] - knots[at - 1])
            seconds[number] = curve[at - 1] + (max(batched, knots[0]) - knots[at - 1]) * slope
        else:
            seconds[number] = gamma * batched + delta
        factors[number] = 1.0
        if is_corrected:
            place = _place(batched, highest)
            low = int(place)
            share = place - low
            factors[number] = math.exp(log_factors[low] * (1.0 - share) + log_factors[low + 1] * share)


@inner
def _place(batched, highest):
    return min(max(math.log2(max(batched, 1.0)), 0.0), highest)


@compiled_for("f8:1 i8 f8:2 f8:1")
def write_doubts(sizes, other, covariance, doubts):
    """
    Write the standard deviations of the log factors of `sizes` (float64 `[n]`), each less that of the size `other`,
    to `doubts` (float64 `[n]`). `covariance` is that of the log factors at 1, 2, 4, ... tokens.
    """
    highest = len(covariance) - 1.001
    place = _place(other, highest)
    places, weights = np.empty(4, np.int64), np.empty(4)
    places[2], places[3] = int(place), int(place) + 1
    weights[2], weights[3] = place - int(place) - 1.0, int(place) - place
    for number in range(len(sizes)):
        place = _place(sizes[number], highest)
        low = int(place)
        places[0], places[1] = low, low + 1
        weights[0], weights[1] = 1.0 - (place - low), place - low
        variance = 0.0
        for one in range(4):
            for two in range(4):
                variance += weights[one] * weights[two] * covariance[places[one], places[two]]
        doubts[number] = math.sqrt(max(variance, 0.0))


@compiled_for("i8 f8 f8 f8 f8:1 f8:1 f8 f8:2 f8:2 f8:1 f8:2")
def correct(low, share, predicted, measured, sizes, limits, kept, drift, doubt, log_factors, new_doubt):
    """
    Do a step of a Kalman filter: correct the `log_factors` of all bins by the error of one measured step, the logarithm
    of measured by predicted seconds. Then bound the costs of sizes that are in doubt by that of this step's size, where
    earlier steps have measured it: no forward costs less than a smaller one.

    Args:
        low, share: Bin below the step's size, and the size's distance from it.
        predicted, measured: Seconds of the step.
        sizes: Profiled seconds of forwards like this step of the bins' sizes, float64 `[bins]`.
        limits (float64 `[4]`): Standard deviation of single steps; the number of deviations beyond which one may be a
            disturbance; the share of a longer delay that counts as its deviation then; and the deviation of a size's
            factor relative to this size's beyond which the size is in doubt.
        kept, drift, doubt: The covariance of the factors before the step, `[bins, bins]`, is `kept * doubt + drift`.
        new_doubt: Buffer for the covariance after the step.
    """
    step, surprise, disturbed, unknown = limits
    num = len(log_factors)
    shared = np.empty(num)  # covariance of this size and each bin
    for place in range(num):
        for other in range(num):
            new_doubt[place, other] = kept * doubt[place, other] + drift[place, other]
    for place in range(num):
        shared[place] = (1 - share) * new_doubt[low, place] + share * new_doubt[low + 1, place]
    own = (1 - share) * shared[low] + share * shared[low + 1]
    # Disturbances make steps slower: quicker ones count in full.
    error, most = math.log(measured / predicted), surprise * math.sqrt(own + step**2)
    weight = 1 / (own + step**2 + (disturbed * max(error - surprise * step, 0.0)) ** 2)
    for place in range(num):
        log_factors[place] += weight * shared[place] * error
        for other in range(num):
            new_doubt[place, other] -= weight * shared[place] * shared[other]
    if own > unknown**2 or abs(error) > most:
        return  # the first step of this size, or a disturbance: no measure for others
    seconds, rest = math.log(predicted) + weight * own * error, 1 - weight * own
    for place in range(num):
        excess = math.log(sizes[place]) + log_factors[place] - seconds
        is_in_doubt = new_doubt[place, place] + rest * (own - 2 * shared[place]) > unknown**2
        if is_in_doubt and (excess > 0.0) == (place <= low):
            log_factors[place] -= excess
