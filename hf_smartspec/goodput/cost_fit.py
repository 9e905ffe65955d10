"""Least-squares fit of a `CostModel`'s coefficients to measured forwards."""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

_SAME = 1.08  # forwards that take at most so many times the host's time are taken to wait for the host
_NOISE = 0.01  # relative error of any measurement
_MOST_TURNS = 8  # rounds of separating forwards that wait for the host from those that wait for the device


@dataclass(frozen=True)
class Measurements:
    """Measured forwards as in `CostPoint`, `[n]` float64 each."""

    context: np.ndarray
    batched: np.ndarray
    width: np.ndarray
    seconds: np.ndarray

    def __getitem__(self, used: np.ndarray) -> "Measurements":
        return Measurements(self.context[used], self.batched[used], self.width[used], self.seconds[used])


class Fit(NamedTuple):
    """Coefficients by their names in `CostModel`, and their predictions in seconds, `[n]` float64."""

    numbers: dict[str, Any]
    predicted: np.ndarray

    def errors(self, seconds: np.ndarray) -> np.ndarray:
        """Return the relative errors, `[n]` float64."""
        return self.predicted / seconds - 1

    def badness(self, seconds: np.ndarray, used: np.ndarray) -> float:
        """Return Schwarz's criterion at the `used` points: every further coefficient must reduce the error enough."""
        num_coefficients = 2 + (len(self.numbers.get("knots", ())) or 2) + ("host" in self.numbers)
        error = float((self.errors(seconds)[used] ** 2).mean()) + _NOISE**2
        num = np.count_nonzero(used)
        return num * np.log(error) + num_coefficients * np.log(num)


def fit_coefficients(points: Measurements) -> dict[str, Any]:
    """
    Return the coefficients that minimise the squared relative error, all at least 0: for the device's time alone, or
    for the larger of the device's time and a constant of the host, whichever fits better by Schwarz's criterion.
    """
    everything = np.ones(len(points.seconds), bool)
    fits = [_device(points, everything)]
    for guess in np.unique(np.quantile(points.seconds, np.linspace(0, 0.9, 10))):
        fits += _with_host(points, guess)
    numbers = min(fits, key=lambda fit: fit.badness(points.seconds, everything)).numbers
    of_one_token = numbers["curve"][0] if "curve" in numbers else numbers["gamma"] + numbers["delta"]
    if not of_one_token and "host" not in numbers:  # by noise, all time was put down to contexts
        numbers["host"] = float(points.seconds.min())
    return numbers


def _with_host(points: Measurements, guess: float) -> list[Fit]:
    """
    Fit the larger of the host's time, about `guess`, and the device's; return no fit if too few forwards wait for the
    device.
    """
    waits = points.seconds <= _SAME * guess
    host = float(np.exp(np.log(points.seconds[waits]).mean()))
    used = ~waits
    for _ in range(_MOST_TURNS):
        if np.count_nonzero(used) < 4 or len(np.unique(points.batched[used])) < 2:
            return []
        fit = _device(points, used)
        # Forwards that wait for the host show only that the device takes no longer: use those for which the fit errs.
        wrong = waits & ~used & (fit.predicted > host)
        if not wrong.any():
            break
        used |= wrong
    return [Fit(fit.numbers | {"host": host}, np.maximum(fit.predicted, host))]


def _device(points: Measurements, used: np.ndarray) -> Fit:
    """Return the better fit to the `used` points (`[n]` bool): a line over tokens, or a curve through all sizes."""
    line, knots = _line(points, used), np.unique(points.batched[used])
    if len(knots) < 3:
        return line
    curve = _curve(points, used, knots, line)
    return min((line, curve), key=lambda fit: fit.badness(points.seconds, used))


def _line(points: Measurements, used: np.ndarray) -> Fit:
    features = np.stack([*_attention(points), points.batched, np.ones_like(points.seconds)])
    coefficients = _fit_relative(features[:, used], points.seconds[used])
    return Fit(dict(zip(("alpha", "beta", "gamma", "delta"), coefficients.tolist())), coefficients @ features)


def _curve(points: Measurements, used: np.ndarray, knots: np.ndarray, line: Fit) -> Fit:
    """Fit a curve by its value at the first knot and its rises, all at least 0, so that it cannot fall."""
    rises = [np.clip((points.batched - low) / (high - low), 0, 1) for low, high in pairwise(knots)]
    features = np.stack([*_attention(points), np.ones_like(points.seconds), *rises])
    coefficients = _fit_relative(features[:, used], points.seconds[used])
    alpha, beta = coefficients[:2].tolist()
    curve = {"knots": tuple(knots.tolist()), "curve": tuple(np.cumsum(coefficients[2:]).tolist())}
    return Fit(line.numbers | {"alpha": alpha, "beta": beta} | curve, coefficients @ features)


def _attention(points: Measurements) -> tuple[np.ndarray, np.ndarray]:
    return points.context, points.context * points.width


def _fit_relative(features: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    """Return coefficients >= 0 of `features` (`[k, n]`) that minimise the squared relative error, `[k]`."""
    return nonnegative_least_squares((features / seconds).T, np.ones(len(seconds)))


def nonnegative_least_squares(matrix: np.ndarray, target: np.ndarray) -> np.ndarray:
    """
    Return the x >= 0 that minimises |matrix @ x - target| (Lawson and Hanson's active-set method).

    Args:
        matrix (`np.ndarray` of shape `[n, k]`), target (`[n]`): float64. Columns may differ in scale by any factor.

    Returns:
        `np.ndarray` of shape `[k]`, float64: The coefficients x.
    """
    norms = np.linalg.norm(matrix, axis=0)
    scale = np.where(norms > 0, norms, 1.0)
    matrix = matrix / scale
    solution, passive = np.zeros(matrix.shape[1]), np.zeros(matrix.shape[1], bool)
    for _ in range(10 * len(solution)):
        gradient = np.where(passive | (norms == 0), -np.inf, matrix.T @ (target - matrix @ solution))
        if gradient.max() <= 1e-10 * np.linalg.norm(target):
            break
        passive[gradient.argmax()] = True
        while (trial := _solve(matrix, target, passive))[passive].min() <= 0:
            # Go towards the trial solution as far as it is feasible; coefficients that reach 0 become inactive.
            blocked = passive & (trial <= 0)
            step = (solution[blocked] / (solution[blocked] - trial[blocked])).min()
            solution = solution + step * (trial - solution)
            passive &= solution > 1e-14
            if not passive.any():
                break
        solution = trial
    return solution / scale


def _solve(matrix: np.ndarray, target: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """Return the plain least-squares solution for some columns, with 0 for the others."""
    solution = np.zeros(matrix.shape[1])
    solution[columns] = np.linalg.lstsq(matrix[:, columns], target, rcond=None)[0]
    return solution
