"""Products in int8: one scale per group of neighbouring inputs, one for each half of it in tokens, and exact sums."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import NamedTuple

import torch
from torch.nn.functional import linear, pad

from ...log import get_logger
from ..kernels.dots import GROUP, PART, PARTS, SIDE
from ..program import DTYPES
from . import native

logger = get_logger(__name__)

_MOST = 127  # largest level; the lowest is its negative
_LEAST_STEP = 1e-30  # above 0, since groups of zeros are divided by it
_rounds_tokens: ContextVar[bool] = ContextVar("smartspec_rounds_tokens", default=True)
_BLOCKS = 16  # blocks of a weight that are in float32 at a time where tokens are not rounded


@contextmanager
def unrounded_tokens() -> Iterator[None]:
    """
    Within the context, round only weights, not tokens, in this thread's products. That is slow, but last bits of inputs
    then change no more than last bits of results, so that two ways of computing the same can be compared.
    """
    token = _rounds_tokens.set(False)
    try:
        yield
    finally:
        _rounds_tokens.reset(token)


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


def int8_linear(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None, num_outputs: int
) -> torch.Tensor:
    """
    Return the linear map of tokens that are rounded to int8, each part of a group by its own largest value. A token's
    result depends on that token alone: integers are summed without rounding, and groups in their order.

    Args:
        x (`torch.Tensor` of shape `[N, in]`): Tokens, in a floating dtype.
        weight (`torch.Tensor` of shape `[blocks, groups, GROUP // 4, SIDE, 4]`, int8): Levels, from `in_blocks`.
        scale (`torch.Tensor` of shape `[blocks, groups, SIDE]`, float32): One scale per group of an output.
        bias (`torch.Tensor` of shape `[out]`, *optional*): Added to each result.
        num_outputs (`int`): The number of outputs.

    Returns:
        `torch.Tensor` of shape `[N, out]`, in the dtype of `x`.

    Raises:
        RuntimeError: if `x` is not on the CPU or requires a gradient.
    """
    _check(x)
    if not _rounds_tokens.get():
        return _unrounded_linear(x, weight, scale, bias, num_outputs)
    if x.dtype not in DTYPES or (bias is not None and bias.dtype is not x.dtype):  # all is computed in float32 anyway
        wide = None if bias is None else bias.float()
        return int8_linear(x.float(), weight, scale, wide, num_outputs).to(x.dtype)
    if native.can_multiply(x, weight, scale, bias, num_outputs) and has_right_kernels(x.dtype):
        return native.int8_linear(x, weight, scale, bias, num_outputs)
    return plain_int8_linear(x, weight, scale, bias, num_outputs)


@cache
def has_right_kernels(dtype: torch.dtype) -> bool:
    """Return whether code for tokens of this dtype can be compiled, and gives the results of torch's operators."""
    if not native.has_kernels():
        return False
    generator = torch.Generator().manual_seed(0)
    rows, x = (torch.randn(shape, generator=generator, device="cpu") for shape in ((70, 150), (13, 150)))
    weight, scale = in_blocks(to_levels(rows))
    try:
        tokens = [x[:num].to(dtype) for num in (1, 2, 3, 13)]
        pairs = [(lines, plain_int8_linear(lines, weight, scale, None, 70)) for lines in tokens]
        return all([torch.equal(native.int8_linear(own, weight, scale, None, 70), expected) for own, expected in pairs])
    except Exception as error:  # compilers raise errors of many types
        logger.warning(f"Products in int8 run in torch's own operators: no faster code can be compiled ({error!r}).")
        return False


def plain_int8_linear(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None, num_outputs: int
) -> torch.Tensor:
    """Return `int8_linear` by torch's own operators, where compiled code cannot run."""
    values, steps = to_levels(x, PART)
    output = torch.zeros(len(x), weight.shape[0] * SIDE, dtype=torch.float32, device="cpu")
    for group in range(weight.shape[1]):
        factors = weight[:, group].permute(1, 3, 0, 2).reshape(PARTS, PART, -1).float()
        own = zip(factors, range(group * PARTS, (group + 1) * PARTS))
        # Sums in parts are exact: PART * 127 ** 2 < 2 ** 24.
        parts = [(values[:, part].float() @ factor).mul_(steps[:, part, None]) for factor, part in own]
        output += sum(parts[1:], parts[0]) * scale[:, group].flatten()
    output = output[:, :num_outputs]
    return (output if bias is None else output + bias).to(x.dtype)


def _unrounded_linear(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None, num_outputs: int
) -> torch.Tensor:
    """Return `int8_linear` of unrounded tokens. Only a few rows of the weight at a time are widened to float32."""
    wide = pad(x.float(), (0, -x.shape[-1] % GROUP))
    parts = zip(weight.split(_BLOCKS), scale.split(_BLOCKS))
    output = torch.cat([linear(wide, dequantized(*part)) for part in parts], dim=-1)[:, :num_outputs]
    return (output if bias is None else output + bias).to(x.dtype)


def _check(x: torch.Tensor) -> None:
    if x.device.type != "cpu":
        raise RuntimeError(
            f"Models in int8 run on the CPU, got numbers on {x.device}. On a GPU, load the model with a "
            "`quantization_config` of transformers, such as `BitsAndBytesConfig(load_in_8bit=True)`."
        )
    if x.requires_grad and torch.is_grad_enabled():
        raise RuntimeError("Models in int8 have no gradients. Train the model before it is quantized.")
