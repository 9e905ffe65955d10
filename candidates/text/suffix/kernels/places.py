"""
Places: where a context, the last tokens of a text, stands in a suffix tree (compiled).

A place is known by where its fields begin in a piece of int32 memory. It lies on a node, whose children follow it, or
on an edge, where one token follows.
"""

import numpy as np

from .....jit import inner
from .insert import settle
from .store import CHILD, ENDED, LABEL, LEN, NODE, TOTAL, find

# Fields of a place
AT, NEXT, STOP, SUPPORT, DEPTH, TREE = range(6)
"""The node, or that below its edge (-1: the edge is a leaf's); text position of the follower on the edge, or -1 on a
node; text position where the edge ends; how many occurrences of the context go on; its length; number of its tree."""
PLACE = 6
_NEVER = 2**31 - 1  # where leaves' edges end

# Fields of a walk: how far the text from a position on, one of the last few, was followed in a tree. As the text grows,
# it is followed on from there: in large trees, long ways from the root would miss the cache at every node. New nodes
# may join the way; when nodes go, all walks are forgotten.
FROM, LAST, REACHED = range(3)
"""Text position where it begins (-1: there is none); last node on the way; text position after the path to it."""
WALK = 4


@inner
def edge_of(s, child):
    """Return the text positions where the edge to a child begins and ends."""
    if child < 0:
        return np.int64(~child), np.int64(_NEVER)
    label = np.int64(s.nodes[child * NODE + LABEL])
    return label, label + s.nodes[child * NODE + LEN]


@inner
def support(s, at, following):
    if following < 0:
        return np.int64(s.nodes[at * NODE + TOTAL])
    if at >= 0:
        return np.int64(s.nodes[at * NODE + TOTAL] + s.nodes[at * NODE + ENDED])
    return np.int64(s.text[following] >= 0)


@inner
def locate(s, node, position, end):
    """
    Find the place that `text[position:end]` leads to from a node. Return (whether there is one, AT, NEXT, STOP, last
    node on the way, text position after the path to that node).
    """
    while position < end:
        entry = find(s, node, s.text[position])
        if entry < 0:
            return False, node, position, position, node, position
        child = np.int64(s.rows[entry + CHILD])
        label, stop = edge_of(s, child)
        length = min(stop - label, end - position)
        for k in range(1, length):
            if s.text[label + k] != s.text[position + k]:
                return False, node, position, position, node, position
        if label + length < stop:
            return True, max(child, np.int64(-1)), label + length, stop, node, position
        node = child
        position += length
    return True, node, np.int64(-1), np.int64(-1), node, position


@inner
def place_of(s, trees, t, points, walks, num_walks, end, depth):
    """
    Find the last `depth` tokens before `end` in tree `t`. Return (whether they occur, AT, NEXT, STOP). In the text's
    own tree, its points have them; in others they are looked up, from where they led before: each tree has `num_walks`,
    a power of two.
    """
    if t > 0:
        first = end - depth
        walk = ((t - 1) * num_walks + (first & (num_walks - 1))) * WALK
        node, position = np.int64(trees[t]), first
        if walks[walk + FROM] == first:
            node, position = np.int64(walks[walk + LAST]), np.int64(walks[walk + REACHED])
        is_found, at, following, stop, node, position = locate(s, node, position, end)
        walks[walk + FROM], walks[walk + LAST], walks[walk + REACHED] = first, node, position
        return is_found, at, following, stop
    node, offset, entry = settle(s, trees[0], np.int64(points[2 * depth]), np.int64(points[2 * depth + 1]), end)
    points[2 * depth], points[2 * depth + 1] = node, offset
    if offset == 0:
        return True, node, np.int64(-1), np.int64(-1)
    child = np.int64(s.rows[entry + CHILD])
    label, stop = edge_of(s, child)
    return True, max(child, np.int64(-1)), label + offset, stop


@inner
def step(s, at, following, stop, token):
    """Return the place one token on: (whether there is one, AT, NEXT, STOP)."""
    if following >= 0:
        if s.text[following] != token:
            return False, at, following, stop
        following += 1
    else:
        entry = find(s, at, token)
        if entry < 0:
            return False, at, following, stop
        child = np.int64(s.rows[entry + CHILD])
        label, stop = edge_of(s, child)
        at, following = max(child, np.int64(-1)), label + 1
    if following == stop:
        return True, at, np.int64(-1), np.int64(-1)
    return True, at, following, stop


@inner
def position_of(s, at, following):
    """Return a text position in the latest occurrence of a place's context."""
    return following if following >= 0 else np.int64(s.nodes[at * NODE + LABEL])
