"""
Suffix trees over token ids in flat integer arrays: the compiled part of `SuffixTreeCandidates`.

One `Store` holds many trees: one per running request, one per namespace of earlier outputs. A root names a tree. Trees
are compressed (an edge is a range of text, a suffix that was seen once is a leaf that points into the text) and
bounded in depth; every string of up to `max_depth` tokens that occurs has its exact number of occurrences. Children are
sorted by falling count, so that the best come first; nodes of many children have a hash index besides.

Here are nodes and their children; `insert` adds texts to a tree, `remove` takes them out again.
"""

from typing import NamedTuple

import numpy as np

from .....jit import compiled, inner
from .....jit.pointers import int32_at, int64_at

# Fields of a node, which is known by its number: the first 8 integers of `Store.nodes` are those of node 0
LABEL, LEN, KIDS, NUM, CLASS, TOTAL, ENDED, INDEX = range(8)
"""Text position and length of the edge that leads to it; block of its children's entries, or -1, their number and
capacity class; sum of their counts; how often a text ended here (or reached the depth limit); block of its hash index,
or -1. No edge leads to a root: its `LEN` is what turns positions of the text that grows it into times."""
NODE = 8

# Fields of a child's entry, known by where they begin in `Store.rows`
TOKEN, COUNT, CHILD, SEEN = range(4)
"""First token of the edge, how often it was passed to its end, the node there or ~position of a leaf's text, and time
of its latest occurrence (see `is_later`)."""
ROW = 4
PAIR = 2 * ROW  # blocks of entries begin at multiples, by which they are known: 32-bit numbers reach 64 GiB

# Allocator state
NODES_TOP, NODES_FREE, NODES_LIVE, ROWS_TOP, ROWS_LIVE, REMOVALS, CLOCK, BLOCKS_FREE = range(8)
"""Tops and free lists by name; `REMOVALS`: texts that were taken out of trees, whose nodes may be gone; `CLOCK`: number
of tokens ever added by `insert`."""
NUM_HEADS = 48

_INDEXED = 4  # classes above (more than 16 children) have an index
END = -1  # the border after every text
BLOCK_BITS = 6
BLOCK = 1 << BLOCK_BITS  # tokens; texts begin at multiples, so that a position determines its text
_MOST_TOKENS, _MOST_NODES, _MOST_ROWS = 2**31 - BLOCK, 2**31 - 1, 2**32 - 2  # whose numbers have 32 bits


class Store(NamedTuple):
    """
    The memory of all trees. Within compiled code, the fields are pointers (`pointers`).

    Args:
        text (`np.ndarray` of shape `[tokens]`, int32): All texts, each followed by `END`.
        nodes (`np.ndarray` of shape `[nodes * 8]`, int32): See the field names above.
        rows (`np.ndarray` of shape `[rows * 4]`, int32): Blocks of child entries and of indices.
        heads (`np.ndarray` of shape `[48]`, int64): Tops and free lists.
    """

    text: np.ndarray
    nodes: np.ndarray
    rows: np.ndarray
    heads: np.ndarray


def new_store(num_tokens: int, num_nodes: int, num_rows: int) -> Store:
    """
    Return memory for so many tokens, nodes and rows. It is not touched before it is used, so large numbers cost
    nothing.
    """
    nodes, rows = _aligned(min(num_nodes, _MOST_NODES) * NODE), _aligned(min(num_rows, _MOST_ROWS) * ROW)
    store = Store(_aligned(min(num_tokens, _MOST_TOKENS)), nodes, rows, np.empty(NUM_HEADS, np.int64))
    clear_store(store)
    return store


def _aligned(size: int) -> np.ndarray:
    """Return untouched memory that begins with a cache line, so that no node or entry lies in two."""
    memory = np.empty(size + 16, np.int32)
    start = -memory.ctypes.data % 64 // 4
    return memory[start : start + size]


def clear_store(store: Store) -> None:
    """Remove all trees."""
    store.heads[:] = -1
    store.heads[[NODES_TOP, NODES_LIVE, ROWS_TOP, ROWS_LIVE, REMOVALS, CLOCK]] = 0


@inner
def pointers(store):
    return Store(
        int32_at(store.text.ctypes.data),
        int32_at(store.nodes.ctypes.data),
        int32_at(store.rows.ctypes.data),
        int64_at(store.heads.ctypes.data),
    )


# --- Memory ----------------------------------------------------------------------------------------------------------


@inner
def _new_block(s, cls):
    """Return rows for 2**cls entries, `cls` at least 1; freed blocks of the class come first."""
    s.heads[ROWS_LIVE] += 1 << cls
    block = s.heads[BLOCKS_FREE + cls]
    if block >= 0:
        s.heads[BLOCKS_FREE + cls] = s.rows[block * PAIR]
        return block
    block = s.heads[ROWS_TOP] >> 1
    s.heads[ROWS_TOP] += 1 << cls
    return block


