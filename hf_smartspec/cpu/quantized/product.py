"""Products in int8: one scale per row of the weight, one per token, exact sums."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import NamedTuple

import torch
from torch.nn.functional import linear

from ...log import get_logger
from . import native

logger = get_logger(__name__)

_MOST = 127  # largest level; the lowest is its negative
_LEAST_STEP = 1e-30  # above 0, since tokens of zeros are divided by it
_rounds_tokens: ContextVar[bool] = ContextVar("smartspec_rounds_tokens", default=True)
_ROWS = 256  # rows of a weight that are in float32 at a time where tokens are not rounded
_PART = 1024  # products whose sum is exact in float32: 1024 * 127 ** 2 < 2 ** 24


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
    Rows of numbers as multiples of a step.

    Args:
        values (`torch.Tensor` of shape `[N, in]`, int8): Multiples, from -127 to 127.
        steps (`torch.Tensor` of shape `[N, 1]`, float32): One step per row.
    """

    values: torch.Tensor
    steps: torch.Tensor


def to_levels(rows: torch.Tensor) -> Levels:
    """Round rows `[N, in]` of any floating dtype, each to multiples of its largest absolute value / 127."""
    rows = rows.float()
    largest = torch.maximum(rows.amax(-1, True), rows.amin(-1, True).neg_())
    steps = largest.mul_(1 / _MOST).clamp_min_(_LEAST_STEP)
    return Levels((rows / steps).round_().to(torch.int8), steps)


def int8_linear(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """
    Return `x @ (weight * scale).T + bias` with the tokens rounded to int8, each by its own largest value. A token's
    result depends on that token alone: integers are summed without rounding, so their order does not matter.

    Args:
        x (`torch.Tensor` of shape `[N, in]`): Tokens, in a floating dtype.
        weight (`torch.Tensor` of shape `[out, in]`, int8): Levels of the weight.
        scale (`torch.Tensor` of shape `[out]`, float32): One scale per output.
        bias (`torch.Tensor` of shape `[out]`, *optional*): Added to each result.

    Returns:
        `torch.Tensor` of shape `[N, out]`, in the dtype of `x`.

    Raises:
        RuntimeError: if `x` is not on the CPU or requires a gradient, or if the CPU has no exact int8 product.
    """
    _check(x)
    if not _rounds_tokens.get():
        return _unrounded_linear(x, weight, scale, bias)
    if native.can_multiply(x, weight, scale, bias) and has_right_kernels():
        return native.int8_linear(x, weight, scale, bias)
    return plain_int8_linear(x, weight, scale, bias)


@cache
def has_right_kernels() -> bool:
    """Return whether code can be compiled for this CPU, and gives the results of torch's operators."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randint(-127, 128, (7, 36), dtype=torch.int8, generator=generator)
    x, scale = torch.randn(13, 36, generator=generator), torch.rand(7, generator=generator)
    try:
        pairs = [(x[:num], plain_int8_linear(x[:num], weight, scale)) for num in (1, 3, 13)]
        return all([torch.equal(native.int8_linear(lines, weight, scale), expected) for lines, expected in pairs])
    except Exception as error:  # compilers raise errors of many types
        logger.warning(f"Products in int8 run in torch's own operators: no faster code can be compiled ({error!r}).")
        return False


def plain_int8_linear(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Return `int8_linear` by torch's own operators: for many tokens, and where compiled code cannot run."""
    if not len(x):
        return x.new_empty(0, len(weight))
    values, steps = to_levels(x)
    output = torch.empty(len(x), len(weight))
    torch.mul(_sums(values, weight), scale, out=output)
    output.mul_(steps)
    if bias is not None:
        output.add_(bias)
    return output.to(x.dtype)


def _unrounded_linear(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """Return `int8_linear` of unrounded tokens. Only a few rows of the weight at a time are widened to float32."""
    x_wide = x.float()
    output = torch.cat([linear(x_wide, rows.float()) for rows in weight.split(_ROWS)], dim=-1).mul_(scale)
    if bias is not None:
        output.add_(bias)
    return output.to(x.dtype)


def _sums(values: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return the product of `[N, in]` and `[out, in]` as `[N, out]` int32."""
    if weight.shape[1] == 1:  # torch's product is wrong for a single input
        return values.int() * weight.int().t()
    if not torch_is_exact():
        sums = torch.zeros(len(values), len(weight), dtype=torch.int32)
        for own, factors in zip(values.split(_PART, 1), weight.split(_PART, 1)):
            sums += (own.float() @ factors.float().t()).int()
        return sums
    # The weight comes first: with few tokens, oneDNN is nearly twice as fast in this order.
    return torch._int_mm(weight, values.t()).t()


def _check(x: torch.Tensor) -> None:
    if x.device.type != "cpu":
        raise RuntimeError(
            f"Models in int8 run on the CPU, got numbers on {x.device}. On a GPU, load the model with a "
            "`quantization_config` of transformers, such as `BitsAndBytesConfig(load_in_8bit=True)`."
        )
    if x.requires_grad and torch.is_grad_enabled():
        raise RuntimeError("Models in int8 have no gradients. Train the model before it is quantized.")
    if not has_exact_product():
        raise RuntimeError(NO_PRODUCT)


NO_PRODUCT = (
    "This CPU has no instructions for exact sums of int8 products (AVX2, AVX512-VNNI, AVX-VNNI, AMX or the like), or "
    "no code can be compiled for it. Run the model in bfloat16 or float32."
)


def has_exact_product() -> bool:
    """Return whether sums are exact and fast: in torch, or in compiled code."""
    return torch_is_exact() or (native.has_kernels() and has_right_kernels())


@cache
def torch_is_exact() -> bool:
    """
    Return whether torch's sums are exact. On CPUs before VNNI they are not: pairs of products saturate at 16 bits.
    """
    weight = torch.full((64, 256), _MOST, dtype=torch.int8)
    weight[::2] = -_MOST
    for num_tokens in (1, 3, 16):
        x = torch.full((num_tokens, 256), -_MOST, dtype=torch.int8)
        x[::2] = _MOST
        expected = (weight.long() @ x.long().t()).int()
        if not torch.equal(torch._int_mm(weight, x.t()), expected):
            return False
    return True
