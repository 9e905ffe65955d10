"""Modules that drop values at random while they are in training."""

from collections.abc import Mapping
from typing import Any

from torch import nn

from ..compat import modules_of

_WORDS = ("drop", "jitter")  # in the names of rates: `attention_dropout`, `layerdrop`, `jitter_noise`


def may_drop(module: nn.Module) -> bool:
    """Return whether a module has a rate at which it drops values, be it 0."""
    return any(map(_is_rate, vars(module)))


def drops(attributes: Mapping[str, Any]) -> bool:
    """Return whether a module with these attributes would drop values in training."""
    return any(type(value) in (int, float) and value > 0 for name, value in attributes.items() if _is_rate(name))


def is_random(model: nn.Module) -> bool:
    """Return whether forwards of a model differ from one another, since some of it is in training and drops values."""
    return any(module.training and drops(vars(module)) for module in modules_of(model))


def _is_rate(name: str) -> bool:
    return name == "p" or any(word in name for word in _WORDS)
