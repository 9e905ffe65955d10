"""Scales and soft caps of a model's logits, which its forward applies after its head."""

from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel

from .compat import shared_value


class LogitScaling(NamedTuple):
    """
    Factors and cap, in the order in which they are applied.

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
        config: Any = model.config.get_text_config(decoder=True)
        return cls(
            divisor=float(shared_value(config, "logits_scaling") or 1.0),
            multiplier=float(getattr(model, "logit_scale", None) or 1.0),
            softcap=shared_value(config, "final_logit_softcapping"),
        )

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Return a model's logits, from what its head returns."""
        if self.divisor != 1.0:
            logits = logits / self.divisor
        if self.multiplier != 1.0:
            logits = logits * self.multiplier
        if self.softcap is not None:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        return logits
