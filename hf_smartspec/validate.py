"""Checks of plain values: bad input is refused before any work starts, with the remedy named."""

from collections.abc import Sequence
from numbers import Integral
from typing import Any


def check_seed(seed: Any) -> None:
    """Raises `TypeError` unless `seed` is an integer or a sequence of integers."""
    is_list = isinstance(seed, Sequence) and not isinstance(seed, str)
    if not all(is_integer(value) for value in (seed if is_list else [seed])):
        raise TypeError(f"`seed` must be an integer or a sequence of integers, got {seed!r}.")


def check_positive(name: str, value: Any) -> None:
    """Raises `ValueError` unless `value` is an integer above 0."""
    if not is_integer(value) or value < 1:
        raise ValueError(f"`{name}` must be a positive integer, got {value!r}.")


def is_integer(value: Any) -> bool:
    """Whether `value` is a whole number, numpy's included; True and False are none."""
    return isinstance(value, Integral) and not isinstance(value, bool)
