"""SSSD's datastore: the continuations of the last tokens in a large fixed text, found in microseconds."""

import os
from collections.abc import Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from ....drafts.price import LevelPrice
from ....drafts.tree import DraftTree
from ....jit import compiled, inner
from ....validate import is_integer
from ...base import TYPICAL_NODES, TreeCandidateGenerator
from .file import Datastore

_ROWS_PER_THREAD = 8  # fewer are done before another thread has woken up
_MOST_NODES = 63  # nodes of a draft, where goodput decides
_MAX_NUMBER = 100_000  # of any setting; counts of occurrences, times their depth, stay far within int32


class _Settings(NamedTuple):
    min_continuations: int
    num_continuations: int
    branch_len: int
    first_n: bool
    capacity: int  # nodes of the largest trie of one row, its root included
    usual: int  # nodes that are proposed at any promise
    least: float  # probability of the paths to nodes beyond the usual number


class _Text(NamedTuple):
    tokens: np.ndarray
    suffixes: np.ndarray
    starts: np.ndarray


class _Drafts(NamedTuple):
    """The drafts of a batch, one row each."""

    tokens: np.ndarray  # [rows, nodes] int64
    parents: np.ndarray  # [rows, nodes] int64
    probs: np.ndarray  # [rows, nodes] float32
    match_lengths: np.ndarray  # [rows, nodes] int64
    sizes: np.ndarray  # [rows] int64: nodes in use


