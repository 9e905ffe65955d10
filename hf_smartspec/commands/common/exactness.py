"""Exactness: differences between tokens of two decoders, and the rounding that may explain them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from ...cpu.quantized import is_quantized
from .runs import eos_ids, up_to_end

# Bounds of the tolerance, in units in the last place of the largest logit: sums run in another order in a batch of
# another shape, and every layer adds its own rounding. Measured between one forward and a token-by-token one of random
# Llamas of 8 and 24 layers: 25 and 25 units (float32), 2.1 and 3.8 (bfloat16), 2.4 and 4.2 (float16). In int8,
# a level is the unit; a token that falls to another one changes most levels of all later layers.
_BOUNDS = {"float32": (32, 512), "bfloat16": (2, 16), "float16": (2, 16), "int8": (2, 64)}
_LEVEL = 1 / 127


@dataclass(frozen=True)
class Rounding:
    """Measured rounding of a model."""

    dtype: str  # the model's dtype; "int8" where `hf_smartspec.quantize` has changed it, as tokens are in it
    # Largest difference between the logits of plain decoding and those of one forward over the same text, relative to
    # the largest logit of the position.
    measured: float

    def tolerance(self, largest: float) -> float:
        """Return the difference of two logits of magnitude `largest` that rounding explains: twice the measured one."""
        unit = _LEVEL if self.dtype == "int8" else torch.finfo(getattr(torch, self.dtype)).eps
        low, high = (units * unit for units in _BOUNDS[self.dtype])
        return min(max(2 * self.measured, low), high) * max(largest, 1.0)


@torch.no_grad()
def measure_rounding(
    model: PreTrainedModel, prompts: Sequence[list[int]], tokens: torch.Tensor, logits: torch.Tensor
) -> Rounding:
    """
    Compare the logits of plain decoding with those of one forward over each whole text.

    Args:
        prompts: Token ids, without padding.
        tokens (`torch.Tensor` of shape `[rows, new]`): Tokens that plain decoding generated from them, in one batch.
        logits (`torch.Tensor` of shape `[rows, new, vocab_size]`): Logits from which it picked them.
    """
    measured, ends = 0.0, set(eos_ids(model))
    for prompt, padded, expected in zip(prompts, tokens.tolist(), logits):
        text = torch.tensor(prompt, device=model.device)[None]
        # Padding is never compared; what it amplifies would only hide faults in the text.
        row = torch.tensor(up_to_end(padded, ends), device=model.device)[None]
        expected = expected[: row.shape[1]]
        if model.config.is_encoder_decoder:
            start = torch.full((1, 1), model.generation_config.decoder_start_token_id or 0, device=model.device)
            output = model(input_ids=text, decoder_input_ids=torch.cat([start, row[:, :-1]], dim=1))
        else:
            output = model(input_ids=torch.cat([text, row[:, :-1]], dim=1))
        errors = (output.logits[0, -len(expected) :].float().cpu() - expected).abs().amax(dim=-1)
        measured = max(measured, float((errors / expected.abs().amax(dim=-1).clamp(min=1)).max()))
    dtype = "int8" if is_quantized(model) else str(model.dtype).removeprefix("torch.")
    return Rounding(dtype, measured)


@dataclass(frozen=True)
class Difference:
    """
    The first token of a row that differs from plain decoding's.

    `plain_gap` is the score of plain decoding's token above that of speculation's, both by plain decoding; `own_gap` is
    the reverse, by speculation (in processed scores, noise included; inf where the other token was filtered away; NaN
    where unknown). `logit_error` is the largest difference of the two logits vectors at that position.
    """

    row: int
    position: int
    plain_token: int  # -1: the row has ended
    own_token: int
    plain_gap: float = math.nan
    own_gap: float = math.nan
    logit_error: float = math.nan
    tolerance: float = 0.0

    @property
    def is_tie(self) -> bool:
        """
        Return whether rounding alone explains the difference: nearly equal scores, or a token at the very edge of top-k
        or top-p. Each side must have picked by its own scores; otherwise the pick is wrong, not tied.
        """
        gaps = (self.plain_gap, self.own_gap)
        if any(math.isnan(gap) or gap < -self.tolerance for gap in gaps):
            return False
        return max(gaps) <= self.tolerance or (max(gaps) == math.inf and self.logit_error <= self.tolerance)


def without_padding(tokens: torch.Tensor, ends: Sequence[int]) -> torch.Tensor:
    """
    Replace all tokens after the first of the end-of-sequence ids `ends` with -1 in every row of `[rows, new]`. Their
    number depends on the other rows of the batch.
    """
    is_end = torch.isin(tokens, torch.tensor(list(ends), dtype=tokens.dtype, device=tokens.device))
    return tokens.masked_fill(is_end.cumsum(1) > is_end, -1)


def find_differences(plain: torch.Tensor, own: torch.Tensor) -> list[Difference]:
    """Find the first difference of every row of two `[rows, new]` token tensors; -1 stands after a row's end."""
    width = max(plain.shape[1], own.shape[1])
    plain, own = (torch.nn.functional.pad(item, (0, width - item.shape[1]), value=-1) for item in (plain, own))
    differences = []
    for row, column in enumerate((plain != own).int().argmax(dim=1).tolist() if width else []):
        tokens = int(plain[row, column]), int(own[row, column])
        if tokens[0] != tokens[1]:
            differences.append(Difference(row, column, *tokens))
    return differences