@inner
def free_block(s, block, cls):
    s.heads[ROWS_LIVE] -= 1 << cls
    s.rows[block * PAIR] = s.heads[BLOCKS_FREE + cls]
    s.heads[BLOCKS_FREE + cls] = block


@inner
def new_node(s, label, length):
    s.heads[NODES_LIVE] += 1
    node = s.heads[NODES_FREE]
    if node >= 0:
        s.heads[NODES_FREE] = s.nodes[node * NODE + KIDS]
    else:
        node = s.heads[NODES_TOP]
        s.heads[NODES_TOP] += 1
    s.nodes[node * NODE + LABEL] = label
    s.nodes[node * NODE + LEN] = length
    s.nodes[node * NODE + KIDS] = -1
    s.nodes[node * NODE + NUM] = 0
    s.nodes[node * NODE + CLASS] = 0
    s.nodes[node * NODE + TOTAL] = 0
    s.nodes[node * NODE + ENDED] = 0
    s.nodes[node * NODE + INDEX] = -1
    return node


@inner
def free_node(s, node):
    """
    Free a node whose children are elsewhere. Its label stays a text position: an earlier draft may still be learnt from
    when a place of it is gone (`places.position_of`).
    """
    if s.nodes[node * NODE + KIDS] >= 0:
        free_block(s, s.nodes[node * NODE + KIDS], s.nodes[node * NODE + CLASS])
    if s.nodes[node * NODE + INDEX] >= 0:
        free_block(s, s.nodes[node * NODE + INDEX], s.nodes[node * NODE + CLASS] - 1)
    s.nodes[node * NODE + KIDS] = s.heads[NODES_FREE]
    s.heads[NODES_FREE] = node
    s.heads[NODES_LIVE] -= 1


@compiled
def new_root(store):
    """Return the root of a new tree, which is empty."""
    return new_node(pointers(store), 0, 0)


@compiled
def free_tree(store, root):
    s, waiting = pointers(store), root
    s.nodes[root * NODE + TOTAL] = -1  # of a node that waits: the next one that waits
    while waiting >= 0:
        node = waiting
        waiting = s.nodes[node * NODE + TOTAL]
        kids = s.nodes[node * NODE + KIDS] * PAIR
        for entry in range(kids, kids + s.nodes[node * NODE + NUM] * ROW, ROW):
            child = s.rows[entry + CHILD]
            if child >= 0:
                s.nodes[child * NODE + TOTAL] = waiting
                waiting = child
        free_node(s, node)


# --- Time ------------------------------------------------------------------------------------------------------------


@inner
def set_clock(s, root, start):
    """Let the times of a text that begins at position `start` follow those of all texts inserted before."""
    s.nodes[root * NODE + LEN] = s.heads[CLOCK] - start


@inner
def time_of(s, root, position):
    """Return when the token at this position of the growing text was added. Positions are used again, times are not."""
    return position + s.nodes[root * NODE + LEN]


@inner
def is_later(time, other):
    """Compare times by their distance: they are 32-bit numbers that begin anew after 2**32 tokens."""
    return np.int32(time - other) > 0


# --- Children --------------------------------------------------------------------------------------------------------


@inner
def _hash(token, cls):
    """Return the slot of a token in an index of 2**(cls + 1) slots (Fibonacci hashing)."""
    return ((np.int64(token) * 2654435761) & 0xFFFFFFFF) >> (31 - cls)


@inner
def find(s, node, token):
    """Return the entry of the child whose edge begins with `token`, or -1."""
    kids = s.nodes[node * NODE + KIDS] * PAIR
    index = s.nodes[node * NODE + INDEX] * PAIR
    if index < 0:
        for entry in range(kids, kids + s.nodes[node * NODE + NUM] * ROW, ROW):
            if s.rows[entry] == token:
                return entry
        return -1
    cls = s.nodes[node * NODE + CLASS]
    mask = (2 << cls) - 1
    slot = _hash(token, cls)
    while True:
        i = s.rows[index + slot]
        if i < 0:
            return -1
        if s.rows[kids + i * ROW] == token:
            return kids + i * ROW
        slot = (slot + 1) & mask


@inner
def _slot_of(s, node, i):
    """Return the slot of the index that names child i."""
    cls = s.nodes[node * NODE + CLASS]
    start = s.nodes[node * NODE + INDEX] * PAIR
    slot = _hash(s.rows[s.nodes[node * NODE + KIDS] * PAIR + i * ROW], cls)
    while s.rows[start + slot] != i:
        slot = (slot + 1) & ((2 << cls) - 1)
    return slot


