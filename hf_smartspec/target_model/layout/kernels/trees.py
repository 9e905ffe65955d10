"""Places of the nodes of draft trees in a padded batch, and the nodes that each attends to."""

from ....jit import compiled_for


@compiled_for("i8:1 i8:1 i8:1 i8:1")
def depths_of(sizes, parents, firsts, depths):
    """
    Compute the depths of the nodes of trees that lie end to end (`sizes` int64 `[trees]`; `parents` int64 `[nodes]`,
    numbered within each tree). Return how many nodes are attended to, themselves included, by all nodes from their
    tree's entry of `firsts` (int64 `[trees]`) on; -1 if some parent does not come before its child.
    """
    start = num = 0
    for tree in range(len(sizes)):
        for node in range(sizes[tree]):
            parent = parents[start + node]
            if parent >= node:
                return -1
            depths[start + node] = 1 if parent < 0 else depths[start + parent] + 1
            if node >= firsts[tree]:
                num += depths[start + node]
        start += sizes[tree]
    return num


@compiled_for("i8:1 i8:1 i8:1 i8:1 i8:2 i8 i8 i8:1 i8:1 i8:1 i8:2 i8:2 i8:1")
def lay_out(
    sizes, parents, firsts, depths, places, width, num_columns, positions, limits, pairs, nodes, seen, ancestors
):
    """
    Lay out the trees of a `PaddedPart` of shape `[R, width, num_columns]`.

    Args:
        places (int64 `[trees, 4]`): For every tree: its row, the column of its first node, and the index of this node
            among the part's tokens and among its row's.
        positions, limits (int64 `[tokens]`): Values of the part's tokens; those of nodes are corrected.
        pairs (int64 `[P]`), nodes (int64 `[2, nodes]`): Filled with `tree_pairs` and `nodes`. The first pairs are the
            nodes themselves, in their order, then their parents, and so on.
        seen (int64 `[1 + words, tokens]`): Filled with `PaddedPart.seen_nodes` of nodes; the bits are 0 before.
        ancestors (int64 `[nodes]`): Overwritten.
    """
    start = num = deepest = 0
    for tree in range(len(sizes)):
        row, base, token, _ = places[tree]
        for node in range(sizes[tree]):
            position = base - 1 + depths[start + node]
            nodes[0, start + node], nodes[1, start + node] = row * num_columns + base + node, position
            if node >= firsts[tree]:
                positions[token + node], limits[token + node] = position, base
                seen[0, token + node] = base
                ancestors[start + node] = node
                deepest = max(deepest, depths[start + node])
        start += sizes[tree]
    for _ in range(deepest):
        start = 0
        for tree in range(len(sizes)):
            row, base, token, query = places[tree]
            for node in range(firsts[tree], sizes[tree]):
                ancestor = ancestors[start + node]
                if ancestor >= 0:
                    pairs[num] = (row * width + query + node) * num_columns + base + ancestor
                    num += 1
                    seen[1 + (ancestor >> 6), token + node] |= 1 << (ancestor & 63)
                    ancestors[start + node] = parents[start + ancestor]
            start += sizes[tree]


@compiled_for("i8:2 i8:3")
def ancestor_bits(parents, bits):
    """
    Set the bits of the ancestors of every node of some trees, and of the node itself, 64 in each word.

    Args:
        parents (int64 `[trees, nodes]`): Numbered within each tree, before their children; -1 for roots, -2 if none.
        bits (int64 `[trees, nodes, words]`): Filled; 0 before.
    """
    for tree in range(parents.shape[0]):
        for node in range(parents.shape[1]):
            parent = parents[tree, node]
            if parent >= 0:
                bits[tree, node] = bits[tree, parent]
            if parent >= -1:
                bits[tree, node, node >> 6] |= 1 << (node & 63)
