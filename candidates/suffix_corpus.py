"""The outputs that suffix trees remember: namespaces, a bound on memory, removal, saving and loading."""

import hashlib
import json
import os
import tempfile
from collections.abc import Hashable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from .suffix_store import (
    NODES_LIVE,
    NODES_TOP,
    ROW,
    ROWS_LIVE,
    ROWS_TOP,
    free_tree,
    insert,
    new_node,
    new_store,
    num_labels,
    remove,
)

BLOCK = 64  # tokens; texts begin at multiples, so that a position tells its text
_NODE_BYTES, _ROW_BYTES, _TOKEN_BYTES = 32, 4 * ROW, 4
_MARGIN = 1 << 20  # nodes and rows beyond the bound, so that one insertion never runs out: address space, not memory
_MAGIC = b"hf-smartspec suffix trees\n"
_VERSION = 1


class _Output(NamedTuple):
    start: int
    length: int
    namespace: Hashable


class SuffixCorpus:
    """
    Suffix trees of finished outputs, one per namespace, in bounded memory.

    Args:
        max_bytes (`int`): Bound on everything that is kept, running requests included. The outputs that have gone
            unused for longest go first, whole.
        max_depth (`int`): Longest string whose occurrences are counted, in tokens.
    """

    def __init__(self, max_bytes: int, max_depth: int):
        self.max_bytes, self.max_depth = max_bytes, max_depth
        self.outputs: dict[int, _Output] = {}
        self.roots: dict[Hashable, int] = {}
        self._reset()

    def _reset(self) -> None:
        tokens = self.max_bytes // _TOKEN_BYTES + _MARGIN
        self.store = new_store(
            tokens, self.max_bytes // _NODE_BYTES + _MARGIN, 2 * self.max_bytes // _ROW_BYTES + _MARGIN
        )
        self.owners = np.zeros(tokens // BLOCK + 1, np.int32)  # output of every block of text; 0: none that is kept
        self.used = np.zeros(1024, np.int64)  # when each output was of use, by `clock`
        self.clock = 0
        self._next_id = 1
        self._text_top = 0
        self._free_texts: dict[int, list[int]] = {}
        self._text_bytes = 0
        self._retired: list[_Output] = []  # removed, but edges of other outputs' strings still lie in their text

    # Memory

    @property
    def num_bytes(self) -> int:
        """Bytes in use by texts, nodes and their children."""
        heads = self.store.heads
        return int(self._text_bytes + heads[NODES_LIVE] * _NODE_BYTES + heads[ROWS_LIVE] * _ROW_BYTES)

    @property
    def num_tokens(self) -> int:
        """Tokens of the outputs that are kept."""
        return sum(output.length for output in self.outputs.values())

    def has_room(self, num_tokens: int) -> bool:
        """Whether a text of so many tokens can surely be added."""
        heads, margin = self.store.heads, 8 * num_tokens + 4 * self.max_depth
        return (
            self._text_top + num_tokens + 2 * BLOCK < len(self.store.text)
            and heads[NODES_TOP] + margin < len(self.store.nodes)
            and heads[ROWS_TOP] + 2 * margin + _MARGIN // 2 < len(self.store.rows) // ROW
        )

    def allocate(self, num_tokens: int) -> int:
        """Place for a text of up to `num_tokens` tokens and what stands behind it."""
        num_blocks = self._num_blocks(num_tokens)
        self._text_bytes += num_blocks * BLOCK * _TOKEN_BYTES
        free = self._free_texts.get(num_blocks)
        if free:
            return free.pop()
        start = self._text_top
        self._text_top += num_blocks * BLOCK
        return start

    def release(self, start: int, num_tokens: int) -> None:
        num_blocks = self._num_blocks(num_tokens)
        self._text_bytes -= num_blocks * BLOCK * _TOKEN_BYTES
        self.owners[start // BLOCK : start // BLOCK + num_blocks] = 0
        self._free_texts.setdefault(num_blocks, []).append(start)

    @staticmethod
    def _num_blocks(num_tokens: int) -> int:
        blocks = -(-(num_tokens + 2) // BLOCK)
        unit = 1 << max(blocks.bit_length() - 4, 0)  # few distinct sizes, so that freed places fit others
        return -(-blocks // unit) * unit

    # Outputs

    def root(self, namespace: Hashable) -> int:
        """The root of a namespace's tree, which begins empty."""
        if namespace not in self.roots:
            self.roots[namespace] = new_node(self.store, 0, 0)
        return self.roots[namespace]

    def add(self, tokens: np.ndarray, namespace: Hashable) -> int | None:
        """Keeps an output (int32 `[length]`); returns its number, or None if there is no room or nothing to keep."""
        if not len(tokens) or not self.has_room(len(tokens)):
            return None
        number = self._next_id
        self._next_id += 1
        if number == len(self.used):
            self.used = np.concatenate([self.used, np.zeros_like(self.used)])
        start = self.allocate(len(tokens))
        self.owners[start // BLOCK : (start + len(tokens)) // BLOCK + 1] = number
        insert(self.store, self.root(namespace), start, tokens, self.max_depth)
        self.clock += 1
        self.used[number] = self.clock
        self.outputs[number] = _Output(start, len(tokens), namespace)
        self.evict()
        return number if number in self.outputs else None

    def tokens(self, number: int) -> np.ndarray:
        output = self.outputs[number]
        return self.store.text[output.start : output.start + output.length]

    def remove(self, number: int) -> None:
        """Forgets an output. Raises `KeyError` for numbers that are not kept."""
        output = self.outputs.pop(number)
        root, end = self.roots[output.namespace], output.start + output.length
        remove(self.store, root, output.start, end, self.max_depth)
        self.owners[output.start // BLOCK : end // BLOCK + 1] = 0
        self._retire(output)

    def remove_namespace(self, namespace: Hashable) -> None:
        """Forgets all outputs of a namespace."""
        for number in [number for number, output in self.outputs.items() if output.namespace == namespace]:
            output = self.outputs.pop(number)
            self.release(output.start, output.length)
        for output in [output for output in self._retired if output.namespace == namespace]:
            self._retired.remove(output)
            self.release(output.start, output.length)
        if namespace in self.roots:
            free_tree(self.store, self.roots.pop(namespace))

    def _retire(self, output: _Output) -> bool:
        """Gives up the text of a removed output, unless edges still lie in it. Returns whether it could."""
        root = self.roots[output.namespace]
        if num_labels(self.store, root, output.start, output.start + output.length, self.max_depth):
            self._retired.append(output)
            return False
        self.release(output.start, output.length)
        return True

    def evict(self) -> None:
        """Removes outputs, the longest unused first, until the bound holds with a little room to spare."""
        if self.num_bytes <= self.max_bytes:
            return
        for output in self._retired[:8]:
            self._retired.remove(output)
            self._retire(output)
        for number in sorted(self.outputs, key=lambda number: self.used[number]):
            if self.num_bytes <= 0.98 * self.max_bytes:
                return
            self.remove(number)

    def clear(self) -> None:
        """Forgets everything; no request may be running."""
        self.outputs, self.roots = {}, {}
        self._reset()

    # Files

    def save(self, path: str | os.PathLike, header: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
        """
        Writes all outputs, the longest unused first, and further arrays. Namespaces must be strings. The file is
        replaced at once: readers and other writers find the old one or the new one, whole.
        """
        order = sorted(self.outputs, key=lambda number: self.used[number])
        names = [name for name in self.roots if isinstance(name, str)]
        if len(names) < len(self.roots):
            raise ValueError(f"Namespaces must be strings to be saved, got {list(self.roots)!r}.")
        parts: dict[str, np.ndarray] = {
            "lengths": np.array([self.outputs[number].length for number in order], np.int64),
            "namespaces": np.array([names.index(str(self.outputs[number].namespace)) for number in order], np.int32),
            "tokens": np.concatenate([np.zeros(0, np.int32), *(self.tokens(number) for number in order)]),
            **arrays,
        }
        header = header | {
            "version": _VERSION,
            "names": names,
            "arrays": {name: [array.dtype.str, list(array.shape)] for name, array in parts.items()},
        }
        body = b"".join(np.ascontiguousarray(array).tobytes() for array in parts.values())
        head = json.dumps(header).encode()
        size = len(head).to_bytes(8, "little")
        digest = hashlib.blake2b(size + head + body, digest_size=32).digest()
        _replace(Path(path), [_MAGIC, digest, size, head, body])


def read(path: str | os.PathLike) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """
    Header and arrays of a saved file.

    Raises:
        ValueError: if the file is damaged, of another kind or of another version; it says which.
    """
    data = Path(path).read_bytes()
    if not data.startswith(_MAGIC):
        raise ValueError(f"{path} holds no suffix trees of this library.")
    digest, content = data[len(_MAGIC) : len(_MAGIC) + 32], data[len(_MAGIC) + 32 :]
    if hashlib.blake2b(content, digest_size=32).digest() != digest:
        raise ValueError(f"{path} is damaged: its check sum is wrong. Build it again.")
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    if header["version"] != _VERSION:
        raise ValueError(f"{path} has format {header['version']}, this release reads {_VERSION}. Build it again.")
    arrays, at = {}, 8 + size
    for name, (dtype, shape) in header["arrays"].items():
        count = int(np.prod(shape, dtype=np.int64))
        arrays[name] = np.frombuffer(content, dtype, count, at).reshape(shape)
        at += count * np.dtype(dtype).itemsize
    return header, arrays


def split(tokens: np.ndarray, lengths: Iterable[int]) -> Iterable[np.ndarray]:
    """The texts that stand one behind another in `tokens`."""
    at = 0
    for length in lengths:
        yield tokens[at : at + length]
        at += length


def _replace(path: Path, parts: list[bytes]) -> None:
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            file.writelines(parts)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
