"""Weights in int4: codes from 0 to 15, with a scale and a least weight for each half of a group of inputs."""

import torch
from torch.nn.functional import pad

from ..kernels.dots import GROUP, PART, PARTS, SIDE

MOST = 2**15  # largest absolute value of weights, whose scales are in float16
_MOST_CODE = 15
# Codes that the numbers of a part are spread over: fewer, since numbers may come from files that use fewer, or more, of
# which the lowest and the highest are cut off, since few numbers are far away from the others.
_SPREADS = range(11, 18)
_NUMBERS = 2**18  # that are rounded at a time


def to_codes(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Round a weight's rows to codes as compiled code reads them. Each part of `PART` neighbouring numbers has the scale
    and the least weight with the least sum of squared errors, of those that spread the numbers over different ranges.
    Weights that are such codes already, as those of llama.cpp's Q4_1 are, stay as they are.

    Args:
        rows (`torch.Tensor` of shape `[out, in]`): A weight that passes `check`, in a floating dtype.

    Returns:
        Codes, `[blocks, groups, GROUP // 8, SIDE, 4]` uint8, two in a byte, the lower bits those of the first four of
        eight inputs; and scales and least weights, `[blocks, groups, PARTS, 2, SIDE]` float16.
    """
    num_outputs, num_inputs = rows.shape
    blocks, groups = -(-num_outputs // SIDE), -(-num_inputs // GROUP)
    codes = rows.new_zeros(blocks, groups, GROUP // 8, SIDE, 4, dtype=torch.uint8)
    scales = rows.new_zeros(blocks, groups, PARTS, 2, SIDE, dtype=torch.float16)
    step = SIDE * max(_NUMBERS // (SIDE * groups * GROUP), 1)
    inputs = torch.arange(groups * GROUP, device=rows.device).clamp_(max=num_inputs - 1)
    for begin in range(0, num_outputs, step):
        own, first = rows[begin : begin + step].float(), begin // SIDE
        part = (own[:, inputs] if num_inputs % GROUP else own).unflatten(1, (-1, PART))
        found, scale, least = _rounded(part)
        both = torch.stack([scale, least], -1)
        more, end = -len(part) % SIDE, first - (-len(part) // SIDE)
        pairs = pad(found.flatten(1), (0, 0, 0, more)).view(-1, SIDE, groups, GROUP // 8, 2, 4)
        packed = (pairs[..., 0, :] | pairs[..., 1, :] << 4).permute(0, 2, 3, 1, 4)
        codes[first:end] = packed
        both = pad(both, (0, 0, 0, 0, 0, more)).view(-1, SIDE, groups, PARTS, 2)
        scales[first:end] = both.permute(0, 2, 3, 4, 1)
    return codes, scales


def check(rows: torch.Tensor) -> None:
    """Raise a `ValueError` if a weight is beyond `MOST`, or NaN."""
    if rows.numel() and not (largest := max(abs(end.item()) for end in rows.detach().aminmax())) <= MOST:
        raise ValueError(f"Weights in int4 have scales in float16, and may be {MOST:,} at most, got {largest:,.6g}.")


def _rounded(parts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return codes `[..., PART]` uint8 of parts, and their scales and least weights `[...]` float16."""
    lowest, highest = parts.aminmax(dim=-1, keepdim=True)
    mean = parts.mean(-1)
    best, scale, least = torch.full_like(mean, -1.0), torch.zeros_like(mean), mean
    for spread in _SPREADS:
        cut = max(spread - _MOST_CODE, 0) / 2
        codes = (parts - lowest).mul_(spread / (highest - lowest)).sub_(cut).round_().clamp_(0, _MOST_CODE)
        own_mean = codes.mean(-1)
        codes -= own_mean[..., None]
        variance, covariance = torch.linalg.vecdot(codes, codes), torch.linalg.vecdot(codes, parts)
        explained = covariance.square() / variance  # of the parts' variance, by the best scale and least weight
        is_better = explained > best  # and not where all numbers are equal, so that it is NaN
        best = torch.where(is_better, explained, best)
        own = covariance / variance
        scale = torch.where(is_better, own, scale)
        least = torch.where(is_better, mean - own * own_mean, least)
    scale = scale.half()
    least = torch.where(scale > 0, least, mean).half()
    codes = (parts - least.float()[..., None]).div_(scale.float()[..., None]).nan_to_num_(0, _MOST_CODE, 0)
    return codes.round_().clamp_(0, _MOST_CODE).to(torch.uint8), scale, least


def unpacked(codes: torch.Tensor) -> torch.Tensor:
    """Return codes in blocks as `[blocks, SIDE, groups * GROUP]`, float32."""
    pairs = torch.stack([codes & _MOST_CODE, codes >> 4], 3)
    return pairs.permute(0, 4, 1, 2, 3, 5).flatten(2).float()


def dequantized(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return the rows `[blocks * SIDE, groups * GROUP]`, float32, of a weight in blocks."""
    scale, least = scales.float().permute(3, 0, 4, 1, 2).flatten(3)[..., None]
    return (unpacked(codes).unflatten(2, (-1, PART)) * scale + least).flatten(2).flatten(0, 1)
