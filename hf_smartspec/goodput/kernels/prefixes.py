"""The auction's scan: of all rows' nodes, sorted by what they promise, which prefix pays best."""

import numpy as np

from ...jit import compiled


@compiled
def best_prefix(order, row, gains, widths, num_narrow, costs, seconds, factors, counts, mask):
    """
    For every bound on the nodes of one row, takes the nodes (`order`, int64 `[n]`) one after the other while their rows
    are within it, and stops where the profit, tokens - price * seconds, is highest. Of all bounds, the best one's nodes
    are marked in `mask` (bool, of all nodes).

    Args:
        row, gains: Of all nodes, int64 and float64: whose they are, and their path probabilities.
        widths (int64): The bounds, ascending, below the most nodes that a row of `order` has, which is tried last.
            Behind the first `num_narrow` of them, a bound that does worse than a lower one is the last.
        costs (float64 `[7]`): Tokens and profit of the step without drafts, the latter with what speculation must
            promise more; the price; of the forward: seconds without tokens, per token of the widest row, at least; and
            seconds that are left out.
        seconds, factors (float64 `[n + 1]`): What 0, 1, ... further tokens take, and are to be multiplied with.
        counts (int64 `[rows]`): Is overwritten.

    Returns:
        Number of nodes, expected tokens of the step, and its seconds; no nodes if none have the profit.
    """
    tokens_before, best_profit, price, fixed, per_width, least, left_out = costs
    counts[:] = 0
    most = 0
    for node in order:
        counts[row[node]] += 1
        most = max(most, counts[row[node]])
    num_best, best_width, best_tokens, best_seconds = 0, 0, 0.0, 0.0
    highest = -np.inf
    for number in range(len(widths) + 1):
        width = most
        if number < len(widths):
            width = widths[number]
            if width >= most or len(counts) == 1:  # where there is one row only, none is needed
                continue
        counts[:] = 0
        num, tokens, reached, profit_there, tokens_there, seconds_there = 0, tokens_before, 0, -np.inf, 0.0, 0.0
        for node in order:
            if counts[row[node]] >= width:
                continue
            counts[row[node]] += 1
            num += 1
            tokens += gains[node]
            spent = max(seconds[num] + fixed + per_width * (1 + min(num, width)), least) * factors[num] - left_out
            if tokens - price * spent > profit_there:
                profit_there, reached, tokens_there, seconds_there = tokens - price * spent, num, tokens, spent
        if profit_there > best_profit:
            best_profit, num_best, best_width = profit_there, reached, width
            best_tokens, best_seconds = tokens_there, seconds_there
        if profit_there < highest and number >= num_narrow:
            break  # wider rows cost ever more
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
