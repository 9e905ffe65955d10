"""Shapes of layouts that share a recording, and the tensors that a recording reads."""

from dataclasses import fields, replace
from typing import Any

import torch

from ..attention.varlen import all_are_right
from ..layout.step_layout import StepLayout


def has_few_shapes(layout: StepLayout) -> bool:
    """Return whether the layout has one rectangle, or none."""
    return len(layout.parts) == 1 or _needs_no_parts(layout)


def _needs_no_parts(layout: StepLayout) -> bool:
    return layout.spans is not None and all_are_right(layout.tokens.device)


# Fields that the device does not read, or that are handled by themselves.
_NO_SHAPE = {"firsts", "columns", "parts", "spans", "_masks", "seen", "seen_nodes", "groups", "on_host"}


def _owners(layout: StepLayout) -> list[Any]:
    """Return the objects whose tensors a recording reads."""
    if layout.spans is None:
        return [layout, *layout.parts]
    return [layout, layout.spans] if _needs_no_parts(layout) else [layout, layout.spans, *layout.parts]


def inputs_of(layout: StepLayout) -> list[torch.Tensor]:
    tensors = [getattr(owner, name) for owner in _owners(layout) for name in owner.sent]
    return [tensor for tensor in tensors if tensor is not None]


def shape_of(layout: StepLayout) -> tuple:
    """Return all fields of the layout, with the shapes of tensors in place of their numbers."""
    values = [
        getattr(owner, field.name)
        for owner in _owners(layout)
        for field in fields(owner)
        if field.name not in _NO_SHAPE
    ]
    return tuple(map(_value, values))


def _value(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return tuple(value.shape)
    if isinstance(value, slice):
        return value.start, value.stop
    return tuple(value) if isinstance(value, list) else value


def copied(layout: StepLayout) -> StepLayout:
    """Return the layout with tensors of its own, without those that a recording must not read."""

    @torch.inference_mode(False)  # inference tensors could not be written to outside inference mode
    def own_of(owner: Any) -> Any:
        tensors = {name: getattr(owner, name) for name in owner.sent}
        return replace(owner, **{name: None if item is None else item.clone() for name, item in tensors.items()})

    owners = {id(owner): own_of(owner) for owner in _owners(layout)}
    result: StepLayout = owners[id(layout)]
    result.spans = owners.get(id(layout.spans))
    result.parts = [owners[id(part)] for part in layout.parts if id(part) in owners]
    result.seen, result.groups = {}, {}
    for part in result.parts:
        part._masks = {}
    return result
