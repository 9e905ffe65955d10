"""Whether a model's weights have changed since something was computed with them."""

import weakref
from collections.abc import Iterator
from itertools import chain
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook


class WeightsVersion:
    """
    Args:
        model (`nn.Module`): Its modules, their parameters and what adapters (PEFT's) do are watched; it is not kept.
    """

    def __init__(self, model: torch.nn.Module):
        self._model = weakref.ref(model)
        self._num_steps = 0
        self._collect(model)
        handle = register_optimizer_step_post_hook(_noting(weakref.ref(self)))
        weakref.finalize(self, handle.remove)

    def _collect(self, model: torch.nn.Module) -> None:
        """Walking the modules takes ten times as long as looking at what was found."""
        modules = list(model.modules())
        self._children = [module._modules for module in modules if module._modules]
        self._standing = self._stand()  # held, so that no other module is taken for one of these
        self._owners = [module._parameters for module in modules if module._parameters]
        self._adapted = [module for module in modules if hasattr(module, "merged_adapters")]

    @property
    def number(self) -> int:
        """
        It changes with the weights: by optimizer steps, loading, moving, changes in place; by adapters that are added,
        switched, scaled or merged.
        """
        if self._stand() != self._standing and (model := self._model()) is not None:
            self._collect(model)
        states = [(item.data_ptr(), 0 if item.is_inference() else item._version) for item in self._parameters()]
        return hash((self._num_steps, *map(id, self._standing), *states, *map(_adaptation, self._adapted)))

    def _stand(self) -> list[torch.nn.Module | None]:
        return list(chain.from_iterable(map(dict.values, self._children)))

    def _parameters(self) -> Iterator[torch.Tensor]:
        return (item for owner in self._owners for item in owner.values() if item is not None)

    def note_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Fused optimizers, which transformers' `Trainer` takes by default, write what no tensor's version counts."""
        known = {item.data_ptr() for item in self._parameters()}
        if any(item.data_ptr() in known for group in optimizer.param_groups for item in group["params"]):
            self._num_steps += 1


def _adaptation(layer: Any) -> tuple:
    """Which of a layer's adapters count, and how much. PEFT merges them past the count of a tensor's version."""
    scaling = getattr(layer, "scaling", None)
    factors = str(scaling) if isinstance(scaling, dict) else ""
    is_off, active = getattr(layer, "_disable_adapters", False), str(getattr(layer, "_active_adapter", ""))
    return active, is_off, tuple(layer.merged_adapters), factors


def _noting(reference: "weakref.ref[WeightsVersion]") -> Any:
    """What every optimizer calls after a step; it keeps nothing alive."""

    def note(optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict[str, Any]) -> None:
        if (version := reference()) is not None:
            version.note_step(optimizer)

    return note
