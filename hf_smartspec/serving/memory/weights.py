"""Detect changes of a model's weights, after which cached keys and values are invalid."""

import weakref
from collections.abc import Iterator
from itertools import chain
from time import perf_counter
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

_PAUSE = 0.05  # seconds from one look at the weights to the next, while the same requests run


class WeightsVersion:
    """
    Version number of a model's weights.

    Args:
        model (`nn.Module`): The model, whose modules, parameters and adapters (PEFT's) are watched. No reference to it
            is kept.
    """

    def __init__(self, model: torch.nn.Module):
        self._model = weakref.ref(model)
        self._num_steps = 0
        self._latest = -1, 0.0, 0  # optimizer steps, time and number of the latest look
        self._collect(model)
        handle = register_optimizer_step_post_hook(_step_hook(weakref.ref(self)))
        weakref.finalize(self, handle.remove)

    def _collect(self, model: torch.nn.Module) -> None:
        """Collect the modules once, since walking them takes ten times as long as checking the collected ones."""
        modules = list(model.modules())
        self._children = [module._modules for module in modules if module._modules]
        self._modules = self._current_modules()  # references, so that no new module gets the id of one of these
        self._owners = [module._parameters for module in modules if module._parameters]
        self._adapted = [module for module in modules if hasattr(module, "merged_adapters")]

    @property
    def number(self) -> int:
        """
        Return a number that changes with the weights: by optimizer steps, loading, moving, changes in place, and by
        adapters that are added, switched, scaled or merged.
        """
        if self._current_modules() != self._modules and (model := self._model()) is not None:
            self._collect(model)
        states = [(item.data_ptr(), 0 if item.is_inference() else item._version) for item in self._parameters()]
        return hash((self._num_steps, *map(id, self._modules), *states, *map(_adaptation, self._adapted)))

    def look(self, may_wait: bool) -> int:
        """
        Return `number`; if it `may_wait`, as it was up to 50 ms ago, unless an optimizer has stepped. Reading it
        touches every weight.
        """
        now = perf_counter()
        if not may_wait or self._num_steps != self._latest[0] or now >= self._latest[1] + _PAUSE:
            self._latest = self._num_steps, now, self.number
        return self._latest[2]

    def _current_modules(self) -> list[torch.nn.Module | None]:
        return list(chain.from_iterable(map(dict.values, self._children)))

    def _parameters(self) -> Iterator[torch.Tensor]:
        return (item for owner in self._owners for item in owner.values() if item is not None)

    def note_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Count an optimizer step, since fused optimizers (`Trainer`'s default) do not change tensor versions."""
        known = {item.data_ptr() for item in self._parameters()}
        if any(item.data_ptr() in known for group in optimizer.param_groups for item in group["params"]):
            self._num_steps += 1


def _adaptation(layer: Any) -> tuple:
    """Return the state of a layer's adapters: PEFT merges them without a change of tensor versions."""
    scaling = getattr(layer, "scaling", None)
    factors = str(scaling) if isinstance(scaling, dict) else ""
    is_off, active = getattr(layer, "_disable_adapters", False), str(getattr(layer, "_active_adapter", ""))
    return active, is_off, tuple(layer.merged_adapters), factors


def _step_hook(reference: "weakref.ref[WeightsVersion]") -> Any:
    """Return a hook for optimizer steps that keeps no reference to the version."""

    def note(optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict[str, Any]) -> None:
        if (version := reference()) is not None:
            version.note_step(optimizer)

    return note
