"""
Suffix trees over token ids in flat integer arrays: the compiled part of `SuffixTreeCandidates`.

One `Store` holds many trees: one per running request, one per namespace of earlier outputs. A root names a tree. Trees
are compressed (an edge is a range of text, a suffix that was seen once is a leaf that points into the text) and
bounded in depth; every string of up to `max_depth` tokens that occurs has its exact number of occurrences:

* `extend` appends a token to a text and to its tree. It walks along all suffixes of the text that have occurred before
  (its *points*); the longest one is the longest match. Suffixes that are new become leaves at once, and leaves grow
  with their text by themselves, so the cost is that of the match length, not of the depth.
* `finish` ends a text, `remove` takes a finished text out of its tree again, `free_tree` gives up a whole tree.

Children are sorted by falling count, so that the best come first; nodes of many children have a hash index besides.
"""

from typing import NamedTuple

import numpy as np

from .compiled import compiled

# Fields of a node
LABEL, LEN, KIDS, NUM, CLASS, TOTAL, ENDED, INDEX = range(8)
"""Text position and length of the edge that leads to it; block, number and capacity class of its children; sum of their
counts; how often a text ended here (or reached the depth limit); block of the hash index or -1."""

# Fields of a child entry
TOKEN, COUNT, CHILD = range(3)
"""First token of the edge, how often it was passed to its end, and the node there, or ~position of a leaf's text."""

# Allocator state
NODES_TOP, NODES_FREE, NODES_LIVE, ROWS_TOP, ROWS_LIVE, BLOCKS_FREE = range(6)
NUM_HEADS = 48

ROW = 4  # int32 fields of a row
_INDEXED = 4  # classes above (more than 16 children) have an index
END = -1  # stands behind every text
BLOCK_BITS = 6
BLOCK = 1 << BLOCK_BITS  # tokens; texts begin at multiples, so that a position tells its text


class Store(NamedTuple):
    """
    The memory of all trees.

    Args:
        text (`np.ndarray` of shape `[tokens]`, int32): All texts, each followed by `END`.
        nodes (`np.ndarray` of shape `[nodes, 8]`, int32): See the field names above.
        rows (`np.ndarray` of shape `[rows * 4]`, int32): Blocks of child entries and of indices.
        heads (`np.ndarray` of shape `[48]`, int64): Tops and free lists.
    """

    text: np.ndarray
    nodes: np.ndarray
    rows: np.ndarray
    heads: np.ndarray


def new_store(num_tokens: int, num_nodes: int, num_rows: int) -> Store:
    """Memory for so many tokens, nodes and rows. It is not touched before it is used, so large numbers cost nothing."""
    memory = np.empty(num_tokens, np.int32), np.empty((num_nodes, 8), np.int32), np.empty(num_rows * ROW, np.int32)
    store = Store(*memory, np.empty(NUM_HEADS, np.int64))
    clear_store(store)
    return store


def clear_store(store: Store) -> None:
    """Forgets all trees."""
    store.heads[:] = -1
    store.heads[[NODES_TOP, NODES_LIVE, ROWS_TOP, ROWS_LIVE]] = 0


# --- Memory ----------------------------------------------------------------------------------------------------------


@compiled
def _new_block(s, cls):
    """Rows for 2**cls entries; freed blocks of the class come first."""
    s.heads[ROWS_LIVE] += 1 << cls
    block = s.heads[BLOCKS_FREE + cls]
    if block >= 0:
        s.heads[BLOCKS_FREE + cls] = s.rows[block * ROW]
        return block
    block = s.heads[ROWS_TOP]
    s.heads[ROWS_TOP] += 1 << cls
    return block


@compiled
def _free_block(s, block, cls):
    s.heads[ROWS_LIVE] -= 1 << cls
    s.rows[block * ROW] = s.heads[BLOCKS_FREE + cls]
    s.heads[BLOCKS_FREE + cls] = block


