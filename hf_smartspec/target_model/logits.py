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
        and Granite that hears does not scale them. Of forwards that are not transformers' own, all is taken that the
        config has.
        """
        modules = _around_head(model)
        names = set[str]().union(*(_names_in_forward(type(module)) for module in modules))
        config: Any = model.config.get_text_config(decoder=True)

        def value_of(name: str, entry: str) -> Any:
            own = [getattr(module, name, None) for module in modules]  # Cohere's, which may have changed since
            return next((value for value in own if isinstance(value, int | float)), shared_value(config, entry))

        def values(entries: dict[str, str]) -> list[float]:
            found = [value_of(name, entry) for name, entry in entries.items() if name in names]
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
    """
    Return the names and texts in a kind's forward, in those that it calls by `super`, and in its functions they call;
    all that forwards scale by where one is not transformers' own, since its helpers may be anywhere.
    """
    found: set[str] = set()
    for base in kind.__mro__:
        if "forward" not in vars(base) or base is nn.Module:
            continue
        function = inspect.unwrap(vars(base)["forward"])
        if not getattr(function, "__globals__", {}).get("__name__", "").startswith("transformers."):
            return {*_DIVISORS, *_FACTORS, *_CAPS}
        own = _names_in(function.__code__)
        left = set(own)
        while left:
            called = getattr(kind, left.pop(), None)
            further = _names_in(called.__code__) - own if isinstance(called, FunctionType) else set()
            own |= further
            left |= further
        found |= own
        if "super" not in own:
            break
    return found


def _names_in(code: CodeType) -> set[str]:
    texts = {item for item in code.co_consts if isinstance(item, str)}  # `getattr(config, "...")`
    return texts.union(code.co_names, *(_names_in(item) for item in code.co_consts if isinstance(item, CodeType)))