class DatastoreCandidates(TreeCandidateGenerator):
    """
    Proposes what followed the last tokens of the request in a large text ("SSSD: Simply-Scalable Speculative Decoding",
    section 3.1.2). It looks for the longest end of the request that occurs, picks continuations at regular intervals
    among all occurrences, goes on with shorter ends until there are enough, and merges all into one tree that counts
    occurrences. Matches of a longer end also match a shorter one, and count again there. `probs` of the drafts are
    ratios of counts: how often the node followed its parent; `match_lengths` are those of the longest ends that the
    nodes followed. The best `max_nodes` nodes are proposed, best first.

    Keeps no state but the last tokens. It does not draft from the request's own text: combine it with a source that
    does. The engine drops drafts with ids beyond the target's vocabulary, but ids that mean other tokens there are
    just never accepted: pass `tokenizer` to have it checked.

    Args:
        datastore (`Datastore`, `str` or `os.PathLike`): The text, or the file where it lies (see `build_datastore`).
        num_nodes (`int`, *optional*): Nodes per row where the caller names no number. Where not given, 16, and where
            goodput decides, up to 63: beyond 16, those that promise more tokens than they cost.
        max_prefix (`int`): The longest end of a request that is looked for, in tokens.
        min_continuations (`int`): Shorter ends are tried until one has so many continuations.
        num_continuations (`int`): Continuations that are picked per end, at most (M of the paper).
        branch_len (`int`): Tokens per continuation.
        first_n (`bool`): Pick the first continuations in sorted order instead of such at regular intervals. That is
            how REST does it (He et al., 2023), with `min_continuations=1, num_continuations=5000`; for comparison.
        tokenizer (`PreTrainedTokenizerBase`, *optional*): The target's; the datastore must have been built with it.

    Raises:
        ValueError: for numbers out of range, files that are no valid datastore, and another tokenizer.
        TypeError: for a datastore of another type.
    """

    label = "datastore"

    def __init__(
        self,
        datastore: Datastore | str | os.PathLike[str],
        num_nodes: int | None = None,
        max_prefix: int = 8,
        min_continuations: int = 10,
        num_continuations: int = 100,
        branch_len: int = 8,
        first_n: bool = False,
        tokenizer: PreTrainedTokenizerBase | None = None,
    ):
        _check_positive(
            num_nodes=TYPICAL_NODES if num_nodes is None else num_nodes,
            max_prefix=max_prefix,
            min_continuations=min_continuations,
            num_continuations=num_continuations,
            branch_len=branch_len,
        )
        if min_continuations > num_continuations:
            raise ValueError(
                "`min_continuations` must not exceed `num_continuations`, of which no more are picked; got "
                f"{min_continuations} > {num_continuations}."
            )
        if not isinstance(first_n, bool):
            raise TypeError(f"`first_n` must be a bool, got {first_n!r}.")
        datastore = _as_datastore(datastore, tokenizer)
        if max_prefix + branch_len > datastore.sort_depth:
            raise ValueError(
                f"`max_prefix` and `branch_len` together must not exceed {datastore.sort_depth}, the depth to which "
                f"the datastore is sorted; got {max_prefix} + {branch_len}. Build it with a larger `sort_depth`."
            )
        self.datastore = datastore
        self.default_num_nodes = num_nodes or TYPICAL_NODES
        self.heeds_prices = num_nodes is None
        self.most_nodes = num_nodes or _MOST_NODES
        self.max_prefix = max_prefix
        self._text = _Text(datastore.tokens, datastore.suffixes, datastore.starts)
        # All ends but the last one that is looked at have fewer than `min_continuations`.
        most_picked = num_continuations + (max_prefix - 1) * (min_continuations - 1)
        self._settings = _Settings(
            int(min_continuations),
            int(num_continuations),
            int(branch_len),
            first_n,
            int(1 + most_picked * branch_len),
            usual=TYPICAL_NODES,
            least=0.0,
        )
        self._ends: dict[Hashable, np.ndarray] = {}  # the last `max_prefix` tokens, int32, -1 where there are fewer
        self._pool: tuple[int, ThreadPoolExecutor] | None = None  # and the process that it belongs to
        self.warm_up()

    def warm_up(self) -> None:
        """Compile the search, or load it from the disk where it was compiled before. Done at construction."""
        self._search(np.full((1, self.max_prefix), -1, np.int32), np.ones(1, np.int64), self._settings)

    @property
    def name(self) -> str:
        return f"{type(self).__name__}({self.datastore.num_tokens} tokens, {id(self.datastore):x})"

    def start(self, request_id: Hashable, prompt: np.ndarray) -> None:
        self._ends[request_id] = np.full(self.max_prefix, -1, np.int32)
        self.observe(request_id, prompt)

    def observe(self, request_id: Hashable, tokens: np.ndarray) -> None:
        end, tokens = self._ends[request_id], tokens[-self.max_prefix :]
        if len(tokens):
            end[: -len(tokens)] = end[len(tokens) :]
            end[-len(tokens) :] = tokens

    def stop(self, request_id: Hashable) -> None:
        self._ends.pop(request_id, None)

    def propose(
        self, request_ids: Sequence[Hashable], max_nodes: Sequence[int], price: LevelPrice | None = None
    ) -> list[DraftTree]:
        """Propose drafts; where a node costs little, also unlikely nodes."""
        if not len(request_ids):
            return []
        least = price.least_probability if self.heeds_prices and price is not None else 0.0
        ends = np.array([self._ends[name] for name in request_ids])
        drafts = self._search(ends, np.array(max_nodes, np.int64), self._settings._replace(least=least))
        return [
            DraftTree.of(*(array[row, :size] for array in drafts[:-1])) if size else DraftTree.empty()
            for row, size in enumerate(drafts.sizes.tolist())
        ]

    def _search(self, ends: np.ndarray, limits: np.ndarray, settings: "_Settings") -> _Drafts:
        num_rows = len(ends)
        shape = num_rows, min(max(0, int(limits.max())), settings.capacity)
        drafts = _Drafts(
            np.empty(shape, np.int64),
            np.empty(shape, np.int64),
            np.empty(shape, np.float32),
            np.empty(shape, np.int64),
            np.empty(num_rows, np.int64),
        )
        num_threads = max(1, min(torch.get_num_threads(), num_rows // _ROWS_PER_THREAD))
        borders = [num_rows * thread // num_threads for thread in range(num_threads + 1)]
        # Threads of Python's, not of numba's: the latter's end the process when two engines draft at once, or after a
        # fork.
        others = [
            self._threads().submit(_propose, self._text, ends, limits, settings, drafts, first, last)
            for first, last in pairwise(borders[1:])
        ]
        _propose(self._text, ends, limits, settings, drafts, 0, borders[1])
        for other in others:
            other.result()
        return drafts

    def _threads(self) -> ThreadPoolExecutor:
        if self._pool is None or self._pool[0] != os.getpid():  # threads do not survive a fork
            self._pool = os.getpid(), ThreadPoolExecutor(thread_name_prefix="datastore")
        return self._pool[1]


def _check_positive(**numbers: int) -> None:
    for name, value in numbers.items():
        if not is_integer(value) or not 1 <= value <= _MAX_NUMBER:
            raise ValueError(f"`{name}` must be an integer in [1, {_MAX_NUMBER}], got {value!r}.")


def _as_datastore(
    datastore: Datastore | str | os.PathLike[str], tokenizer: PreTrainedTokenizerBase | None
) -> Datastore:
    if isinstance(datastore, str | os.PathLike):
        return Datastore.open(datastore, tokenizer)
    if not isinstance(datastore, Datastore):
        raise TypeError(f"`datastore` must be a Datastore or a path, got {type(datastore).__name__}.")
    if tokenizer is not None:
        datastore.check_tokenizer(tokenizer)
    return datastore


# --- Compiled code. A trie is an int32 array with one row per node, in the order of creation; row 0 is the root. -----

_TOKEN, _PARENT, _COUNT, _DEPTH, _LENGTH = range(5)  # the last: of the match
_CHILD, _SIBLING = 5, 6  # first child, next sibling; 0: none
_NUM_FIELDS = 7


@compiled
def _propose(
    text: _Text, ends: np.ndarray, limits: np.ndarray, settings: _Settings, drafts: _Drafts, first: int, last: int
) -> None:
    """Fill the drafts of the rows in [first, last)."""
    trie = np.empty((settings.capacity, _NUM_FIELDS), np.int32)
    order = np.empty(len(trie), np.int32)
    ranges = np.empty((ends.shape[1] + 1, 2), np.int64)
    for row in range(first, last):
        size = _grow_trie(text, ends[row], settings, ranges, trie)
        _select(trie, size, order, limits[row], settings, drafts, row)


@inner
def _grow_trie(text: _Text, end: np.ndarray, settings: _Settings, ranges: np.ndarray, trie: np.ndarray) -> int:
    """Build the trie of one row's continuations and return its number of nodes."""
    trie[0] = 0
    size = 1
    for length in range(_longest_match(text, end, ranges), 0, -1):
        low, high = _range(text, end, length, ranges)
        size, found = _add_continuations(text, low, high, length, settings, trie, size)
        if found >= settings.min_continuations:
            break
    return size


@inner
def _longest_match(text: _Text, end: np.ndarray, ranges: np.ndarray) -> int:
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
def _range(text: _Text, end: np.ndarray, length: int, ranges: np.ndarray) -> tuple[int, int]:
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
    text: _Text, low: int, high: int, length: int, settings: _Settings, trie: np.ndarray, size: int
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
        trie[0, _COUNT] += 1
        node = 0
        for position in range(max(begin, 0), min(begin + settings.branch_len, len(tokens))):
            token = tokens[position]
            if token < 0 or token >= vocab_size:  # the document's border
                break
            node, size = _child(trie, node, token, length, size)
            trie[node, _COUNT] += 1
        found += node > 0
    return size, found


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
    trie: np.ndarray, size: int, order: np.ndarray, limit: int, settings: _Settings, drafts: _Drafts, row: int
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