@compiled
def new_node(s, label, length):
    s.heads[NODES_LIVE] += 1
    node = s.heads[NODES_FREE]
    if node >= 0:
        s.heads[NODES_FREE] = s.nodes[node, LABEL]
    else:
        node = s.heads[NODES_TOP]
        s.heads[NODES_TOP] += 1
    s.nodes[node, LABEL] = label
    s.nodes[node, LEN] = length
    s.nodes[node, KIDS] = -1
    s.nodes[node, NUM] = 0
    s.nodes[node, CLASS] = 0
    s.nodes[node, TOTAL] = 0
    s.nodes[node, ENDED] = 0
    s.nodes[node, INDEX] = -1
    return node


@compiled
def _free_node(s, node):
    """The node's children must have gone elsewhere."""
    if s.nodes[node, KIDS] >= 0:
        _free_block(s, s.nodes[node, KIDS], s.nodes[node, CLASS])
    if s.nodes[node, INDEX] >= 0:
        _free_block(s, s.nodes[node, INDEX], s.nodes[node, CLASS] - 1)
    s.nodes[node, LABEL] = s.heads[NODES_FREE]
    s.heads[NODES_FREE] = node
    s.heads[NODES_LIVE] -= 1


@compiled
def free_tree(s, root):
    stack = [root]
    while len(stack) > 0:
        node = stack.pop()
        base = s.nodes[node, KIDS] * ROW
        for i in range(s.nodes[node, NUM]):
            child = s.rows[base + i * ROW + CHILD]
            if child >= 0:
                stack.append(child)
        _free_node(s, node)


# --- Children --------------------------------------------------------------------------------------------------------


@compiled
def _hash(token, cls):
    """Slot of a token in an index of 2**(cls + 1) slots (Fibonacci hashing)."""
    return ((np.int64(token) * 2654435761) & 0xFFFFFFFF) >> (31 - cls)


@compiled
def find(s, node, token):
    """Index of the child whose edge begins with `token`, or -1."""
    base = s.nodes[node, KIDS] * ROW
    index = s.nodes[node, INDEX]
    if index < 0:
        for i in range(s.nodes[node, NUM]):
            if s.rows[base + i * ROW] == token:
                return i
        return -1
    cls = s.nodes[node, CLASS]
    mask = (2 << cls) - 1
    slot = _hash(token, cls)
    while True:
        i = s.rows[index * ROW + slot]
        if i < 0 or s.rows[base + i * ROW] == token:
            return i
        slot = (slot + 1) & mask


@compiled
def _slot_of(s, node, i):
    """The slot of the index that names child i."""
    cls = s.nodes[node, CLASS]
    start = s.nodes[node, INDEX] * ROW
    slot = _hash(s.rows[(s.nodes[node, KIDS] + i) * ROW], cls)
    while s.rows[start + slot] != i:
        slot = (slot + 1) & ((2 << cls) - 1)
    return slot


@compiled
def _index_child(s, node, i):
    cls = s.nodes[node, CLASS]
    start = s.nodes[node, INDEX] * ROW
    slot = _hash(s.rows[(s.nodes[node, KIDS] + i) * ROW], cls)
    while s.rows[start + slot] >= 0:
        slot = (slot + 1) & ((2 << cls) - 1)
    s.rows[start + slot] = i


@compiled
def _unindex_child(s, node, i):
    """Clears the child's slot and moves those behind it up, so that no search stops early."""
    cls = s.nodes[node, CLASS]
    mask = (2 << cls) - 1
    start = s.nodes[node, INDEX] * ROW
    kids = s.nodes[node, KIDS]
    hole = _slot_of(s, node, i)
    slot = (hole + 1) & mask
    while s.rows[start + slot] >= 0:
        home = _hash(s.rows[(kids + s.rows[start + slot]) * ROW], cls)
        if ((slot - home) & mask) >= ((slot - hole) & mask):
            s.rows[start + hole] = s.rows[start + slot]
            hole = slot
        slot = (slot + 1) & mask
    s.rows[start + hole] = -1


