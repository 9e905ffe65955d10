"""The order of norms and rotations in attention, found by its own forward on tensors without numbers."""

import copy
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch


class RotationOrder(NamedTuple):
    """
    When attention rotates queries and keys.

    Args:
        rotates (`bool`): Whether it does. Some layers do not (Cohere 2, SmolLM3, EXAONE 4).
        norms_last (`bool`): Whether it normalizes them afterwards (HunYuan), not before.
    """

    rotates: bool
    norms_last: bool


def rotation_order(attention: Any, norm: Any) -> RotationOrder:
    """
    Return when an attention module's forward reads the rotary embeddings that it is given. Its own modules are not
    called. If the forward cannot be tried, it is taken for one that rotates, after norms.

    Args:
        norm (`nn.Module`, *optional*): The module's norm of queries.
    """
    if "position_embeddings" not in inspect.signature(type(attention).forward).parameters:
        return RotationOrder(rotates=True, norms_last=False)
    probe = copy.copy(attention)
    called: list[Any] = []
    probe._modules = {name: _stand_in(module, called) for name, module in attention._modules.items()}
    probe._parameters = {
        name: None if item is None else torch.empty_like(item, device="meta")
        for name, item in attention._parameters.items()
    }
    config = getattr(attention, "config", None)
    if config is not None and not getattr(config, "sub_configs", None):  # else all of these would change
        probe.config = copy.copy(config)
        probe.config._attn_implementation = "eager"
    embeddings = torch.empty(1, 1, 1, device="meta").as_subclass(_Untouchable)
    try:
        type(attention).forward(
            probe,
            hidden_states=torch.empty(1, 1, 1, device="meta"),
            position_embeddings=(embeddings, embeddings),
            attention_mask=None,
        )
    except _ReadError:
        return RotationOrder(rotates=True, norms_last=norm is not None and norm not in called)
    except Exception:  # forwards that need more may fail in any way
        return RotationOrder(rotates=True, norms_last=False)
    return RotationOrder(rotates=False, norms_last=False)


class _ReadError(Exception):
    """Error for rotary embeddings that are read."""


class _Untouchable(torch.Tensor):
    """A tensor with which torch computes nothing."""

    @classmethod
    def __torch_function__(cls, *args: Any, **kwargs: Any) -> Any:
        raise _ReadError


def _stand_in(module: Any, called: list[Any]) -> Callable[[torch.Tensor], torch.Tensor]:
    """
    Return a function whose outputs have the shape of a module's: a linear layer's, or of one that keeps shapes. It adds
    the module to those that were called.
    """
    size = getattr(module, "out_features", None)

    def run(x: torch.Tensor) -> torch.Tensor:
        called.append(module)
        return x if size is None else x.new_empty(*x.shape[:-1], size)

    return run
