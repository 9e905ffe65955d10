"""Recurrences that written-out layers have in place of attention: of which kind a layer's is, and its operators."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from .convolution import ConvolutionPlan, convolution_plan
from .convolution_program import ConvolutionOperators
from .delta import DeltaPlan, delta_plan
from .delta_program import DeltaOperators, StateSpaceOperators
from .state_space import StateSpacePlan, state_space_plan

Recurrence = DeltaPlan | ConvolutionPlan | StateSpacePlan


def recurrence_of(module: Any, dtype: torch.dtype) -> Recurrence | None:
    """Return the plan of a module, without its maps; None if it is of another structure, or not in such a dtype."""
    # Of GPUs, bfloat16 has not been tried out.
    device = next(module.parameters()).device
    if dtype not in ((torch.float32, torch.bfloat16) if device.type == "cpu" else (torch.float32,)):
        return None
    return delta_plan(module) or convolution_plan(module) or state_space_plan(module)


def parts_of(module: Any, plan: Recurrence) -> list[nn.Module]:
    """Return the modules that a plan replaces, beside maps."""
    return [module.conv] if isinstance(plan, ConvolutionPlan) else [module.conv1d, module.norm]


def operators_of(layers: Sequence[Any]) -> DeltaOperators | StateSpaceOperators | ConvolutionOperators:
    """Return the writer of the operators of these layers' recurrences, which are of one kind."""
    kinds = {type(layer.recurrence) for layer in layers}
    if ConvolutionPlan in kinds:
        return ConvolutionOperators()
    return StateSpaceOperators() if StateSpacePlan in kinds else DeltaOperators()


def in_common(recurrence: Recurrence | None) -> bool:
    """Return whether a recurrence's maps write to memory that all layers use."""
    return isinstance(recurrence, ConvolutionPlan) or (isinstance(recurrence, DeltaPlan) and recurrence.is_by_head)