@compiled
def _set_class(s, node, cls):
    """Moves the children to a block of 2**cls entries."""
    block = _new_block(s, cls)
    old = s.nodes[node, KIDS]
    num = s.nodes[node, NUM]
    if old >= 0:
        s.rows[block * ROW : (block + num) * ROW] = s.rows[old * ROW : (old + num) * ROW]
        _free_block(s, old, s.nodes[node, CLASS])
    if s.nodes[node, INDEX] >= 0:
        _free_block(s, s.nodes[node, INDEX], s.nodes[node, CLASS] - 1)
        s.nodes[node, INDEX] = -1
    s.nodes[node, KIDS] = block
    s.nodes[node, CLASS] = cls
    if cls > _INDEXED:
        index = _new_block(s, cls - 1)
        s.rows[index * ROW : (index + (1 << (cls - 1))) * ROW] = -1
        s.nodes[node, INDEX] = index
        for i in range(num):
            _index_child(s, node, i)


@compiled
def _add_child(s, node, token, count, child):
    num = s.nodes[node, NUM]
    if s.nodes[node, KIDS] < 0:
        _set_class(s, node, 1)
    elif num == 1 << s.nodes[node, CLASS]:
        _set_class(s, node, s.nodes[node, CLASS] + 1)
    at = (s.nodes[node, KIDS] + num) * ROW
    s.rows[at + TOKEN] = token
    s.rows[at + COUNT] = count
    s.rows[at + CHILD] = child
    s.nodes[node, NUM] = num + 1
    s.nodes[node, TOTAL] += count
    if s.nodes[node, INDEX] >= 0:
        _index_child(s, node, num)


@compiled
def _swap(s, node, i, j):
    if i == j:
        return
    kids = s.nodes[node, KIDS]
    if s.nodes[node, INDEX] >= 0:
        start = s.nodes[node, INDEX] * ROW
        slot_i, slot_j = _slot_of(s, node, i), _slot_of(s, node, j)
        s.rows[start + slot_i] = j
        s.rows[start + slot_j] = i
    for field in range(3):
        a, b = (kids + i) * ROW + field, (kids + j) * ROW + field
        s.rows[a], s.rows[b] = s.rows[b], s.rows[a]


@compiled
def _border(s, node, low, high, count):
    """The first of the children low ... high - 1 whose count is below `count`; `high` if there is none."""
    base = s.nodes[node, KIDS] * ROW + COUNT
    while low < high:
        middle = (low + high) >> 1
        if s.rows[base + middle * ROW] < count:
            high = middle
        else:
            low = middle + 1
    return low


@compiled
def _increase(s, node, i, is_root):
    """One more occurrence of child i: it changes places with the first child of its count. Returns its new index."""
    base = s.nodes[node, KIDS] * ROW + COUNT
    count = s.rows[base + i * ROW]
    first = i if is_root or i == 0 else _border(s, node, 0, i, count + 1)
    _swap(s, node, i, first)
    s.rows[base + first * ROW] = count + 1
    s.nodes[node, TOTAL] += 1
    return first


@compiled
def _decrease(s, node, i, is_root):
    """One occurrence less of child i; without any it is dropped."""
    kids = s.nodes[node, KIDS]
    num = s.nodes[node, NUM]
    count = s.rows[(kids + i) * ROW + COUNT]
    last = num - 1 if count == 1 else i
    if count > 1 and not is_root:
        last = _border(s, node, i, num, count) - 1
    _swap(s, node, i, last)
    s.rows[(kids + last) * ROW + COUNT] = count - 1
    s.nodes[node, TOTAL] -= 1
    if count > 1:
        return
    if s.nodes[node, INDEX] >= 0:
        _unindex_child(s, node, last)
    s.nodes[node, NUM] = num - 1
    cls = s.nodes[node, CLASS]
    if num == 1:
        _free_block(s, kids, cls)
        s.nodes[node, KIDS] = -1
        s.nodes[node, CLASS] = 0
    elif cls > 1 and (num - 1) * 4 <= 1 << cls:
        _set_class(s, node, cls - 1)


# --- Growth ----------------------------------------------------------------------------------------------------------


