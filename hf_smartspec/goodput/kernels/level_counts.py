"""Counts of the levels of drafts that were tried, and of the drafts that went on after a right node."""

import numpy as np

from ...jit import compiled_for


@compiled_for("b1:2 b1:2 i8:1 f8 f8:2 f8:1 f8 f8:1 f8:1", "i8:2 i8:2 i8:1 f8 f8:2 f8:1 f8 f8:1 f8:1")
def count_levels(tried, succeeded, lines, own_half_life, own_tried, own_succeeded, half_life, tries, hits):
    """
    Count the levels of each row's draft that were `tried`, and those that `succeeded` (bool or int64 `[rows, depths]`,
    also several of one depth), after the earlier counts have decayed by half-lives in tried levels.

    Args:
        lines (int64 `[rows]`): The line of each row's request in the next two.
        own_tried, own_succeeded (float64): Counts of each request, by depth, where deeper levels count as the last
            depth, and in all.
        tries, hits (float64 `[at least depths]`): Counts of all requests by depth.
    """
    num_rows, num_depths = tried.shape
    last, total = own_tried.shape[1] - 1, 0
    for row in range(num_rows):
        num, line = 0, lines[row]
        for depth in range(num_depths):
            num += tried[row, depth]
        if line >= min(len(own_tried), len(own_succeeded)):
            continue  # threads that share a policy may exchange its arrays meanwhile
        total, decay = total + num, 0.5 ** (num / own_half_life)
        for depth in range(last + 1):
            own_tried[line, depth] *= decay
        own_succeeded[line] *= decay
        for depth in range(num_depths):
            own_tried[line, min(depth, last)] += tried[row, depth]
            own_succeeded[line] += succeeded[row, depth]
    decay = 0.5 ** (total / half_life)
    for depth in range(len(tries)):
        tries[depth] *= decay
        hits[depth] *= decay
    for row in range(num_rows):
        for depth in range(num_depths):
            tries[depth] += tried[row, depth]
            hits[depth] += succeeded[row, depth]


@compiled_for("i8:1 i8:1 i8:1 i8:1 b1:1 i8:1 i8:1")
def count_continuations(right, row, parents, depths, may_grow, known, continued):
    """
    Count by depth the `right` nodes (int64) that have children, in `continued`, and those of which it is known whether
    they would, in `known`: these, and nodes of rows whose drafts had room for more (`may_grow`, bool `[rows]`). Both
    are int64 and zeros before; deeper nodes count as the last depth.
    """
    last = len(known) - 1
    has_child = np.zeros(len(parents) + 1, np.bool_)  # the last one is of committed tokens
    for parent in parents:
        has_child[parent] = True
    for node in right:
        depth = min(depths[node] - 1, last)
        known[depth] += has_child[node] or may_grow[row[node]]
        continued[depth] += has_child[node]
