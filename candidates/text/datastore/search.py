"""
Compiled search of continuations: tries that count what followed a request's last tokens, in a datastore or in its own
text, and their best nodes.
"""

from typing import Any, NamedTuple

import numpy as np

from ....drafts.tree import DraftTree
from ....jit import compiled, inner


class Settings(NamedTuple):
    min_continuations: int
    num_continuations: int
    branch_len: int
    breadth: int  # a draft of n nodes has branches of at most n / breadth tokens; 0: of `branch_len`
    first_n: bool
    capacity: int  # nodes of the largest trie of one row, its root included
    usual: int  # nodes that are proposed at any promise
    least: float  # probability of the paths to nodes beyond the usual number


class Text(NamedTuple):
    tokens: np.ndarray
    suffixes: np.ndarray
    starts: np.ndarray


class Drafts(NamedTuple):
    """The drafts of a batch, one row each."""

    tokens: np.ndarray  # [rows, nodes] int64
    parents: np.ndarray  # [rows, nodes] int64
    probs: np.ndarray  # [rows, nodes] float32
    match_lengths: np.ndarray  # [rows, nodes] int64
    sizes: np.ndarray  # [rows] int64: nodes in use

    @classmethod
    def of(cls, num_rows: int, num_nodes: int) -> "Drafts":
        """Return drafts that are still to be filled, with room for `num_nodes` nodes each."""
        shape = num_rows, num_nodes
        return cls(
            np.empty(shape, np.int64),
            np.empty(shape, np.int64),
            np.empty(shape, np.float32),
            np.empty(shape, np.int64),
            np.zeros(num_rows, np.int64),
        )

    def trees(self) -> list[DraftTree]:
        return [
            DraftTree.of(*(array[row, :size] for array in self[:-1])) if size else DraftTree.empty()
            for row, size in enumerate(self.sizes.tolist())
        ]


# --- Compiled code. A trie is an int32 array with one row per node, in the order of creation; row 0 is the root. -----

MOST_PLACES = 1000  # of a token in a request's own text that are looked at in a step
_TOKEN, _PARENT, _COUNT, _DEPTH, _LENGTH = range(5)  # the last: of the match
_CHILD, _SIBLING = 5, 6  # first child, next sibling; 0: none
_NUM_FIELDS = 7