@compiled
def _split(s, node, i, offset, end, is_root):
    """A new node in the middle of the edge to child i, `offset` tokens down, reached once more. Returns it."""
    at = (s.nodes[node, KIDS] + i) * ROW
    count, child = s.rows[at + COUNT], s.rows[at + CHILD]
    middle = new_node(s, end - offset, offset)
    if child >= 0:
        lower = s.nodes[child, LABEL] + offset
        s.nodes[child, LABEL] = lower
        s.nodes[child, LEN] -= offset
        _add_child(s, middle, s.text[lower], count, child)
    else:
        lower = ~child + offset
        if s.text[lower] == END:  # the other text ends just here
            s.nodes[middle, ENDED] = 1
        else:
            _add_child(s, middle, s.text[lower], 1, ~lower)
    s.rows[at + CHILD] = middle
    _increase(s, node, i, is_root)
    return middle


@compiled
def _settle(s, root, node, offset, end):
    """
    A point whose edge was split meanwhile, put below the new nodes (and counted there). Returns (node, offset, index of
    the child whose edge it stands on, or -1).
    """
    i = -1
    while offset > 0:
        i = find(s, node, s.text[end - offset])
        child = s.rows[(s.nodes[node, KIDS] + i) * ROW + CHILD]
        if child < 0 or offset < s.nodes[child, LEN]:
            return node, offset, i
        _increase(s, node, i, node == root)
        offset -= s.nodes[child, LEN]
        node = child
    return node, 0, -1


@compiled
def extend(s, root, points, num_points, end, token):
    """
    Appends a token to a text.

    Args:
        points (`np.ndarray` of shape `[max_depth + 1, 2]`, int32): Line d is the place (node, offset on the edge below)
            of the text's last d tokens; lines 0 to `num_points` are in use.
        end (`int`): Where the token goes; `text[end]` and `text[end + 1]` are written.

    Returns:
        The new `num_points`: the number of last tokens that have occurred before.
    """
    max_depth = len(points) - 1
    s.text[end] = token
    s.text[end + 1] = END
    matched = 0
    for depth in range(min(num_points, max_depth - 1), -1, -1):
        node, offset, i = _settle(s, root, points[depth, 0], points[depth, 1], end)
        if offset == 0:
            i = find(s, node, token)
            if i < 0:
                _add_child(s, node, token, 1, ~end)
                continue
            child = s.rows[(s.nodes[node, KIDS] + i) * ROW + CHILD]
        else:
            child = s.rows[(s.nodes[node, KIDS] + i) * ROW + CHILD]
            label = s.nodes[child, LABEL] if child >= 0 else ~child
            if s.text[label + offset] != token:
                middle = _split(s, node, i, offset, end, node == root)
                _add_child(s, middle, token, 1, ~end)
                continue
        offset += 1
        matched = max(matched, depth + 1)
        if child >= 0 and offset == s.nodes[child, LEN]:
            _increase(s, node, i, node == root)
            s.nodes[child, LABEL] = end + 1 - offset  # the latest occurrence
            node, offset = child, 0
            if depth + 1 == max_depth:
                s.nodes[child, ENDED] += 1
        elif depth + 1 == max_depth:  # a leaf: nodes end at the limit at the latest
            bottom = new_node(s, end + 1 - offset, offset)
            s.nodes[bottom, ENDED] = 2
            s.rows[(s.nodes[node, KIDS] + i) * ROW + CHILD] = bottom
            _increase(s, node, i, node == root)
            node, offset = bottom, 0
        points[depth + 1, 0] = node
        points[depth + 1, 1] = offset
    return matched


@compiled
def finish(s, root, points, num_points, end):
    """Ends a text: its last tokens are counted too."""
    for depth in range(min(num_points, len(points) - 2), 0, -1):
        node, offset, i = _settle(s, root, points[depth, 0], points[depth, 1], end)
        if offset > 0:
            node = _split(s, node, i, offset, end, node == root)
        s.nodes[node, ENDED] += 1


@compiled
def insert(s, root, start, tokens, max_depth):
    """Writes a whole text to `text[start:]` and to the tree. Needs `len(tokens) + 1` places."""
    points = np.empty((max_depth + 1, 2), np.int32)
    points[0, 0] = root
    points[0, 1] = 0
    num_points = 0
    for i in range(len(tokens)):
        num_points = extend(s, root, points, num_points, start + i, tokens[i])
    finish(s, root, points, num_points, start + len(tokens))


