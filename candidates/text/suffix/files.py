"""Files of suffix trees: a header and arrays, whole and with a check sum."""

import hashlib
import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from ....files import replacing
from ....validate import is_integer

_MAGIC = b"hf-smartspec suffix trees\n"
_VERSION = 1


def packed(header: dict[str, Any], arrays: dict[str, np.ndarray]) -> bytes:
    """Return the contents of a file. The header must be JSON."""
    header = header | {
        "version": _VERSION,
        "arrays": {name: [array.dtype.str, list(array.shape)] for name, array in arrays.items()},
    }
    head = json.dumps(header).encode()
    content = b"".join([len(head).to_bytes(8, "little"), head, *(array.tobytes() for array in arrays.values())])
    return _MAGIC + hashlib.blake2b(content, digest_size=32).digest() + content


def unpacked(data: bytes, name: str) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """
    Return header and arrays of a file's contents.

    Raises:
        ValueError: if it is damaged, of another kind or of another version, with the reason and the file `name`.
    """
    if not data.startswith(_MAGIC):
        raise ValueError(f"{name} holds no suffix trees of this library.")
    digest, content = data[len(_MAGIC) : len(_MAGIC) + 32], data[len(_MAGIC) + 32 :]
    if hashlib.blake2b(content, digest_size=32).digest() != digest:
        raise ValueError(f"{name} is damaged: its check sum is wrong. Build it again.")
    with making_sense(name):
        size = int.from_bytes(content[:8], "little")
        header = json.loads(content[8 : 8 + size])
        version = header["version"]
    if version != _VERSION:
        raise ValueError(f"{name} has format {version!r}, this release reads {_VERSION}. Build it again.")
    with making_sense(name):
        arrays, at = {}, 8 + size
        for key, (dtype, shape) in header["arrays"].items():
            if np.dtype(dtype).kind not in "iuf" or not all(is_integer(size) and size >= 0 for size in shape):
                raise ValueError(f"{key!r} is an array of {dtype!r} of shape {shape!r}.")
            count = math.prod(shape)
            arrays[key] = np.frombuffer(content, dtype, count, at).reshape(shape)
            at += count * np.dtype(dtype).itemsize
        return header, arrays


@contextmanager
def making_sense(name: str) -> Iterator[None]:
    """
    Raise `ValueError` for any error with the contents of a file whose check sum is right, such as one made by hand.
    """
    try:
        yield
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError, OverflowError, SyntaxError) as error:
        reason = error if isinstance(error, ValueError | TypeError) else repr(error)
        raise ValueError(f"{name} is damaged: {reason}") from None


def write(path: str | os.PathLike, header: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
    """Write a file atomically: readers and other writers find the old one or the new one, whole."""
    with replacing(Path(path), is_private=True) as file:
        file.write(packed(header, arrays))


def read(path: str | os.PathLike) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """
    Return header and arrays of a saved file.

    Raises:
        ValueError: as `unpacked`.
    """
    return unpacked(Path(path).read_bytes(), str(path))


def column(arrays: Mapping[str, np.ndarray], name: str, size: int | None = None, below: int = 2**63) -> np.ndarray:
    """
    Return an array of a file: integers in [0, below), of shape `[size]` where a size is given.

    Raises:
        ValueError: if it is none.
    """
    array = arrays[name]
    if array.ndim != 1 or array.dtype.kind not in "iu" or size not in (None, len(array)):
        raise ValueError(f"{name!r} must hold {'' if size is None else size} integers, got {array.dtype}{array.shape}.")
    if len(array) and not 0 <= int(array.min()) <= int(array.max()) < below:
        raise ValueError(f"{name!r} must lie in [0, {below}), got {array.min()} to {array.max()}.")
    return array


def words(header: Mapping[str, Any], name: str) -> list[str]:
    """Return a list of strings of a file's header. Raises `ValueError` if it is none."""
    found = header[name]
    if not isinstance(found, list) or not all(isinstance(word, str) for word in found):
        raise ValueError(f"{name!r} must be a list of strings.")
    return found


def texts_of(arrays: Mapping[str, np.ndarray]) -> list[np.ndarray]:
    """
    Return the texts that `tokens` holds end to end, of the given `lengths`.

    Raises:
        ValueError: if these are no token ids, or of other lengths.
    """
    tokens, lengths = column(arrays, "tokens", below=2**31), column(arrays, "lengths", below=2**31)
    ends = np.cumsum(lengths, dtype=np.int64)
    if (int(ends[-1]) if len(ends) else 0) != len(tokens):
        raise ValueError(f"'lengths' must add up to {len(tokens)} tokens.")
    return np.split(tokens, ends[:-1]) if len(ends) else []
