"""Products of tokens in int8 with weights in int8 or int4: exact sums in parts of groups, which are added in order."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache

import torch
from torch.nn.functional import linear, pad

from ...log import get_logger
from ..kernels.dots import GROUP, PART, PARTS, SIDE
from ..program import DTYPES
from . import codes, levels, native
from .levels import in_blocks, to_levels

logger = get_logger(__name__)

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


def quantized_linear(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None, num_outputs: int
) -> torch.Tensor:
    """
    Return the linear map of tokens that are rounded to int8, each part of a group by its own largest value. A token's
    result depends on that token alone: integers are summed without rounding, and groups in their order.

    Args:
        x (`torch.Tensor` of shape `[N, in]`): Tokens, in a floating dtype.
        weight, scale (`torch.Tensor`): Levels and one scale per group of an output, from `in_blocks`, or codes and
            their scales, from `to_codes`.
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
        return quantized_linear(x.float(), weight, scale, wide, num_outputs).to(x.dtype)
    if native.can_multiply(x, weight, scale, bias, num_outputs) and has_right_kernels(x.dtype):
        return native.quantized_linear(x, weight, scale, bias, num_outputs)
    return plain_quantized_linear(x, weight, scale, bias, num_outputs)


@cache
def has_right_kernels(dtype: torch.dtype) -> bool:
    """Return whether code for tokens of this dtype can be compiled, and gives the results of torch's operators."""
    if not native.has_kernels():
        return False
    generator = torch.Generator().manual_seed(0)
    rows, x = (torch.randn(shape, generator=generator, device="cpu") for shape in ((70, 150), (13, 150)))
    weights = in_blocks(to_levels(rows)), codes.to_codes(rows)
    try:
        tokens = [x[:num].to(dtype) for num in (1, 2, 3, 13)]
        cases = [(lines, *weight, None, 70) for lines in tokens for weight in weights]
        pairs = [(case, plain_quantized_linear(*case)) for case in cases]
        return all([torch.equal(native.quantized_linear(*case), expected) for case, expected in pairs])
    except Exception as error:  # compilers raise errors of many types
        logger.warning(f"Quantized models run in torch's own operators: no faster code can be compiled ({error!r}).")
        return False


def plain_quantized_linear(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None, num_outputs: int
) -> torch.Tensor:
    """Return `quantized_linear` by torch's own operators, where compiled code cannot run."""
    values, steps = to_levels(x, PART)
    add_group = _add_levels if weight.dtype is torch.int8 else _add_codes
    output = torch.zeros(len(x), weight.shape[0] * SIDE, dtype=torch.float32, device="cpu")
    for group in range(weight.shape[1]):
        own = slice(group * PARTS, (group + 1) * PARTS)
        add_group(output, values[:, own].float(), steps[:, own], weight[:, group], scale[:, group])
    output = output[:, :num_outputs]
    return (output if bias is None else output + bias).to(x.dtype)


def _add_levels(
    output: torch.Tensor, values: torch.Tensor, steps: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor
) -> None:
    """Add a group's products with levels. Sums in parts are exact: PART * 127 ** 2 < 2 ** 24."""
    factors = weight.permute(1, 3, 0, 2).reshape(PARTS, PART, -1).float()
    first, *others = ((values[:, part] @ own).mul_(steps[:, part, None]) for part, own in enumerate(factors))
    output += sum(others, first) * scale.flatten()


def _add_codes(
    output: torch.Tensor, values: torch.Tensor, steps: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor
) -> None:
    """Add a group's products with codes, and its sums of levels, part by part."""
    factors = codes.unpacked(weight[:, None]).flatten(0, 1).view(-1, PARTS, PART).permute(1, 2, 0)
    scales = scale.float().permute(1, 2, 0, 3).flatten(2)
    for part, (own, (factor, least)) in enumerate(zip(factors, scales)):
        step = steps[:, part, None]
        output += (values[:, part] @ own).mul_(step) * factor
        output += values[:, part].sum(1, keepdim=True).mul_(step) * least


def dequantized(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return the rows `[blocks * SIDE, groups * GROUP]`, float32, of a weight in blocks, in int8 or int4."""
    return (levels if weight.dtype is torch.int8 else codes).dequantized(weight, scale)


def _unrounded_linear(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None, num_outputs: int
) -> torch.Tensor:
    """Return `quantized_linear` of unrounded tokens. Only a few rows of the weight at a time are widened to float32."""
    wide = pad(x.float(), (0, -x.shape[-1] % GROUP))
    parts = zip(weight.split(_BLOCKS), scale.split(_BLOCKS))
    output = torch.cat([linear(wide, dequantized(*part)) for part in parts], dim=-1)[:, :num_outputs]
    return (output if bias is None else output + bias).to(x.dtype)


def _check(x: torch.Tensor) -> None:
    if x.device.type != "cpu":
        raise RuntimeError(
            f"Quantized models run on the CPU, got numbers on {x.device}. On a GPU, load the model with a "
            "`quantization_config` of transformers, such as `BitsAndBytesConfig(load_in_8bit=True)`."
        )
    if x.requires_grad and torch.is_grad_enabled():
        raise RuntimeError("Quantized models have no gradients. Train the model before it is quantized.")
