"""Decayed counts of the levels of drafts that were tried, and of those that went on."""

from ...jit import compiled_for


@compiled_for("b1:2 b1:2 i8:1 f8 f8:2 f8:1 f8 f8:1 f8:1")
def count_levels(tried, succeeded, lines, own_half_life, own_tried, own_succeeded, half_life, tries, hits):
    """
    Count levels of each row's draft that were `tried`, and those that `succeeded` (bool `[rows, depths]`), after the
    earlier counts have decayed: a row's own, by depth in `own_tried` and in all in `own_succeeded` (float64, one line a
    request, of which `lines` has the rows'; deeper levels count as the last depth), and all rows', by depth in `tries`
    and `hits` (float64). Half-lives are numbers of tried levels.
    """
    num_rows, num_depths = tried.shape
    last, total = own_tried.shape[1] - 1, 0
    for row in range(num_rows):
        num = 0
        for depth in range(num_depths):
            num += tried[row, depth]
        if not num:
            continue
        total += num
        line, decay = lines[row], 0.5 ** (num / own_half_life)
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
    Count, by depth, the `right` nodes (int64) of drafts of which is known whether they went on: to `known` those that
    have children, or whose rows' drafts might have grown (`may_grow`, bool `[rows]`), and to `continued` those that
    have children (int64, zeros before; deeper nodes count as the last depth).
    """
    last = len(known) - 1
    for place in range(len(right)):
        node = right[place]
        has_child = False
        for other in range(node + 1, len(parents)):  # parents come before their children
            has_child = has_child or parents[other] == node
        depth = min(depths[node] - 1, last)
        known[depth] += has_child or may_grow[row[node]]
        continued[depth] += has_child
