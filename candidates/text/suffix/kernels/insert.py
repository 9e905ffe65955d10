"""
Insertion of texts into suffix trees (compiled).

`extend` appends a token to a text and to its tree. It walks along all suffixes of the text that have occurred before
(its *points*); the longest one is the longest match. Suffixes that are new become leaves at once, and leaves grow with
their text by themselves, so the cost is that of the match length, not of the depth. `finish` ends a text.
"""

import numpy as np

from .....jit import compiled, inner
from .....jit.pointers import int32_at, prefetch
from .store import (
    CHILD,
    CLOCK,
    COUNT,
    END,
    ENDED,
    KIDS,
    LABEL,
    LEN,
    NODE,
    NODES_LIVE,
    NUM,
    PAIR,
    ROW,
    SEEN,
    add_child,
    find,
    increase,
    new_node,
    pointers,
    set_clock,
    time_of,
)


@inner
def _split(s, root, node, entry, offset, end):
    """Make a new node in the middle of an edge below `node`, `offset` tokens down, reached once more. Return it."""
    count, child, seen = s.rows[entry + COUNT], s.rows[entry + CHILD], s.rows[entry + SEEN] + offset
    middle = new_node(s, end - offset, offset)
    if child >= 0:
        lower = s.nodes[child * NODE + LABEL] + offset
        s.nodes[child * NODE + LABEL] = lower
        s.nodes[child * NODE + LEN] -= offset
        add_child(s, middle, s.text[lower], count, child, seen)
    else:
        lower = ~child + offset
        if s.text[lower] == END:  # the other text ends just here
            s.nodes[middle * NODE + ENDED] = 1
        else:
            add_child(s, middle, s.text[lower], 1, ~lower, seen)
    s.rows[entry + CHILD] = middle
    increase(s, node, entry, time_of(s, root, end - offset), node == root)
    return middle


@inner
def settle(s, root, node, offset, end):
    """
    Move a point whose edge was split meanwhile below the new nodes (and count it there). Return (node, offset, entry of
    the child whose edge it stands on, or -1).
    """
    while offset > 0:
        entry = find(s, node, s.text[end - offset])
        child = s.rows[entry + CHILD]
        if child < 0 or offset < s.nodes[child * NODE + LEN]:
            return node, offset, entry
        increase(s, node, entry, time_of(s, root, end - offset), node == root)
        offset -= s.nodes[child * NODE + LEN]
        node = child
    return node, offset, np.int64(-1)


@inner
def extend(s, root, points, num_points, max_depth, end, token):
    """
    Append a token to a text.

    Args:
        points (int32 `[(max_depth + 1) * 2]`): Pair d is the place (node, offset on the edge below) of the text's last
            d tokens; pairs 0 to `num_points` are in use.
        end (`int`): Where the token goes; `text[end]` and `text[end + 1]` are written.

    Returns:
        The new `num_points`: the number of last tokens that have occurred before.
    """
    s.text[end] = token
    s.text[end + 1] = END
    matched = 0
    for depth in range(min(num_points, max_depth - 1), -1, -1):
        node, offset, entry = settle(s, root, np.int64(points[2 * depth]), np.int64(points[2 * depth + 1]), end)
        if offset == 0:
            entry = find(s, node, token)
            if entry < 0:
                add_child(s, node, token, 1, ~end, time_of(s, root, end))
                continue
            child = s.rows[entry + CHILD]
        else:
            child = s.rows[entry + CHILD]
            label = s.nodes[child * NODE + LABEL] if child >= 0 else ~child
            if s.text[label + offset] != token:
                middle = _split(s, root, node, entry, offset, end)
                add_child(s, middle, token, 1, ~end, time_of(s, root, end))
                continue
        offset += 1
        matched = max(matched, depth + 1)
        if child >= 0 and offset == s.nodes[child * NODE + LEN]:
            increase(s, node, entry, time_of(s, root, end + 1 - offset), node == root)
            s.nodes[child * NODE + LABEL] = end + 1 - offset  # the latest occurrence
            node, offset = np.int64(child), 0
            if depth + 1 == max_depth:
                s.nodes[child * NODE + ENDED] += 1
        elif depth + 1 == max_depth:  # a leaf: nodes end at the limit at the latest
            bottom = new_node(s, end + 1 - offset, offset)
            s.nodes[bottom * NODE + ENDED] = 2
            s.rows[entry + CHILD] = bottom
            increase(s, node, entry, time_of(s, root, end + 1 - offset), node == root)
            node, offset = bottom, 0
        points[2 * depth + 2] = node
        points[2 * depth + 3] = offset
        if offset == 0:
            prefetch(s.rows, s.nodes[node * NODE + KIDS] * PAIR)
    return matched


@inner
def finish(s, root, points, num_points, max_depth, end):
    """End a text: its last tokens are counted too."""
    for depth in range(min(num_points, max_depth - 1), 0, -1):
        node, offset, entry = settle(s, root, np.int64(points[2 * depth]), np.int64(points[2 * depth + 1]), end)
        if offset > 0:
            node = _split(s, root, node, entry, offset, end)
        s.nodes[node * NODE + ENDED] += 1


@compiled
def insert(store, root, start, tokens, points):
    """Write a whole text to `text[start:]` and to the tree. Needs `len(tokens) + 1` places, and memory for points."""
    s, at, max_depth = pointers(store), int32_at(points.ctypes.data), len(points) // 2 - 1
    set_clock(s, root, start)
    s.heads[CLOCK] += len(tokens)
    at[0] = root
    at[1] = 0
    num_points = 0
    for i in range(len(tokens)):
        num_points = extend(s, root, at, num_points, max_depth, start + i, tokens[i])
    finish(s, root, at, num_points, max_depth, start + len(tokens))


@compiled
def move_tree(store, root, start, end, target):
    """Copy `text[start:end]` and the border after it to `target`, and move the tree's edges there."""
    s, shift = pointers(store), target - start
    for position in range(start, end + 1):
        s.text[position + shift] = s.text[position]
    s.nodes[root * NODE + LEN] -= shift
    stack = np.empty(s.heads[NODES_LIVE], np.int32)
    stack[0] = root
    num = 1
    while num > 0:
        num -= 1
        node = stack[num]
        if node != root and start <= s.nodes[node * NODE + LABEL] < end:
            s.nodes[node * NODE + LABEL] += shift
        kids = s.nodes[node * NODE + KIDS] * PAIR
        for entry in range(kids, kids + s.nodes[node * NODE + NUM] * ROW, ROW):
            child = s.rows[entry + CHILD]
            if child >= 0:
                stack[num] = child
                num += 1
            elif start <= ~child < end:
                s.rows[entry + CHILD] = child - shift
