"""Detection of changes to a model after its plan was made: hooked, replaced or moved modules that the plan bypasses."""

import weakref
from collections.abc import Sequence
from itertools import chain
from time import perf_counter
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torch_modules
from torch.utils.hooks import RemovableHandle

from ..compat import shared_value
from ..forward_code import ROTATIONS, mentions, rotation_function
from ..support.dropout import drops, may_drop
from .names import READ, STORED

_SLEEPING = "transformers.utils.output_capturing"
_SCALARS = (bool, int, float, str, type(None))
_OTHERS = {"training", "_attn_implementation"}  # the one is checked before every forward, the other does not matter
_PAUSE = 0.05  # seconds from one look at modules and weights to the next, while the same rows run


class Watch:
    """
    Detector of changes to a model: hooks before every forward; modules and weights before every forward of new rows,
    and twenty times a second, since after a forward none of them is in the processor's cache; what hardly ever changes
    (numbers in modules and configs, classes) once per use of the model. Dictionaries of modules are held while all of
    these modules live.

    Args:
        model (`nn.Module`): The whole model.
        modules (sequence of `nn.Module`): The modules below it that are bypassed.
    """

    num_thorough = 0  # looks of all watches, after each of which no watch waits: what is used anew may be changed anew

    def __init__(self, model: nn.Module, modules: Sequence[nn.Module]):
        every = (model, *modules)
        children = [child for module in every for child in module._modules.values() if child is not None]
        end = _ending(weakref.ref(self))
        self._is_over = False
        self._ends = [weakref.ref(module, end) for module in dict.fromkeys((*every, *children))]
        self._modules = [weakref.ref(module) for module in every]
        self._attributes = [vars(module) for module in every]
        self._droppers = [vars(module) for module in every if may_drop(module)]
        self._children = [module._modules for module in every if module._modules]
        held: list[dict[str, Any]] = [item for one in modules for item in (one._parameters, one._buffers)]
        self._parameters = [item for item in held if item]
        self._names = READ.union(STORED, *(mentions(kind) for kind in set(map(type, every)))) - _OTHERS
        self._device_type = next(model.parameters()).device.type
        self._calm: list[int] | None = None  # numbers of hooks and attributes when last found undisturbed
        # When that was, and when modules and weights were last found unchanged, with `num_thorough` then.
        self._calm_since = self._seen = (-_PAUSE, -1)
        self._quick, self._thorough = self._look(), self._look_closely()

    def end(self) -> None:
        """Drop all references, since a module is gone."""
        self._is_over = True
        for entries in (self._attributes, self._droppers, self._children, self._parameters):
            entries.clear()

    def _look(self) -> tuple[list[int], list[int]]:
        """
        Return the ids of modules and the addresses of weights. Ids are of living modules, or else the watch is over.
        """
        children = list(map(id, chain.from_iterable(map(dict.values, self._children))))
        weights = chain.from_iterable(map(dict.values, self._parameters))
        return children, [tensor.data_ptr() for tensor in weights if tensor is not None]

    def _look_closely(self) -> list[Any]:
        """
        Return the values that the plan reads or the forwards mention, classes and functions, and the layout of weights.
        """
        numbers = [_values(attributes, self._names) for attributes in self._attributes]
        kinds = [type(module) for reference in self._modules if (module := reference()) is not None]
        functions = [
            (getattr(kind, "forward", None), *[rotation_function(kind, name) for name in ROTATIONS])
            for kind in dict.fromkeys(kinds)
        ]
        tensors = [item for item in chain.from_iterable(map(dict.values, self._parameters)) if item is not None]
        return [
            numbers,
            self._configs(),
            kinds,
            functions,
            [(item.shape, item.stride(), item.dtype) for item in tensors],
        ]

    def _configs(self) -> list[dict[str, Any]]:
        configs = {id(config): config for item in self._attributes if (config := item.get("config")) is not None}
        read = [{name: shared_value(config, name) for name in READ} for config in configs.values()]
        return [_values(vars(config) | values, self._names) for config, values in zip(configs.values(), read)]

    def bypassed(self) -> list[nn.Module]:
        """Return the watched modules below the model, as far as they live."""
        return [module for reference in self._modules[1:] if (module := reference()) is not None]

    def is_bypassable(self, thoroughly: bool = False, may_wait: bool = False) -> bool:
        """
        Return whether calling the modules would now do no more than compute. If it `may_wait`, replaced forwards are
        looked for twenty times a second.
        """
        if torch_modules._has_any_global_hook() or torch.is_autocast_enabled(self._device_type):
            return False
        if any([attributes["training"] and drops(attributes) for attributes in self._droppers]):
            return False
        # torch counts hooks as they are registered, and a forward of a module's own is one more attribute.
        known, now = self._calm, (perf_counter(), Watch.num_thorough)
        is_known = known is not None and known[0] == RemovableHandle.next_id
        if may_wait and is_known and _is_recent(self._calm_since, now):
            return True
        present, self._calm_since = [RemovableHandle.next_id, *map(len, self._attributes)], now
        if present == known and not thoroughly:
            return True
        replaced = [attributes for attributes in self._attributes if _may_be_replaced(attributes)]
        is_calm = not any(map(_has_awake_hooks, self._attributes))
        self._calm = present if is_calm and not replaced else None
        return is_calm and not any(map(self._is_replaced, replaced))

    def _is_replaced(self, attributes: dict[str, Any]) -> bool:
        """Return whether a module runs other code than its class's forward: another function, or a compiled one."""
        own = attributes.get("forward")
        index = next(index for index, item in enumerate(self._attributes) if item is attributes)
        usual = getattr(type(self._modules[index]()), "forward", None)
        if own is not None and getattr(own, "__func__", None) is not usual:  # it may be bound to the same function
            return True
        return attributes.get("_compiled_call_impl") is not None

    def has_just_looked(self) -> bool:
        """Return whether modules and weights were found unchanged so lately that the next look may wait."""
        return not self._is_over and _is_recent(self._seen, (perf_counter(), Watch.num_thorough))

    def is_unchanged(self, thoroughly: bool = False, may_wait: bool = False) -> bool:
        """
        Return whether all modules and weights are where they were. Changes to weights in place need no check here:
        weights are read anew, and the owner of copies looks at these. If it `may_wait`, this is looked at twenty times
        a second.
        """
        Watch.num_thorough += thoroughly
        if may_wait and self.has_just_looked():
            return True
        now = perf_counter(), Watch.num_thorough
        is_same = not self._is_over and self._look() == self._quick
        is_same = is_same and (not thoroughly or self._look_closely() == self._thorough)
        self._seen = now if is_same else (-_PAUSE, -1)
        return is_same


