"""Weights in int8, and tokens: multiples of a step for each group of neighbouring inputs, or for each half of it."""

from typing import NamedTuple

import torch
from torch.nn.functional import pad

from ..kernels.dots import GROUP, SIDE

_MOST = 127  # largest level; the lowest is its negative
_LEAST_STEP = 1e-30  # above 0, since groups of zeros are divided by it


class Levels(NamedTuple):
    """
    Rows of numbers as multiples of the steps of their groups.

    Args:
        values (`torch.Tensor` of shape `[N, groups, size]`, int8): Multiples, from -127 to 127. Zeros fill up the row.
        steps (`torch.Tensor` of shape `[N, groups]`, float32): One step per group.
    """

    values: torch.Tensor
    steps: torch.Tensor


def to_levels(rows: torch.Tensor, size: int = GROUP) -> Levels:
    """
    Round rows `[N, in]` of any floating dtype, each group of `size` numbers to multiples of its largest absolute value
    / 127. Weights have groups of `GROUP`, tokens of `PART`.
    """
    groups = pad(rows.float(), (0, -rows.shape[-1] % GROUP)).unflatten(-1, (-1, size))
    steps = groups.abs().amax(-1).mul_(1 / _MOST).clamp_min_(_LEAST_STEP)
    return Levels((groups / steps[..., None]).round_().to(torch.int8), steps)


def in_blocks(levels: Levels) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Return levels and steps of a weight's rows as compiled code reads them: `[blocks, groups, GROUP // 4, SIDE, 4]` and
    `[blocks, groups, SIDE]`. The last block is filled up with zeros.
    """
    values, steps = levels
    more = -len(values) % SIDE
    values, steps = pad(values, (0, 0, 0, 0, 0, more)), pad(steps, (0, 0, 0, more))
    blocks = values.view(-1, SIDE, values.shape[1], GROUP // 4, 4).permute(0, 2, 3, 1, 4)
    return blocks.contiguous(), steps.view(-1, SIDE, steps.shape[1]).transpose(1, 2).contiguous()


def dequantized(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return the rows `[blocks * SIDE, groups * GROUP]`, float32, of a weight in blocks."""
    rows = weight.permute(0, 3, 1, 2, 4).flatten(3).float() * scale.transpose(1, 2)[..., None]
    return rows.flatten(2).flatten(0, 1)