@compiled
def move_tree(s, root, start, end, target):
    """Copies `text[start:end]` and what stands behind it to `target`, and lets the tree's edges lie there."""
    s.text[target : target + end - start + 1] = s.text[start : end + 1]
    stack = [root]
    while len(stack) > 0:
        node = stack.pop()
        if node != root and start <= s.nodes[node, LABEL] < end:
            s.nodes[node, LABEL] += target - start
        base = s.nodes[node, KIDS] * ROW + CHILD
        for i in range(s.nodes[node, NUM]):
            child = s.rows[base + i * ROW]
            if child >= 0:
                stack.append(child)
            elif start <= ~child < end:
                s.rows[base + i * ROW] = child - (target - start)


# --- Removal ---------------------------------------------------------------------------------------------------------


@compiled
def remove(s, root, start, end, max_depth):
    """
    Takes the finished text `text[start:end]` out of the tree. Its memory may be used again when `num_labels` finds no
    edge that still lies in it.
    """
    path = np.empty(max_depth + 1, np.int32)
    for first in range(start, end):
        limit = min(end, first + max_depth)
        node, at, steps = root, first, 0
        path[0] = root
        while at < limit:
            i = find(s, node, s.text[at])
            child = s.rows[(s.nodes[node, KIDS] + i) * ROW + CHILD]
            _decrease(s, node, i, node == root)
            if child < 0:
                break
            at += s.nodes[child, LEN]
            steps += 1
            path[steps] = child
            node = child
        else:
            s.nodes[node, ENDED] -= 1
        for step in range(steps, 0, -1):
            _tidy(s, path[step - 1], path[step], start, end)


@compiled
def _tidy(s, parent, node, start, end):
    """A node that lost an occurrence: gone if it was the last, merged with an only child, or labelled anew."""
    if s.nodes[node, TOTAL] + s.nodes[node, ENDED] == 0:
        _free_node(s, node)
        return
    if s.nodes[node, NUM] == 1 and s.nodes[node, ENDED] == 0:
        at = s.nodes[node, KIDS] * ROW + CHILD
        child = s.rows[at]
        length = s.nodes[node, LEN]
        if child >= 0:
            s.nodes[child, LABEL] -= length
            s.nodes[child, LEN] += length
            first = s.text[s.nodes[child, LABEL]]
        else:
            child += length  # ~(position - length)
            first = s.text[~child]
        s.rows[(s.nodes[parent, KIDS] + find(s, parent, first)) * ROW + CHILD] = child
        _free_node(s, node)
        return
    _relabel(s, node, start, end)


@compiled
def _relabel(s, node, start, end):
    """Lets the node's edge lie in the text of one of its children, if it lies in `text[start:end]` now."""
    if not start <= s.nodes[node, LABEL] < end:
        return
    base = s.nodes[node, KIDS] * ROW + CHILD
    for i in range(min(s.nodes[node, NUM], 16)):
        child = s.rows[base + i * ROW]
        below = s.nodes[child, LABEL] if child >= 0 else ~child
        if not start <= below < end:
            s.nodes[node, LABEL] = below - s.nodes[node, LEN]
            return


@compiled
def num_labels(s, root, start, end, max_depth):
    """How many edges of the tree still lie in the text `text[start:end]`, which was removed."""
    count = 0
    for first in range(start, end):
        node, at = root, first
        while at < min(end, first + max_depth):
            i = find(s, node, s.text[at])
            if i < 0:
                break
            child = s.rows[(s.nodes[node, KIDS] + i) * ROW + CHILD]
            if child < 0:
                break
            _relabel(s, child, start, end)
            at += s.nodes[child, LEN]
            if at > end:
                break
            # Every edge is a place in the text once: that of the suffix that came by last.
            if start <= s.nodes[child, LABEL] < end and s.nodes[child, LABEL] + s.nodes[child, LEN] == at:
                count += 1
            node = child
    return count
