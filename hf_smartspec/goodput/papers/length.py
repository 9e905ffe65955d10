"""The papers' formulas for the tokens that a draft yields by its length, and for optimal lengths."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

_LONGEST = 1024.0  # nodes; the search for an optimum ends here


def expected_length(alpha: float | np.ndarray, num_nodes: int | np.ndarray) -> np.ndarray:
    """
    Return l(alpha, k) of SmartSpec, Eq. 8: mean tokens of a chain of k nodes, the bonus token included, if each node is
    accepted with probability alpha given those before it. Summed over requests, it is Eq. 9.

    Args:
        alpha, num_nodes (numbers or arrays that broadcast): alpha in [0, 1] and k of at least 0.

    Returns:
        `np.ndarray`, float64: Tokens, of the arguments' common shape.

    Raises:
        ValueError: for an alpha outside [0, 1], or a negative k.
    """
    alpha, num_nodes = np.asarray(alpha, np.float64), np.asarray(num_nodes)
    if not ((alpha >= 0) & (alpha <= 1)).all():
        raise ValueError(f"`alpha` must lie in [0, 1], got {alpha}.")
    if not (num_nodes >= 0).all():
        raise ValueError(f"`num_nodes` must be at least 0, got {num_nodes}.")
    is_one = alpha == 1
    below = np.where(is_one, 0.0, alpha)
    return np.where(is_one, num_nodes + 1.0, (1 - below ** (num_nodes + 1)) / (1 - below))


def expected_tree_length(alphas: Sequence[float] | np.ndarray, widths: Sequence[int] | np.ndarray) -> Any:
    """
    Return l(alpha_1 ... alpha_h, k_1 ... k_h) of SmartSpec, Eq. 10: mean tokens of a full tree of h heads, the bonus
    token included, or of several trees `[..., h]`. Head i proposes `widths[..., i]` tokens; each of them is right with
    probability `alphas[i]`, independently.

    Eq. 10 as printed counts a head that fails by alpha_{i+1} alone, whatever its width, and leaves out the step in
    which the first head fails, which yields the bonus token. Both are corrected here, so that heads of width 1 and one
    rate agree with Eq. 8.

    Raises:
        ValueError: if the two differ in length, for an alpha outside [0, 1], or a width below 0.
    """
    rates, counts = np.asarray(alphas, np.float64), np.asarray(widths)
    if rates.ndim != 1 or rates.shape != counts.shape[-1:]:
        raise ValueError(f"`alphas` and `widths` must be of one length, got shapes {rates.shape} and {counts.shape}.")
    if not ((rates >= 0) & (rates <= 1)).all() or not (counts >= 0).all():
        raise ValueError(f"`alphas` must lie in [0, 1] and `widths` be at least 0, got {rates} and {counts}.")
    # A sum over i of (i + 1) times the probability of exactly i accepted heads is a sum of those of at least i.
    return 1 + np.cumprod(1 - (1 - rates) ** counts, axis=-1).sum(axis=-1)


def tree_size(widths: Sequence[int]) -> int:
    """Return the nodes of a full tree with `widths[d]` children of every node at depth d (SmartSpec, section 4.3)."""
    return int(np.cumprod(widths).sum())


def correct_lengths(correct: Sequence[int], longest: int) -> np.ndarray:
    """
    Return l(s) of Su et al., Eq. 4: the mean number of correct tokens in drafts of s = 1, 2, ..., `longest` tokens, by
    the numbers l_i of correct tokens at the beginning of one long draft each, `[longest]` float64.

    Raises:
        ValueError: without any drafts.
    """
    if not len(correct):
        raise ValueError("`correct` must hold the correct tokens of at least one draft.")
    return np.minimum(np.asarray(correct)[:, None], np.arange(1, longest + 1)).mean(axis=0)


class PowerLaw(NamedTuple):
    """l(s) = scale * s ** exponent: accepted nodes of a draft of s nodes, bonus token apart (Su et al., Eq. 5)."""

    scale: float
    exponent: float

    @classmethod
    def fit(cls, lengths: Sequence[float], accepted: Sequence[float]) -> "PowerLaw":
        """
        Fit the law to measurements by least squares of logarithms.

        Args:
            lengths, accepted (sequences of `float`): Draft lengths, and the mean accepted nodes at each. Both positive.

        Raises:
            ValueError: for fewer than two lengths, or entries that are not positive.
        """
        x, y = np.asarray(lengths, np.float64), np.asarray(accepted, np.float64)
        if x.shape != y.shape or len(np.unique(x)) < 2 or not ((x > 0) & (y > 0)).all():
            raise ValueError(f"`lengths` and `accepted` must be two or more positive pairs, got {lengths}, {accepted}.")
        exponent, log_scale = np.polyfit(np.log(x), np.log(y), 1)
        return cls(float(np.exp(log_scale)), float(np.clip(exponent, 0.0, 1.0)))


def optimal_length(law: PowerLaw, per_node: float, per_step: float) -> float:
    """
    Return s_opt of Su et al. (Eq. 12): the length that minimises (alpha_b * s + beta) / (c * s^gamma + 1), the seconds
    per token at batch size b.

    Args:
        law (`PowerLaw`): c and gamma.
        per_node (`float`): alpha_b, seconds that one more node in every row's draft adds, drafting included.
        per_step (`float`): beta, seconds of a step without drafts.

    Returns:
        `float`: Nodes, at most 1024; 0 if even one node does not pay.

    Raises:
        ValueError: for a negative `per_node`, or a `per_step` that is not positive.
    """
    if not (per_node >= 0 and per_step > 0):
        raise ValueError(f"`per_node` must be at least 0 and `per_step` positive, got {per_node} and {per_step}.")

    def seconds_per_token(length: float) -> float:
        return (per_node * length + per_step) / (law.scale * length**law.exponent + 1)

    def slope(length: float) -> float:  # has the sign of the derivative, and rises with the length
        power = law.scale * length**law.exponent
        return per_node * (1 + (1 - law.exponent) * power) - per_step * law.exponent * power / length

    low, high = 1e-6, _LONGEST
    if slope(high) <= 0:
        return high
    for _ in range(60):
        middle = float(np.sqrt(low * high))
        low, high = (low, middle) if slope(middle) > 0 else (middle, high)
    # A power law rises infinitely fast at 0, unlike real drafts: below one node, decide between none and one.
    return high if high >= 1 else float(seconds_per_token(1.0) < per_step)
