"""The outputs that suffix trees keep: namespaces, a bound on memory, removal and saving."""

import os
from collections.abc import Hashable
from typing import Any, NamedTuple

import numpy as np

from .files import write
from .kernels.insert import insert
from .kernels.remove import num_labels, remove
from .kernels.store import (
    BLOCK,
    NODE,
    NODES_LIVE,
    NODES_TOP,
    ROW,
    ROWS_LIVE,
    ROWS_TOP,
    clear_store,
    free_tree,
    new_root,
    new_store,
)

_NODE_BYTES, _ROW_BYTES, _TOKEN_BYTES = 4 * NODE, 4 * ROW, 4
_MARGIN = 1 << 20  # nodes and rows beyond the bound, so that one insertion never runs out: address space, not memory
_TYPICAL_BYTES = 64  # per token of a tree, text included
_LARGE = 2**33  # bytes of entries that any machine has addresses for; of more, systems refuse what they lack memory for


class _Output(NamedTuple):
    start: int
    length: int
    namespace: Hashable
    is_served: bool
    line: int  # in `used`, while it is kept


class SuffixCorpus:
    """
    Suffix trees of finished outputs, one per namespace, in bounded memory, which running requests share.

    Args:
        max_bytes (`int`): Bound on texts and trees. Whole outputs go: of the namespace that has most tokens in outputs,
            the one that has gone unused for longest. So no namespace loses an output while another has more of them;
            the texts of running requests cannot go, and count for no namespace.
        max_depth (`int`): Longest string whose occurrences are counted, in tokens.

    Attributes:
        reserved (`int`): Tokens that running requests may still write to places they have.
    """

    def __init__(self, max_bytes: int, max_depth: int):
        self.max_bytes, self.max_depth = max_bytes, max_depth
        tokens = max_bytes // _TOKEN_BYTES + _MARGIN
        row_bytes = max(max_bytes, min(2 * max_bytes, _LARGE))  # twice: for freed blocks of sizes that are not needed
        self.store = new_store(tokens, max_bytes // _NODE_BYTES + _MARGIN, row_bytes // _ROW_BYTES + 2 * _MARGIN)
        blocks = len(self.store.text) // BLOCK
        self.owners = np.zeros(blocks + 1, np.int32)  # line of every block's output; 0: of none that is kept
        self.used = np.zeros(1024, np.int64)  # by line: when the output was of use, by `clock`
        self._free_lines = list(range(len(self.used) - 1, 0, -1))
        self.clock = self.reserved = 0
        self.outputs: dict[int, _Output] = {}
        self.roots: dict[Hashable, int] = {}
        self._next_id = 1
        self.points = np.empty((max_depth + 1) * 2, np.int32)
        self._numbers: dict[Hashable, set[int]] = {}  # by namespace: its outputs, ...
        self._held: dict[Hashable, int] = {}  # ... their tokens, ...
        self._victims: dict[Hashable, list[tuple[int, int]]] = {}  # ... and (when used, output); the next to go is last
        self._retired: list[_Output] = []  # removed, but edges of other outputs' strings still lie in their text
        self._text_top = self._text_blocks = 0  # in blocks: end of what was ever used, and what is in use
        self._most_text = blocks - _MARGIN // BLOCK
        self._free_texts: dict[int, list[int]] = {}  # by number of blocks, where they begin

    # Memory

    @property
    def num_bytes(self) -> int:
        """Bytes in use by texts, nodes and their children."""
        heads, text_bytes = self.store.heads, self._text_blocks * BLOCK * _TOKEN_BYTES
        return int(text_bytes + heads[NODES_LIVE] * _NODE_BYTES + heads[ROWS_LIVE] * _ROW_BYTES)

    @property
    def num_tokens(self) -> int:
        """Number of tokens of the outputs that are kept."""
        return sum(output.length for output in self.outputs.values())

    def make_room(self, *lengths: int) -> bool:
        """
        Remove outputs as far as the bound requires, and return whether texts of so many tokens can be added. The growth
        of the trees is estimated for the bound, and taken at its worst where memory would otherwise be overrun.
        """
        num_tokens, num_blocks = sum(lengths), sum(map(_num_blocks, lengths))
        if _TYPICAL_BYTES * num_tokens > self.max_bytes:
            return False
        self.evict(self.max_bytes - _TYPICAL_BYTES * num_tokens, num_blocks)
        heads, growth = self.store.heads, num_tokens + self.reserved + self.max_depth
        return (
            self.num_bytes + _TYPICAL_BYTES * num_tokens <= self.max_bytes
            and heads[NODES_TOP] + 2 * growth < len(self.store.nodes) // NODE
            and heads[ROWS_TOP] + 12 * growth + _MARGIN // 4 < len(self.store.rows) // ROW
            and self._has_text_room(num_blocks)
        )

    def _has_text_room(self, num_blocks: int) -> bool:
        room = len(self.store.text) // BLOCK - self._text_top
        if num_blocks < room:
            return True
        self._merge_free_texts()
        return any(size >= num_blocks for size, starts in self._free_texts.items() if starts)

    def _merge_free_texts(self) -> None:
        """Merge neighbouring free places."""
        places = sorted((start, size) for size, starts in self._free_texts.items() for start in starts)
        self._free_texts = {}
        merged: list[list[int]] = []
        for start, size in places:
            if merged and sum(merged[-1]) == start:
                merged[-1][1] += size
            else:
                merged.append([start, size])
        for start, size in merged:
            self._free_texts.setdefault(size, []).append(start)

    def allocate(self, num_tokens: int) -> int:
        """Return a place for a text of up to `num_tokens` tokens and the border after it."""
        size = _num_blocks(num_tokens)
        self._text_blocks += size
        if self._free_texts.get(size):
            return self._free_texts[size].pop() * BLOCK
        start = self._text_top
        if start + size < len(self.store.text) // BLOCK:
            self._text_top += size
            return start * BLOCK
        larger = min(other for other, starts in self._free_texts.items() if starts and other >= size)
        start = self._free_texts[larger].pop()
        self._free_texts.setdefault(larger - size, []).append(start + size)
        return start * BLOCK

    def release(self, start: int, num_tokens: int) -> None:
        size, start = _num_blocks(num_tokens), start // BLOCK
        self._text_blocks -= size
        self.owners[start : start + size] = 0
        self._free_texts.setdefault(size, []).append(start)
        if self._text_blocks == 0:  # nothing is left: begin anew, without the gaps of the past
            self._text_top, self._free_texts, self.roots = 0, {}, {}
            clear_store(self.store)

    # Outputs

    def root(self, namespace: Hashable) -> int:
        """Return the root of a namespace's tree, which begins empty."""
        if namespace not in self.roots:
            self.roots[namespace] = new_root(self.store)
        return self.roots[namespace]

    def add(self, tokens: np.ndarray, namespace: Hashable, is_served: bool = False) -> int | None:
        """
        Keep an output (int32 `[length]`), of a request that has ended or given by the caller. Return its number, or
        None if it is empty or there is no room.
        """
        if not len(tokens) or not self.make_room(len(tokens)):
            return None
        number, line = self._next_id, self._take_line()
        self._next_id += 1
        start = self.allocate(len(tokens))
        self.owners[start // BLOCK : (start + len(tokens)) // BLOCK + 1] = line
        insert(self.store, self.root(namespace), start, tokens, self.points)
        self.clock += 1
        self.used[line] = self.clock
        self.outputs[number] = _Output(start, len(tokens), namespace, is_served, line)
        self._numbers.setdefault(namespace, set()).add(number)
        self._held[namespace] = self._held.get(namespace, 0) + len(tokens)
        self.evict(self.max_bytes)
        return number if number in self.outputs else None

    def _take_line(self) -> int:
        if not self._free_lines:
            size = len(self.used)
            self._free_lines = list(range(2 * size - 1, size - 1, -1))
            self.used = np.concatenate([self.used, np.zeros_like(self.used)])
        return self._free_lines.pop()

    def _forget(self, number: int) -> _Output:
        """Remove an output from the lists, but not its text."""
        output = self.outputs.pop(number)
        self._free_lines.append(output.line)
        numbers = self._numbers[output.namespace]
        numbers.remove(number)
        self._held[output.namespace] -= output.length
        if not numbers:
            for known in (self._numbers, self._held, self._victims):
                known.pop(output.namespace, None)
        return output

    def last_use(self, number: int) -> int:
        """Return the time of an output's latest use, by `clock`."""
        return int(self.used[self.outputs[number].line])

    def set_last_use(self, number: int, when: int) -> None:
        self.used[self.outputs[number].line] = when

    def tokens(self, number: int) -> np.ndarray:
        output = self.outputs[number]
        return self.store.text[output.start : output.start + output.length]

    def remove(self, number: int) -> None:
        """Remove an output. Raises `KeyError` for numbers that are not kept."""
        output = self._forget(number)
        root, end = self.roots[output.namespace], output.start + output.length
        remove(self.store, root, output.start, end, self.max_depth)
        self.owners[output.start // BLOCK : end // BLOCK + 1] = 0
        self._retired.append(output)
        self._release_retired(self._retired if not self.outputs else [output, *self._retired[:2]])

    def remove_namespace(self, namespace: Hashable) -> None:
        """Remove all outputs of a namespace."""
        if namespace in self.roots:
            free_tree(self.store, self.roots.pop(namespace))
        for number in list(self._numbers.get(namespace, ())):
            output = self._forget(number)
            self.release(output.start, output.length)
        for output in [output for output in self._retired if output.namespace == namespace]:
            self._retired.remove(output)
            self.release(output.start, output.length)

    def _release_retired(self, outputs: list[_Output]) -> None:
        """Release the texts of removed outputs in which no edges lie any more."""
        for output in list(dict.fromkeys(outputs)):
            end = output.start + output.length
            if not num_labels(self.store, self.roots[output.namespace], output.start, end, self.max_depth):
                self._retired.remove(output)
                self.release(output.start, output.length)

    def evict(self, max_bytes: int, num_blocks: int = 0) -> None:
        """
        Remove outputs until no more than `max_bytes` are in use and texts have `num_blocks` left: in turn from the
        namespace that has most tokens, its longest unused one.
        """
        most_text = self._most_text - num_blocks
        while self.outputs and (self.num_bytes > max_bytes or self._text_blocks > most_text):
            namespace = max(self._held, key=self._held.__getitem__)
            victims = self._victims.get(namespace)
            if not victims:
                order = sorted(((self.last_use(number), number) for number in self._numbers[namespace]), reverse=True)
                victims = self._victims[namespace] = order
            used, number = victims.pop()
            if number in self.outputs and self.last_use(number) == used:  # else it has been of use since, or is gone
                self.remove(number)

    # Files

    def save(self, path: str | os.PathLike, header: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
        """Write all outputs, the oldest first, when they were used, and further arrays. Namespaces must be strings."""
        order = sorted(self.outputs)
        lines = {name: line for line, name in enumerate(self.roots)}
        parts: dict[str, np.ndarray] = {
            "lengths": np.array([self.outputs[number].length for number in order], np.int64),
            "namespaces": np.array([lines[self.outputs[number].namespace] for number in order], np.int32),
            "tokens": np.concatenate([np.zeros(0, np.int32), *(self.tokens(number) for number in order)]),
            "used": np.array([self.last_use(number) for number in order], np.int64),
            **arrays,
        }
        write(path, header | {"names": list(self.roots)}, parts)


def _num_blocks(num_tokens: int) -> int:
    """Return the blocks of a text's place: of few distinct sizes, so that freed places fit others."""
    blocks = -(-(num_tokens + 2) // BLOCK)
    unit = 1 << max(blocks.bit_length() - 4, 0)
    return -(-blocks // unit) * unit
