"""
Loops of `Forest` over its nodes in order. Parents come before their children, so that the values of a node's parent are
ready when the node is reached.

Arrays: `sizes` `[rows]` int64, nodes of each tree; `[nodes]` int64 are `row`, `parents` (the number of nodes for
children of committed tokens), `depths`, `tokens`; all are contiguous, so that each function is compiled once.
"""

from ...jit import compiled_for


@compiled_for("i8:1 i8:1 i8:1 i8")
def are_trees(sizes, parents, tokens, vocab_size):
    """
    Return whether trees that lie end to end are valid: `parents`, numbered within each tree, are -1 or come before
    their children, and all tokens lie in [0, vocab_size).
    """
    start = 0
    for tree in range(len(sizes)):
        for node in range(sizes[tree]):
            parent, token = parents[start + node], tokens[start + node]
            if parent < -1 or parent >= node or token < 0 or token >= vocab_size:
                return False
        start += sizes[tree]
    return True


@compiled_for("i8:1 i8:1 i8:1 i8:1 f4:1")
def flatten(sizes, row, parents, depths, probs):
    """
    Set every node's row, parent among all nodes, and depth, from trees that lie end to end, with `parents` numbered
    within each tree. Clip `probs` (float32) to [0, 1], since rounded softmax values may exceed 1 by a hair; NaN carries
    no information and becomes 0.5. Return whether all parents come before their children.
    """
    num_nodes, start = len(parents), 0
    for tree in range(len(sizes)):
        end = start + sizes[tree]
        for node in range(start, end):
            row[node] = tree
            parent = parents[node] + start
            if parent >= node:
                return False
            if parent < start:
                parents[node], depths[node] = num_nodes, 1
            else:
                parents[node], depths[node] = parent, depths[parent] + 1
            if probs[node] > 1.0:
                probs[node] = 1.0
            elif probs[node] < 0.0:
                probs[node] = 0.0
            elif probs[node] != probs[node]:
                probs[node] = 0.5
        start = end
    return True


@compiled_for("i8:1 f8:1")
def multiply_along_paths(parents, values):
    """Replace `values` (float64) by their products along the path from the root to each node."""
    num_nodes = len(parents)
    for node in range(num_nodes):
        if parents[node] < num_nodes:
            values[node] *= values[parents[node]]


@compiled_for("i8:1 i8:1 i8:1 i8:1 i8:1 i8:1 i8:1 b1:1")
def judge(row, parents, depths, tokens, truth, ends, nodes, is_true):
    """
    Find the nodes whose parent was accepted and whose depth is within the known continuation. Write their indices to
    `nodes`, and whether each was accepted to `is_true` (bool, of all nodes, False before); return their number. `truth`
    holds the continuations of all rows end to end; each ends before its entry of `ends`.
    """
    num_nodes, num = len(parents), 0
    for node in range(num_nodes):
        tree, parent = row[node], parents[node]
        place = depths[node] - 1 + (ends[tree - 1] if tree else 0)
        if place < ends[tree] and (parent == num_nodes or is_true[parent]):
            is_true[node] = tokens[node] == truth[place]
            nodes[num] = node
            num += 1
    return num


@compiled_for("i8:1 i8:1 b1:1 i8:1 i8:1 i8:1 i8:1")
def select(sizes, parents, mask, places, nodes, own_parents, counts):
    """
    Keep the nodes of a `mask` (bool). Write their indices to `nodes`, their parents, numbered within the kept trees, to
    `own_parents`, and their number in each tree to `counts`; return the total. `places` is overwritten.
    """
    num_nodes, start, num = len(parents), 0, 0
    for tree in range(len(sizes)):
        end, first = start + sizes[tree], num
        for node in range(start, end):
            if mask[node]:
                parent = parents[node]
                own_parents[num] = places[parent] if parent < num_nodes else -1
                nodes[num], places[node] = node, num - first
                num += 1
        counts[tree], start = num - first, end
    return num


@compiled_for("i8:1 i8:1 i8:1 i8:1 i8:1 i8:1")
def walk(sizes, parents, tokens, picks, path, counts):
    """
    Follow the target's picks through trees that lie end to end, with `parents` numbered within each tree. A token is
    picked after the last committed token and after every node, so a tree has one more of `picks` than nodes. Write the
    nodes that hold their parents' picks, from the root on, to `path` (int64 `[nodes]`), one tree after the other, and
    their number per tree to `counts` (int64 `[trees]`).
    """
    start = num = 0
    for tree in range(len(sizes)):
        last, first = -1, num
        for node in range(sizes[tree]):
            if parents[start + node] == last and tokens[start + node] == picks[start + tree + last + 1]:
                path[num] = last = node
                num += 1
        counts[tree] = num - first
        start += sizes[tree]
