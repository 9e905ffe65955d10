"""Costs of forwards of consecutive sizes."""

import math

from ...jit import compiled


@compiled
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
            place = min(max(math.log2(max(batched, 1)), 0.0), highest)
            low = int(place)
            share = place - low
            factors[number] = math.exp(log_factors[low] * (1.0 - share) + log_factors[low + 1] * share)
