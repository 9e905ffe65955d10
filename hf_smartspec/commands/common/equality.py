"""Differences between the tokens of speculation and those of plain `generate`."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch


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
