"""The cheapest split of rows into runs of neighbours."""

import numpy as np

from ....jit import compiled_for


@compiled_for("i8:1 i8:1 i8:1 i8 f8 f8:1 i8:1")
def cheapest_split(slots, columns, widths, call, query, best, firsts):
    """
    Compute for the first 1, 2, ... rows the cost of their cheapest split, `best[n]` (float64 `[rows + 1]`), and where
    its last run begins, `firsts[n - 1]` (int64 `[rows]`). A run costs

        call + slots * columns * (1 + query * (width - 1))

    over its slots, by its longest and its widest row. `slots` ascend; all are int64 `[rows]`.
    """
    best[0] = 0.0
    for last in range(len(slots)):
        longest, widest, least = 0, 1, np.inf
        for first in range(last, -1, -1):
            longest, widest = max(longest, columns[first]), max(widest, widths[first])
            run = call + (slots[last] - slots[first] + 1) * longest * (1.0 + query * (widest - 1))
            if run >= least:
                break  # a longer one costs no less
            if best[first] + run < least:
                least, firsts[last] = best[first] + run, first
        best[last + 1] = least
