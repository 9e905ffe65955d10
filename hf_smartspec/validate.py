"""Checks of plain values: bad input is refused before any work starts, with the allowed values named."""

from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any

import numpy as np


def check_seed(seed: Any) -> None:
    """Raise `TypeError` unless `seed` is an integer or a sequence of integers."""
    is_list = isinstance(seed, Sequence) and not isinstance(seed, str)
    if not all(is_integer(value) for value in (seed if is_list else [seed])):
        raise TypeError(f"`seed` must be an integer or a sequence of integers, got {seed!r}.")


def check_positive(name: str, value: Any) -> None:
    """Raise `ValueError` unless `value` is an integer above 0."""
    if not is_integer(value) or value < 1:
        raise ValueError(f"`{name}` must be a positive integer, got {value!r}.")


def check_weights(name: str, weights: Any) -> None:
    """
    Raise `TypeError` unless `weights` is a mapping, and `ValueError` unless its values are finite numbers above 0.
    """
    if not isinstance(weights, Mapping):
        raise TypeError(f"`{name}` must be a mapping, got {type(weights).__name__}.")
    for key, value in weights.items():
        is_number = isinstance(value, int | float | np.number) and not isinstance(value, bool)
        if not is_number or not 0 < value < float("inf"):
            raise ValueError(f"`{name}` must hold finite numbers above 0, got {value!r} for {key!r}.")


def is_integer(value: Any) -> bool:
    """Return whether `value` is an integer, numpy's included; True and False are not."""
    return isinstance(value, Integral) and not isinstance(value, bool)