@inner
def _index_child(s, node, i):
    cls = s.nodes[node * NODE + CLASS]
    start = s.nodes[node * NODE + INDEX] * PAIR
    slot = _hash(s.rows[s.nodes[node * NODE + KIDS] * PAIR + i * ROW], cls)
    while s.rows[start + slot] >= 0:
        slot = (slot + 1) & ((2 << cls) - 1)
    s.rows[start + slot] = i


@inner
def unindex_child(s, node, i):
    """Clear the child's slot and move those after it up, so that no search stops early."""
    cls = s.nodes[node * NODE + CLASS]
    mask = (2 << cls) - 1
    start = s.nodes[node * NODE + INDEX] * PAIR
    kids = s.nodes[node * NODE + KIDS] * PAIR
    hole = _slot_of(s, node, i)
    slot = (hole + 1) & mask
    while s.rows[start + slot] >= 0:
        home = _hash(s.rows[kids + s.rows[start + slot] * ROW], cls)
        if ((slot - home) & mask) >= ((slot - hole) & mask):
            s.rows[start + hole] = s.rows[start + slot]
            hole = slot
        slot = (slot + 1) & mask
    s.rows[start + hole] = -1


@inner
def set_class(s, node, cls):
    """Move the children to a block of 2**cls entries."""
    block = _new_block(s, cls)
    old = s.nodes[node * NODE + KIDS]
    num = s.nodes[node * NODE + NUM]
    if old >= 0:
        for k in range(num * ROW):
            s.rows[block * PAIR + k] = s.rows[old * PAIR + k]
        free_block(s, old, s.nodes[node * NODE + CLASS])
    if s.nodes[node * NODE + INDEX] >= 0:
        free_block(s, s.nodes[node * NODE + INDEX], s.nodes[node * NODE + CLASS] - 1)
        s.nodes[node * NODE + INDEX] = -1
    s.nodes[node * NODE + KIDS] = block
    s.nodes[node * NODE + CLASS] = cls
    if cls > _INDEXED:
        index = _new_block(s, cls - 1)
        for k in range(2 << cls):
            s.rows[index * PAIR + k] = -1
        s.nodes[node * NODE + INDEX] = index
        for i in range(num):
            _index_child(s, node, i)


@inner
def add_child(s, node, token, count, child, seen):
    num = s.nodes[node * NODE + NUM]
    if s.nodes[node * NODE + KIDS] < 0:
        set_class(s, node, 1)
    elif num == 1 << s.nodes[node * NODE + CLASS]:
        set_class(s, node, s.nodes[node * NODE + CLASS] + 1)
    entry = s.nodes[node * NODE + KIDS] * PAIR + num * ROW
    s.rows[entry + TOKEN] = token
    s.rows[entry + COUNT] = count
    s.rows[entry + CHILD] = child
    s.rows[entry + SEEN] = seen
    s.nodes[node * NODE + NUM] = num + 1
    s.nodes[node * NODE + TOTAL] += count
    if s.nodes[node * NODE + INDEX] >= 0:
        _index_child(s, node, num)


@inner
def swap(s, node, i, j):
    """Swap children i and j."""
    if i == j:
        return
    kids = s.nodes[node * NODE + KIDS] * PAIR
    if s.nodes[node * NODE + INDEX] >= 0:
        start = s.nodes[node * NODE + INDEX] * PAIR
        slot_i, slot_j = _slot_of(s, node, i), _slot_of(s, node, j)
        s.rows[start + slot_i] = j
        s.rows[start + slot_j] = i
    for field in range(ROW):
        a, b = kids + i * ROW + field, kids + j * ROW + field
        s.rows[a], s.rows[b] = s.rows[b], s.rows[a]


@inner
def border(s, node, low, high, count):
    """Return the first of the children low ... high - 1 whose count is below `count`; `high` if there is none."""
    counts = s.nodes[node * NODE + KIDS] * PAIR + COUNT
    while low < high:
        middle = (low + high) >> 1
        if s.rows[counts + middle * ROW] < count:
            high = middle
        else:
            low = middle + 1
    return low


@inner
def increase(s, node, entry, seen, is_root):
    """Count one more occurrence, at time `seen`: the child changes places with the first child of its count."""
    count = s.rows[entry + COUNT]
    kids = s.nodes[node * NODE + KIDS] * PAIR
    s.rows[entry + COUNT] = count + 1
    if is_later(seen, s.rows[entry + SEEN]):  # a point that lagged is counted after others
        s.rows[entry + SEEN] = seen
    s.nodes[node * NODE + TOTAL] += 1
    if not is_root and entry > kids and s.rows[entry - ROW + COUNT] == count:
        i = (entry - kids) // ROW
        swap(s, node, i, border(s, node, 0, i, count + 1))
