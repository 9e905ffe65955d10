"""The auction's scan for the prefix of all rows' sorted nodes that pays best."""

import numpy as np

from ...jit import compiled_for


@compiled_for("i8:1 i8:1 f8:1 i8:1 i8 f8:1 f8:1 f8:1 i8:1 b1:1")
def best_prefix(order, row, gains, widths, num_narrow, costs, seconds, factors, counts, mask):
    """
    Take the nodes (`order`, int64 `[n]`) one after the other up to the highest profit, tokens - price * seconds, for
    every bound on the nodes of one row, skipping nodes of rows that have reached it. Mark the nodes of the best bound
    in `mask` (bool, one per node).

    Args:
        row, gains: Row (int64) and path probability (float64) of every node.
        widths (int64): The bounds, ascending. Bounds of at least the largest row's nodes are skipped; that number is
            tried last. After the first `num_narrow` bounds, the scan ends at one with less profit than a lower one.
        costs (float64 `[7]`): Tokens of the step without drafts; the least profit; the price of time; seconds of the
            forward: without tokens, per token of the widest row, and the host's, the least that a forward takes;
            and seconds that are left out.
        seconds, factors (float64 `[n + 1]`): Seconds of 0, 1, ... further tokens, and the factors of whole forwards.
        counts (int64 `[rows]`): Buffer, which is overwritten.

    Returns:
        Number of nodes, expected tokens of the step, and its seconds; no nodes if none have the profit.
    """
    tokens_before, least_profit, price, fixed, per_width, host, left_out = costs
    counts[:] = 0
    most = 0
    for node in order:
        counts[row[node]] += 1
        most = max(most, counts[row[node]])
    best_profit, num_best, best_width, best_tokens, best_seconds = least_profit, 0, 0, 0.0, 0.0
    highest = -np.inf
    for number in range(len(widths) + 1):
        width = most
        if number < len(widths):
            width = widths[number]
            if width >= most or len(counts) == 1:  # a single row needs no bounds
                continue
        counts[:] = 0
        num, tokens, reached, profit_there, tokens_there, seconds_there = 0, tokens_before, 0, -np.inf, 0.0, 0.0
        for node in order:
            if counts[row[node]] >= width:
                continue
            counts[row[node]] += 1
            num += 1
            tokens += gains[node]
            spent = max(seconds[num] + fixed + per_width * (1 + min(num, width)), host) * factors[num] - left_out
            if tokens - price * spent > profit_there:
                profit_there, reached, tokens_there, seconds_there = tokens - price * spent, num, tokens, spent
        if profit_there > best_profit:
            best_profit, num_best, best_width = profit_there, reached, width
            best_tokens, best_seconds = tokens_there, seconds_there
        if profit_there < highest and number >= num_narrow:
            break  # wider rows cost more and more
        highest = max(highest, profit_there)
    counts[:] = 0
    num = 0
    for node in order:
        if num == num_best:
            break
        if counts[row[node]] < best_width:
            counts[row[node]] += 1
            num += 1
            mask[node] = True
    return num_best, best_tokens, best_seconds
