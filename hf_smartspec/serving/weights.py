"""Whether a model's weights have changed since something was computed with them."""

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook


class WeightsVersion:
    """
    Args:
        model (`nn.Module`): Its parameters are watched, those that it has now; it is not kept.
    """

    def __init__(self, model: torch.nn.Module):
        # Walking the modules takes ten times as long as what follows.
        self._parameters: Sequence[torch.Tensor] = list(model.parameters())
        self._num_steps = 0
        handle = register_optimizer_step_post_hook(_noting(weakref.ref(self)))
        weakref.finalize(self, handle.remove)

    @property
    def number(self) -> int:
        """It changes with the weights: by optimizer steps, loading, moving, or changes in place."""
        states = [(item.data_ptr(), 0 if item.is_inference() else item._version) for item in self._parameters]
        return hash((self._num_steps, *states))

    def note_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Fused optimizers, which transformers' `Trainer` takes by default, write what no tensor's version counts."""
        known = {item.data_ptr() for item in self._parameters}
        if any(item.data_ptr() in known for group in optimizer.param_groups for item in group["params"]):
            self._num_steps += 1


def _noting(reference: "weakref.ref[WeightsVersion]") -> Any:
    """What every optimizer calls after a step; it keeps nothing alive."""

    def note(optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict[str, Any]) -> None:
        if (version := reference()) is not None:
            version.note_step(optimizer)

    return note
