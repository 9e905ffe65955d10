"""Scales and soft caps of a model's logits, which its forward applies after its head."""

import math
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

from .compat import shared_value
from .forward_code import foreign_code, mentions

# Entries of configs by which forwards change scores, by the names that forwards mention.
_DIVISORS = "logits_scaling", "logits_mup_width_multiplier"  # Granite's; Inkling's, before its head
_FACTORS = "logit_scale", "lm_head_multiplier", "output_multiplier"  # Cohere's, Falcon-H1's, Muse's
# Gemma 2's; Inkling 2's, a module; RecurrentGemma's, xLSTM's
_CAPS = "final_logit_softcapping", "logit_softcap", "logits_soft_cap", "output_logit_soft_cap"
_ENTRIES = {"logit_softcap": "final_logit_softcapping"}  # where they have other names
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
        kinds = [type(module) for module in modules]
        is_own = foreign_code(kinds) is None
        names = set[str]().union(*map(mentions, kinds)) if is_own else {*_DIVISORS, *_FACTORS, *_CAPS}
        config: Any = model.config.get_text_config(decoder=True)

        def value_of(name: str) -> Any:
            own = [getattr(module, name, None) for module in modules]  # Cohere's, which may have changed since
            kept = [value for value in own if isinstance(value, int | float)]
            return kept[0] if kept else shared_value(config, _ENTRIES.get(name, name))

        def values(candidates: tuple[str, ...]) -> list[float]:
            return [float(value) for name in candidates if name in names and (value := value_of(name))]

        divisor, multiplier = (math.prod(values(candidates), start=1.0) for candidates in (_DIVISORS, _FACTORS))
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