def _is_recent(then: tuple[float, int], now: tuple[float, int]) -> bool:
    return now[0] < then[0] + _PAUSE and now[1] == then[1]


def _ending(watch: "weakref.ref[Watch]") -> Any:
    """Return a callback for the end of a module, which does not keep the watch alive."""

    def end(_: Any) -> None:
        if (watched := watch()) is not None:
            watched.end()

    return end


def _values(attributes: dict[str, Any], names: frozenset[str]) -> dict[str, Any]:
    """Return the values under these names that are numbers, strings, lists or tuples."""
    values = {name: attributes[name] for name in attributes.keys() & names}
    return {
        name: tuple(value) if type(value) is list else value
        for name, value in values.items()
        if type(value) in _SCALARS or type(value) in (list, tuple)
    }


def _has_awake_hooks(attributes: dict[str, Any]) -> bool:
    """
    Return whether a user-installed hook is present. Those that transformers leaves installed are inactive while no
    outputs are captured.
    """
    before, after = attributes["_forward_pre_hooks"], attributes["_forward_hooks"]
    if not before and not after:
        return False
    hooks = (*before.values(), *after.values())
    return any(getattr(hook, "__module__", None) != _SLEEPING for hook in hooks)


def _may_be_replaced(attributes: dict[str, Any]) -> bool:
    return "forward" in attributes or "_compiled_call_impl" in attributes
