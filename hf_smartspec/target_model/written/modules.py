"""Modules and parameters of a model, by where they are."""

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import nn


def dropouts(modules: Iterable[nn.Module]) -> list[nn.Module]:
    return [module for module in modules if isinstance(module, nn.Dropout)]


def but_dropouts(module: nn.Module) -> list[nn.Module]:
    return [child for child in module.children() if not isinstance(child, nn.Dropout)]


def path(model: nn.Module, decoder: nn.Module) -> list[nn.Module]:
    """Return the modules between a model and its decoder."""
    return [module for module in model.modules() if module not in (model, decoder) and decoder in module.modules()]


def own_parameters(modules: Sequence[nn.Module]) -> Iterator[torch.Tensor]:
    """Yield the parameters that modules with children have themselves (scales, sinks, ...)."""
    for module in modules:
        if module._modules:
            yield from (parameter for parameter in module._parameters.values() if parameter is not None)
