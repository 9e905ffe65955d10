"""
What a `Forest` finds out about its nodes, one behind the other. Parents stand before their children, so that a node
reads what its parent has been given.

Arrays: `sizes` `[rows]` int64, nodes of each tree; `[nodes]` int64 are `row`, `parents` (the number of nodes for
children of committed tokens), `depths`, `tokens`; all are contiguous, so that one version is compiled of each function.
"""

from ...jit import compiled


@compiled
def are_trees(sizes, parents, tokens, vocab_size):
    """
    Whether in trees that lie end to end, with `parents` as they number their own nodes, each is -1 or stands before its
    child, and all tokens lie in [0, vocab_size).
    """
    start = 0
    for tree in range(len(sizes)):
        for node in range(sizes[tree]):
            parent, token = parents[start + node], tokens[start + node]
            if parent < -1 or parent >= node or token < 0 or token >= vocab_size:
                return False
        start += sizes[tree]
    return True


@compiled
def flatten(sizes, row, parents, depths, probs):
    """
    Takes trees that lie end to end, with `parents` as they number their own nodes, and gives every node its row, its
    parent among all nodes, and its depth. Scores (`probs`, float32) are brought into [0, 1]: rounded softmax values may
    exceed 1 by a hair, and what is no number says nothing: an even chance. Returns whether all parents stand before
    their children.
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


@compiled
def multiply_along_paths(parents, values):
    """`values` (float64) become their products from the root down to each node."""
    num_nodes = len(parents)
    for node in range(num_nodes):
        if parents[node] < num_nodes:
            values[node] *= values[parents[node]]


@compiled
def judge(row, parents, depths, tokens, truth, ends, nodes, is_true):
    """
    Finds the nodes whose parent came true and whose depth is known: their indices go to `nodes`, and how they fared to
    `is_true` (bool, of all nodes, False before); returns how many they are. `truth` holds the continuations of all rows
    end to end, of which each ends before its entry of `ends`.
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


@compiled
def select(sizes, parents, mask, places, nodes, own_parents, counts):
    """
    Keeps the nodes of a `mask` (bool): their indices go to `nodes`, their parents, as their trees will number them, to
    `own_parents`, and how many there are of each tree to `counts`. Returns how many there are in all. `places` is
    overwritten.
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


@compiled
def walk(sizes, parents, tokens, picks, path, counts):
    """
    Follows the target's picks through trees that lie end to end, with `parents` as they number their own nodes. Behind
    the last committed token and every node of a tree a token is picked: a tree has one more of `picks` than nodes.
    `path` (int64 `[nodes]`) gets the nodes that hold their parents' picks, from the root on, of one tree behind the
    other; `counts` (int64 `[trees]`) how many these are.
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
