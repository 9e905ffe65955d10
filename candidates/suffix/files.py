"""Files of suffix trees: a header and arrays, whole and with a check sum."""

import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from ...files import replacing

_MAGIC = b"hf-smartspec suffix trees\n"
_VERSION = 1


def packed(header: dict[str, Any], arrays: dict[str, np.ndarray]) -> bytes:
    """The contents of a file. The header must be JSON."""
    header = header | {
        "version": _VERSION,
        "arrays": {name: [array.dtype.str, list(array.shape)] for name, array in arrays.items()},
    }
    head = json.dumps(header).encode()
    content = b"".join([len(head).to_bytes(8, "little"), head, *(array.tobytes() for array in arrays.values())])
    return _MAGIC + hashlib.blake2b(content, digest_size=32).digest() + content


def unpacked(data: bytes, name: str) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """
    Header and arrays of a file's contents.

    Raises:
        ValueError: if it is damaged, of another kind or of another version; it says which, of the file `name`.
    """
    if not data.startswith(_MAGIC):
        raise ValueError(f"{name} holds no suffix trees of this library.")
    digest, content = data[len(_MAGIC) : len(_MAGIC) + 32], data[len(_MAGIC) + 32 :]
    if hashlib.blake2b(content, digest_size=32).digest() != digest:
        raise ValueError(f"{name} is damaged: its check sum is wrong. Build it again.")
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    if header["version"] != _VERSION:
        raise ValueError(f"{name} has format {header['version']}, this release reads {_VERSION}. Build it again.")
    arrays, at = {}, 8 + size
    for key, (dtype, shape) in header["arrays"].items():
        count = int(np.prod(shape, dtype=np.int64))
        arrays[key] = np.frombuffer(content, dtype, count, at).reshape(shape)
        at += count * np.dtype(dtype).itemsize
    return header, arrays


def write(path: str | os.PathLike, header: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
    """A file at once: readers and other writers find the old one or the new one, whole."""
    with replacing(Path(path)) as file:
        file.write(packed(header, arrays))


def read(path: str | os.PathLike) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """
    Header and arrays of a saved file.

    Raises:
        ValueError: as `unpacked`.
    """
    return unpacked(Path(path).read_bytes(), str(path))


def split(tokens: np.ndarray, lengths: Iterable[int]) -> Iterable[np.ndarray]:
    """The texts that stand one behind another in `tokens`."""
    at = 0
    for length in lengths:
        yield tokens[at : at + length]
        at += length