@compiled
def propose(
    text: Text, ends: np.ndarray, limits: np.ndarray, settings: Settings, drafts: Drafts, first: int, last: int
) -> None:
    """Fill the drafts of the rows in [first, last)."""
    trie = np.empty((settings.capacity, _NUM_FIELDS), np.int32)
    order = np.empty(len(trie), np.int32)
    ranges = np.empty((ends.shape[1] + 1, 2), np.int64)
    for row in range(first, last):
        branch_len = settings.branch_len
        if settings.breadth > 0:
            branch_len = min(branch_len, max(limits[row] // settings.breadth, 1))
        size = _grow_trie(text, ends[row], branch_len, settings, ranges, trie)
        _select(trie, size, order, limits[row], settings, drafts, row)


@compiled
def propose_own(
    tokens: np.ndarray,
    previous: np.ndarray,
    size: int,
    length: int,
    limit: int,
    settings: Settings,
    drafts: Drafts,
    row: int,
) -> None:
    """
    Fill one row's draft with what followed the earlier places of the last `length` of a text's `size` tokens, among
    the latest `MOST_PLACES` places of the last one. `previous` is the latest earlier place of each token, -1 where
    there is none.
    """
    last, places = size - 1, 0
    place = previous[last]
    while place >= 0 and places < MOST_PLACES:
        places += 1
        place = previous[place]
    trie = np.empty((1 + places * settings.branch_len, _NUM_FIELDS), np.int32)
    trie[0] = 0
    num_nodes = 1
    place = previous[last]
    for _ in range(places):
        if place < length - 1:
            break
        matching = 1
        while matching < length and tokens[place - matching] == tokens[last - matching]:
            matching += 1
        if matching == length:
            end = min(place + 1 + settings.branch_len, size)
            _, num_nodes = _add(trie, num_nodes, tokens, place + 1, end, 2**31, length)
        place = previous[place]
    _select(trie, num_nodes, np.empty(len(trie), np.int32), limit, settings, drafts, row)


@inner
def _grow_trie(
    text: Text, end: np.ndarray, branch_len: int, settings: Settings, ranges: np.ndarray, trie: np.ndarray
) -> int:
    """Build the trie of one row's continuations and return its number of nodes."""
    trie[0] = 0
    size = 1
    for length in range(_longest_match(text, end, ranges), 0, -1):
        low, high = _range(text, end, length, ranges)
        size, found = _add_continuations(text, low, high, length, branch_len, settings, trie, size)
        if found >= settings.min_continuations:
            break
    return size


@inner
def _longest_match(text: Text, end: np.ndarray, ranges: np.ndarray) -> int:
    """Return how many of the last tokens occur together, and reset the ranges of the row before."""
    vocab_size = len(text.starts) - 1
    usable = 0
    while usable < len(end) and 0 <= end[len(end) - 1 - usable] < vocab_size:
        usable += 1
    ranges[:, 0] = -1
    longest = 0
    while longest < usable:  # where so many occur, fewer do
        length = (longest + usable + 1) // 2
        low, high = _range(text, end, length, ranges)
        if low < high:
            longest = length
        else:
            usable = length - 1
    return longest


@inner
def _range(text: Text, end: np.ndarray, length: int, ranges: np.ndarray) -> tuple[int, int]:
    """Return the suffixes that begin with the last `length` tokens, as [low, high); looked up once per row."""
    if ranges[length, 0] < 0:
        tokens, suffixes, starts = text
        prefix = end[len(end) - length :]
        # Within the array, even for a damaged file.
        low = min(max(starts[prefix[0]], 0), len(suffixes))
        high = min(max(starts[prefix[0] + 1], low), len(suffixes))
        above = high
        while low < high:
            middle = (low + high) // 2
            order = _compare(tokens, suffixes[middle], prefix)
            if order < 0:
                low = middle + 1
            else:
                high = middle
                if order > 0:
                    above = middle
        ranges[length, 0] = low
        while high < above:
            middle = (high + above) // 2
            if _compare(tokens, suffixes[middle], prefix) > 0:
                above = middle
            else:
                high = middle + 1
        ranges[length, 1] = high
    return ranges[length, 0], ranges[length, 1]


@inner
def _compare(tokens: np.ndarray, position: int, prefix: np.ndarray) -> int:
    """
    Return a negative number, zero or a positive one: the suffix is below, begins with or is above the prefix, whose
    first token it has.
    """
    if position < 0:
        return -1
    for index in range(1, len(prefix)):
        token = tokens[position + index] if position + index < len(tokens) else -1
        if token != prefix[index]:
            return -1 if token < prefix[index] else 1
    return 0


@inner
def _add_continuations(
    text: Text, low: int, high: int, length: int, branch_len: int, settings: Settings, trie: np.ndarray, size: int
) -> tuple[int, int]:
    """
    Add the continuations of the match in some of the suffixes; return the trie's size and the number of suffixes that
    had any.
    """
    tokens, vocab_size = text.tokens, len(text.starts) - 1
    matches = high - low
    picked = min(matches, settings.num_continuations)
    found = 0
    for index in range(picked):
        # The middle of each of `picked` equal intervals.
        offset = index if settings.first_n else (2 * index + 1) * matches // (2 * picked)
        begin: Any = np.int64(text.suffixes[low + offset]) + length
        end = min(begin + branch_len, len(tokens))
        is_followed, size = _add(trie, size, tokens, max(begin, 0), end, vocab_size, length)
        found += is_followed
    return size, found


@inner
def _add(
    trie: np.ndarray, size: int, tokens: np.ndarray, begin: int, end: int, vocab_size: int, length: int
) -> tuple[bool, int]:
    """
    Count the path of the tokens in [begin, end), as far as they lie in the vocabulary; return whether there are any,
    and the trie's size.
    """
    trie[0, _COUNT] += 1
    node = 0
    for position in range(begin, end):
        token = tokens[position]
        if token < 0 or token >= vocab_size:  # the document's border
            break
        node, size = _child(trie, node, token, length, size)
        trie[node, _COUNT] += 1
    return node > 0, size


@inner
def _child(trie: np.ndarray, parent: int, token: int, length: int, size: int) -> tuple[Any, int]:
    """Return the node of the token below its parent, a new one if need be, and the trie's size."""
    # The newest child comes first: what is sorted finds it there.
    node = trie[parent, _CHILD]
    while node > 0:
        if trie[node, _TOKEN] == token:
            return node, size
        node = trie[node, _SIBLING]
    trie[size, _TOKEN] = token
    trie[size, _PARENT] = parent
    trie[size, _COUNT] = 0
    trie[size, _DEPTH] = trie[parent, _DEPTH] + 1
    trie[size, _LENGTH] = length  # the longest: long ends come first
    trie[size, _CHILD] = 0
    trie[size, _SIBLING] = trie[parent, _CHILD]
    trie[parent, _CHILD] = size
    return np.int32(size), size + 1


@inner
def _select(
    trie: np.ndarray, size: int, order: np.ndarray, limit: int, settings: Settings, drafts: Drafts, row: int
) -> None:
    """
    Write the best nodes of the trie as a draft. The product of the ratios of counts along a path is the node's count
    over the root's, so the best are those of highest count; of these the shallower, then the older ones. A child is
    never above its parent.
    """
    _sort_nodes(trie, size, settings.branch_len, order)
    least_count = settings.least * trie[0, _COUNT]
    drafts.sizes[row] = max(0, min(limit, size - 1))
    for index in range(drafts.sizes[row]):
        node = order[index]
        if index >= settings.usual and trie[node, _COUNT] < least_count:
            drafts.sizes[row] = index
            break
        parent = trie[node, _PARENT]
        drafts.tokens[row, index] = trie[node, _TOKEN]
        drafts.parents[row, index] = -1 if parent == 0 else trie[parent, _SIBLING]
        drafts.probs[row, index] = trie[node, _COUNT] / trie[parent, _COUNT]
        drafts.match_lengths[row, index] = trie[node, _LENGTH]
        trie[node, _SIBLING] = index  # siblings are no longer asked for


@inner
def _sort_nodes(trie: np.ndarray, size: int, branch_len: int, order: np.ndarray) -> None:
    """Order all nodes but the root by falling count, then by depth, then by age, in a counting sort."""
    width = branch_len + 1
    begins = np.zeros((trie[0, _COUNT] + 1) * width + 1, np.int32)
    for node in range(1, size):
        begins[(trie[0, _COUNT] - trie[node, _COUNT]) * width + trie[node, _DEPTH] + 1] += 1
    for key in range(1, len(begins)):
        begins[key] += begins[key - 1]
    for node in range(1, size):
        key = (trie[0, _COUNT] - trie[node, _COUNT]) * width + trie[node, _DEPTH]
        order[begins[key]] = node
        begins[key] += 1
