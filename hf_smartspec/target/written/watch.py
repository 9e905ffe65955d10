"""Whether a model is still what its plan was made from: nobody has hooked, replaced or moved what the plan bypasses."""

import weakref
from collections.abc import Sequence
from operator import is_
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torch_modules

_SLEEPING = "transformers.utils.output_capturing"
_SCALARS = (bool, int, float, str, type(None))


class Watch:
    """
    Looks at a few hundred entries of dictionaries, which takes microseconds, since it does so before every forward;
    at what hardly ever changes (numbers in modules, their classes) once per use of a model.

    Args:
        model (`nn.Module`): The whole model.
        modules (sequence of `nn.Module`): Those below it that are bypassed.
    """

    def __init__(self, model: nn.Module, modules: Sequence[nn.Module]):
        every = (model, *modules)
        hooks = [(module._forward_hooks, module._forward_pre_hooks) for module in every]
        self._hooks = [entries for pair in hooks for entries in pair]
        self._attributes = [module.__dict__ for module in every]
        self._modules = [weakref.ref(module) for module in every]
        self._kinds = [type(module) for module in every]
        self._children = [module._modules for module in every]
        children = [(module._modules, name) for module in every for name in module._modules]
        weights = [(module._parameters, name) for module in modules for name in module._parameters]
        self._places: list[tuple[dict[str, Any], str]] = children + weights
        self._contents = [
            weakref.ref(item) if (item := entries[name]) is not None else None for entries, name in self._places
        ]
        tensors = [entries[name] for entries, name in weights if entries[name] is not None]
        self._device_type = next(model.parameters()).device.type
        self._tensors = [weakref.ref(tensor) for tensor in tensors]
        self._quick, self._thorough = self._look(), self._look_closely()

    def _look(self) -> list[Any]:
        tensors = [reference() for reference in self._tensors]
        addresses = [None if tensor is None else tensor.data_ptr() for tensor in tensors]
        return [addresses, [len(children) for children in self._children]]

    def _look_closely(self) -> list[Any]:
        """Numbers that a plan has read, classes and their forwards, and how weights lie in memory."""
        numbers = [_numbers(attributes) for attributes in self._attributes]
        kinds = [(type(reference()), kind.forward) for reference, kind in zip(self._modules, self._kinds)]
        tensors = [reference() for reference in self._tensors]
        return [numbers, kinds, [None if tensor is None else (tensor.stride(), tensor.dtype) for tensor in tensors]]

    def is_bypassable(self) -> bool:
        """Whether calling the modules would do nothing but compute, now."""
        if torch_modules._has_any_global_hook() or any(_does_something(hooks) for hooks in self._hooks if hooks):
            return False
        if any(map(_is_replaced, self._attributes, self._kinds)) or any(map(_drops, self._attributes)):
            return False
        return not torch.is_autocast_enabled(self._device_type)

    def is_unchanged(self, thoroughly: bool = False) -> bool:
        """Whether all modules and weights stand where they stood; what is written to them is seen anyway."""
        contents = [entries.get(name) for entries, name in self._places]
        expected = [None if reference is None else reference() for reference in self._contents]
        if not all(map(is_, contents, expected)) or self._look() != self._quick:
            return False
        return not thoroughly or self._look_closely() == self._thorough


def _numbers(attributes: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in attributes.items() if type(value) in _SCALARS and name != "training"}


def _drops(attributes: dict[str, Any]) -> bool:
    """Whether a module drops something, now."""
    return attributes["training"] and bool(attributes.get("p") or attributes.get("attention_dropout"))


def _does_something(hooks: dict[int, Any]) -> bool:
    """Whether there are others than those that transformers leaves behind, which sleep while nothing is recorded."""
    return any(getattr(hook, "__module__", None) != _SLEEPING for hook in hooks.values())


def _is_replaced(attributes: dict[str, Any], kind: type[nn.Module]) -> bool:
    """Whether a module runs something else than its class does: another function, or what a compiler made of it."""
    own = attributes.get("forward")
    if own is not None and getattr(own, "__func__", None) is not kind.forward:  # it may hold the very same
        return True
    return attributes.get("_compiled_call_impl") is not None
