"""The auction over the nodes of a step's drafts."""

import numpy as np

from ..drafts.forest import Forest
from .cost import UNKNOWN, CostModel
from .kernels.prefixes import best_prefix
from .plan import Plan, Won

_WIDTHS = np.array([1, 2, 3, 4, 6, 8, 16, 32, 64, 128])  # bounds on the nodes of one row
_NUM_NARROW = 4  # first bounds, which are always tried
_OPTIMISM = 3.0  # standard deviations by which sizes may be cheaper than expected, where they are tried
_EPSILON = 1e-9  # relative amount by which a child bids less than its parent at equal probability


def mark_winners(
    cost: CostModel,
    plan: Plan,
    forest: Forest,
    gains: np.ndarray,
    least: float,
    may_try: bool,
    mask: np.ndarray,
) -> tuple[Won, Won]:
    """
    Mark the nodes that maximise the profit, B + sum of a_n - lambda * T(S), in tokens, or none if no set of nodes
    exceeds plain decoding by the margin. If another size is better by the lowest likely costs, mark its nodes where
    trials are allowed: sizes that a wrong profile makes too expensive are run, and measured.

    Args:
        gains (`np.ndarray` of shape `[n]`, float64): The worth of every node, a_n.
        least (`float`): Profit of plain decoding, and the margin.
        may_try (`bool`): Whether another size may be tried.
        mask (`np.ndarray` of shape `[n]`, bool): Filled with the marks.

    Returns:
        tuple of `Won`: Result of the best nodes by the expected costs, and of the marked ones.
    """
    rows = plan.rows
    # Strictly less than the parent's, rounding or not; nodes that cannot be accepted stay out.
    bids = gains * (1 - _EPSILON * forest.depths)
    order = np.argsort(-bids)[: np.count_nonzero(bids > _EPSILON)]
    context, _, width = rows.forward_size(0, 0)
    fixed, per_width = (cost.alpha + cost.beta * width) * context, cost.beta * rows.num_context
    costs = np.array([len(rows), least, plan.price, fixed, per_width, cost.host, plan.prefill_seconds])
    scanned = order, forest.row, gains, _WIDTHS, _NUM_NARROW, costs
    counts = np.empty(len(rows), np.int64)
    best = Won(*best_prefix(*scanned, *cost.by_tokens(rows.num_batched, len(order) + 1), counts, mask))
    if not best.num_nodes:
        best = Won(0, float(len(rows)), plan.plain_seconds)
    if not may_try:
        return best, best
    sizes = rows.num_batched + np.arange(len(order) + 1)
    doubts = cost.doubt(sizes, sizes[best.num_nodes])
    # At most twice the tokens, or as many as have a known cost, which fewer do not exceed.
    most = min(max(2 * best.num_nodes + len(rows), np.flatnonzero(doubts <= UNKNOWN)[-1]), len(order))
    if doubts[: most + 1].max() <= UNKNOWN:
        return best, best
    more, lowest = np.zeros_like(mask), cost.by_tokens(sizes[0], most + 1, _OPTIMISM * doubts[: most + 1])
    tried = Won(*best_prefix(order[:most], *scanned[1:], *lowest, counts, more))
    if not tried.num_nodes or doubts[tried.num_nodes] <= UNKNOWN:
        return best, best
    mask[:] = more
    widest = int(np.bincount(forest.row[mask]).max())
    expected = float(cost.seconds(*rows.forward_size(tried.num_nodes, 1 + widest)))
    return best, tried._replace(seconds=expected - plan.prefill_seconds)
