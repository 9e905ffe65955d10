"""Removal of texts from a suffix tree, and the check whether their memory may be used again (compiled)."""

import numpy as np

from .....jit import compiled, inner
from .store import (
    CHILD,
    CLASS,
    COUNT,
    ENDED,
    INDEX,
    KIDS,
    LABEL,
    LEN,
    NODE,
    NUM,
    PAIR,
    REMOVALS,
    ROW,
    TOTAL,
    border,
    find,
    free_block,
    free_node,
    pointers,
    set_class,
    swap,
    unindex_child,
)


@compiled
def remove(store, root, start, end, max_depth):
    """
    Remove the finished text `text[start:end]` from the tree. Its memory may be used again when `num_labels` finds no
    edge that still lies in it.
    """
    s, path = pointers(store), np.empty(max_depth + 1, np.int32)
    s.heads[REMOVALS] += 1
    for first in range(start, end):
        limit = min(end, first + max_depth)
        node, at, steps = root, first, 0
        path[0] = root
        while at < limit:
            entry = find(s, node, s.text[at])
            child = s.rows[entry + CHILD]
            _decrease(s, node, entry, node == root)
            if child < 0:
                break
            at += s.nodes[child * NODE + LEN]
            steps += 1
            path[steps] = child
            node = child
        else:
            s.nodes[node * NODE + ENDED] -= 1
        for step in range(steps, 0, -1):
            _tidy(s, path[step - 1], path[step], start, end)


@inner
def _decrease(s, node, entry, is_root):
    """Count one occurrence less of a child; without any, it is dropped."""
    kids = s.nodes[node * NODE + KIDS] * PAIR
    num = s.nodes[node * NODE + NUM]
    count = s.rows[entry + COUNT]
    i = (entry - kids) // ROW
    last = num - 1 if count == 1 else i
    if count > 1 and not is_root:
        last = border(s, node, i, num, count) - 1
    swap(s, node, i, last)
    s.rows[kids + last * ROW + COUNT] = count - 1
    s.nodes[node * NODE + TOTAL] -= 1
    if count > 1:
        return
    if s.nodes[node * NODE + INDEX] >= 0:
        unindex_child(s, node, last)
    s.nodes[node * NODE + NUM] = num - 1
    cls = s.nodes[node * NODE + CLASS]
    if num == 1:
        free_block(s, s.nodes[node * NODE + KIDS], cls)
        s.nodes[node * NODE + KIDS] = -1
        s.nodes[node * NODE + CLASS] = 0
    elif cls > 1 and (num - 1) * 4 <= 1 << cls:
        set_class(s, node, cls - 1)


@inner
def _tidy(s, parent, node, start, end):
    """Drop a node that has lost its last occurrence, merge it with an only child, or label it anew."""
    if s.nodes[node * NODE + TOTAL] + s.nodes[node * NODE + ENDED] == 0:
        free_node(s, node)
        return
    if s.nodes[node * NODE + NUM] == 1 and s.nodes[node * NODE + ENDED] == 0:
        child = s.rows[s.nodes[node * NODE + KIDS] * PAIR + CHILD]
        length = s.nodes[node * NODE + LEN]
        if child >= 0:
            s.nodes[child * NODE + LABEL] -= length
            s.nodes[child * NODE + LEN] += length
            first = s.text[s.nodes[child * NODE + LABEL]]
        else:
            child += length  # ~(position - length)
            first = s.text[~child]
        s.rows[find(s, parent, first) + CHILD] = child
        free_node(s, node)
        return
    _relabel(s, node, start, end)


@inner
def _relabel(s, node, start, end):
    """Move the node's edge to the text of one of its children, if it lies in `text[start:end]` now."""
    if not start <= s.nodes[node * NODE + LABEL] < end:
        return
    kids = s.nodes[node * NODE + KIDS] * PAIR
    for entry in range(kids, kids + min(s.nodes[node * NODE + NUM], 16) * ROW, ROW):
        child = s.rows[entry + CHILD]
        below = s.nodes[child * NODE + LABEL] if child >= 0 else ~child
        if not start <= below < end:
            s.nodes[node * NODE + LABEL] = below - s.nodes[node * NODE + LEN]
            return


@compiled
def num_labels(store, root, start, end, max_depth):
    """Return how many edges of the tree still lie in the text `text[start:end]`, which was removed."""
    s, count = pointers(store), 0
    for first in range(start, end):
        node, at = root, first
        while at < min(end, first + max_depth):
            entry = find(s, node, s.text[at])
            if entry < 0:
                break
            child = s.rows[entry + CHILD]
            if child < 0:
                break
            _relabel(s, child, start, end)
            at += s.nodes[child * NODE + LEN]
            if at > end:
                break
            # Every edge is a place in the text once: that of the suffix that came by last.
            label = s.nodes[child * NODE + LABEL]
            if start <= label < end and label + s.nodes[child * NODE + LEN] == at:
                count += 1
            node = child
    return count
