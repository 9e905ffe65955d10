"""Files of arrays, written whole or not at all."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from ....files import replacing

Found = TypeVar("Found")


def save_arrays(path: str | Path, **arrays: np.ndarray) -> None:
    """Write a file (`.npz`) that replaces the one before as a whole."""
    with replacing(Path(path), is_private=True) as file:
        np.savez_compressed(file, **arrays)  # type: ignore[arg-type]


def load_arrays(path: str | Path, what: str, read: Callable[[Mapping[str, Any]], Found]) -> Found:
    """
    Return the result of `read` for the arrays of a file.

    Raises:
        ValueError: if it cannot: the file holds no such thing as `what`.
    """
    try:
        with np.load(path, allow_pickle=False) as file:
            return read(file)
    except FileNotFoundError:
        raise
    except Exception as error:
        raise ValueError(f"{path} holds no {what}: {error}") from error
