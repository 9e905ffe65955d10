"""Whether a model is still what its plan was made from: nobody has hooked, replaced or moved what the plan bypasses."""

import weakref
from collections.abc import Sequence
from operator import is_
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torch_modules

_SLEEPING = "transformers.utils.output_capturing"


class Watch:
    """
    Looks at a few hundred entries of dictionaries, which takes microseconds, since it does so before every forward.

    Args:
        model (`nn.Module`): The whole model, which is not kept alive.
        modules (sequence of `nn.Module`): Those below it that are bypassed.
        has_dropout (`bool`): Whether they do more in training.
    """

    def __init__(self, model: nn.Module, modules: Sequence[nn.Module], has_dropout: bool):
        self._model, self._has_dropout = weakref.ref(model), has_dropout
        hooks = [(module._forward_hooks, module._forward_pre_hooks) for module in (model, *modules)]
        self._hooks = [entries for pair in hooks for entries in pair]
        # The model itself is not among them: a function of its own may hold on to it.
        self._attributes = [module.__dict__ for module in modules]
        self._kinds = [type(module) for module in modules]
        children = [(module._modules, name) for module in (model, *modules) for name in module._modules]
        weights = [(module._parameters, name) for module in modules for name in module._parameters]
        self._places: list[tuple[dict[str, Any], str]] = children + weights
        self._contents = [entries[name] for entries, name in self._places]
        self._tensors = [tensor for tensor in self._contents if isinstance(tensor, torch.Tensor)]
        self._addresses = self._look()

    def _look(self) -> list[Any]:
        return [tensor.data_ptr() for tensor in self._tensors]

    def is_bypassable(self) -> bool:
        """Whether calling the modules would do nothing but compute, now."""
        if torch_modules._has_any_global_hook() or any(_does_something(hooks) for hooks in self._hooks if hooks):
            return False
        model = self._model()
        if model is None or (self._has_dropout and model.training):
            return False
        if _is_replaced(model.__dict__, type(model)) or any(map(_is_replaced, self._attributes, self._kinds)):
            return False
        return not torch.is_autocast_enabled(self._tensors[0].device.type)

    def is_unchanged(self) -> bool:
        """Whether all modules and weights stand where they stood; what is written to them is seen anyway."""
        contents = [entries.get(name) for entries, name in self._places]
        return all(map(is_, contents, self._contents)) and self._look() == self._addresses


def _does_something(hooks: dict[int, Any]) -> bool:
    """Whether there are others than those that transformers leaves behind, which sleep while nothing is recorded."""
    return any(getattr(hook, "__module__", None) != _SLEEPING for hook in hooks.values())


def _is_replaced(attributes: dict[str, Any], kind: type[nn.Module]) -> bool:
    """Whether a module runs something else than its class does: another function, or what a compiler made of it."""
    own = attributes.get("forward")
    if own is not None and getattr(own, "__func__", None) is not kind.forward:  # it may hold the very same
        return True
    return attributes.get("_compiled_call_impl") is not None
