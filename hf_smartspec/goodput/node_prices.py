"""The cost of a further node or level, by which sources end drafts themselves."""

import numpy as np

from .cost import CostModel
from .policy import StepRows

_TYPICAL_NODES = 4  # nodes of a row at which the cost of a further one is taken
_NODE_COUNTS = (8, 16, 32, 64)  # nodes of a row among which a further one is cheapest
_DEPTHS = 8  # levels of a draft for which the cost of a further one is computed
_LEAST_RATE = 0.1  # lower bound on the acceptance rate of levels


def node_seconds(cost: CostModel, rows: StepRows, plain: float) -> float:
    """Return the seconds that verifying a further node adds to `plain`, where every row has a few nodes."""
    num = _TYPICAL_NODES * len(rows)
    return max(float(cost.seconds(*rows.forward_size(num, 1 + _TYPICAL_NODES))) - plain, 0.0) / num


def least_node_seconds(cost: CostModel, rows: StepRows) -> float:
    """
    Return the seconds that verifying a further node adds, at the number of nodes where they are least. All sizes get
    the same correction of the profile, since with their own ones larger sizes may cost less than smaller ones.
    """
    context, batched, width = rows.forward_size()
    plain = cost.profiled(context, batched, width)
    more = [
        (cost.profiled(*rows.forward_size(count * len(rows), 1 + count)) - plain) / (count * len(rows))
        for count in _NODE_COUNTS
    ]
    return min(more) * cost.correction(batched)


def level_prices(
    cost: CostModel, rows: StepRows, price: float, draft_seconds: tuple[float, float], rate: float
) -> tuple[tuple[float, float], ...]:
    """
    Return the probabilities, per depth, that paths must exceed for a further level to pay: for all rows together, and
    for each row. The level has to be drafted and verified, and is accepted at the source's rate only. Since the cost of
    forwards rises in jumps, the level may pay together with those after it: the best number of them counts.

    Args:
        price (`float`): Price of time, in tokens per second.
        draft_seconds (pair of `float`): Seconds per level of the draft, and per row in a level.
        rate (`float`): Acceptance rate of the source's levels.
    """
    per_call, per_row = draft_seconds
    depths, more = np.arange(1, _DEPTHS + 1)[:, None], np.arange(1, _DEPTHS + 1)
    num = np.arange(2 * _DEPTHS + 1)
    seconds = np.asarray(cost.seconds(*rows.forward_size(num * len(rows), 1 + num)))
    verify = np.maximum(seconds[depths + more] - seconds[depths], 0.0) / len(rows)
    promise = np.cumsum(max(rate, _LEAST_RATE) ** more)  # tokens of the levels, by the probability of the path to them
    call, row = price * per_call * more / promise, price * (per_row * more + verify) / promise
    best = (call / len(rows) + row).argmin(axis=1)
    return tuple(zip(call[best].tolist(), row[np.arange(_DEPTHS), best].tolist()))
