"""Scales and soft caps of a model's logits, which its forward applies after its head."""

import inspect
import math
from types import CodeType, FunctionType
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

from .compat import shared_value

# Entries of configs by which forwards change scores, by the name that a forward mentions.
_DIVISORS = {
    "logits_scaling": "logits_scaling",  # Granite's
    "logits_mup_width_multiplier": "logits_mup_width_multiplier",  # Inkling's, before its head
}
_FACTORS = {
    "logit_scale": "logit_scale",  # Cohere's
    "lm_head_multiplier": "lm_head_multiplier",  # Falcon-H1's
    "output_multiplier": "output_multiplier",  # Muse's
}
_CAPS = {
    "final_logit_softcapping": "final_logit_softcapping",  # Gemma 2's
    "logit_softcap": "final_logit_softcapping",  # Inkling 2's, a module
    "logits_soft_cap": "logits_soft_cap",  # RecurrentGemma's
    "output_logit_soft_cap": "output_logit_soft_cap",  # xLSTM's
}
_MULTIPLYING = {"hyperclovax"}  # types of models that multiply by `logits_scaling`


class LogitScaling(NamedTuple):
    """
    Factors and cap, in the order in which they are applied. Tokens that a forward takes out afterwards (Chameleon's
    images, Inkling's padding) stay in.

    Args:
        divisor (`float`): Granite's `logits_scaling`.
        multiplier (`float`): Cohere's `logit_scale`.
        softcap (`float`, *optional*): Gemma 2's `final_logit_softcapping`.
    """

    divisor: float = 1.0
    multiplier: float = 1.0
    softcap: float | None = None

    @classmethod
    def of(cls, model: PreTrainedModel) -> "LogitScaling":
        """
        Return what the model's forward applies. Its config may have more: Gemma 3 with images does not cap its scores,
        and Granite that hears does not scale them.
        """
        names = set[str]().union(*(_names_in_forward(type(module)) for module in _around_head(model)))
        config: Any = model.config.get_text_config(decoder=True)

        def values(entries: dict[str, str]) -> list[float]:
            found = [shared_value(config, entry) for name, entry in entries.items() if name in names]
            return [float(value) for value in found if value]

        divisor, multiplier = (math.prod(values(entries), start=1.0) for entries in (_DIVISORS, _FACTORS))
        if config.model_type in _MULTIPLYING:
            divisor, multiplier = 1.0, divisor
        return cls(divisor, multiplier, next(iter(values(_CAPS)), None))

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Return a model's logits, from what its head returns."""
        if self.divisor != 1.0:
            logits = logits / self.divisor
        if self.multiplier != 1.0:
            logits = logits * self.multiplier
        if self.softcap is not None:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        return logits


def _around_head(model: PreTrainedModel) -> list[nn.Module]:
    """Return the modules that contain the model's head, the model first."""
    head: Any = model.get_output_embeddings()
    path = next((name for name, module in model.named_modules() if module is head), "").split(".")
    return [model.get_submodule(".".join(path[:depth])) for depth in range(len(path))]


def _names_in_forward(kind: type[nn.Module]) -> set[str]:
    """Return the names and texts in a kind's forward, in those that it overrides, and in its functions they call."""
    found: set[str] = set()
    left = [vars(base)["forward"] for base in kind.__mro__ if "forward" in vars(base)]
    while left:
        names = _names_in(getattr(inspect.unwrap(left.pop()), "__code__", None)) - found
        found |= names
        left += [item for name in names if isinstance(item := getattr(kind, name, None), FunctionType)]
    return found


def _names_in(code: CodeType | None) -> set[str]:
    if code is None:
        return set()
    texts = {item for item in code.co_consts if isinstance(item, str)}  # `getattr(config, "...")`
    return texts.union(code.co_names, *(_names_in(item) for item in code.co_consts if isinstance(item, CodeType)))
