"""Products of int8 numbers: one scale per row of the weight, one per token, sums that are exact."""

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

_MOST = 127  # of the levels, on both sides of zero
_LEAST_STEP = 1e-30  # so that zeros can be divided by it
_rounds_tokens: ContextVar[bool] = ContextVar("smartspec_rounds_tokens", default=True)
_ROWS = 256  # of a weight, that are in float32 at a time where tokens are not rounded
_PART = 1024  # products, whose sum float32 can hold: 1024 * 127 ** 2 < 2 ** 24


@contextmanager
def unrounded_tokens() -> Iterator[None]:
    """
    Within the context, this thread's products round weights only, not tokens: slow, but last bits of their inputs
    change no more than last bits of their results, so that two ways of computing the same can be compared.
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
        values (`torch.Tensor` of shape `[N, in]`, int8): From -127 to 127.
        steps (`torch.Tensor` of shape `[N, 1]`, float32): One per row.
    """

    values: torch.Tensor
    steps: torch.Tensor


def to_levels(rows: torch.Tensor) -> Levels:
    """Rows `[N, in]` of any floating dtype, each rounded to multiples of its largest absolute value / 127."""
    rows = rows.float()
    largest = torch.maximum(rows.amax(-1, True), rows.amin(-1, True).neg_())
    steps = largest.mul_(1 / _MOST).clamp_min_(_LEAST_STEP)
    return Levels((rows / steps).round_().to(torch.int8), steps)


def int8_linear(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """
    `x @ (weight * scale).T + bias` with the tokens rounded to int8, each by its own largest value. A token's result
    depends on nothing but the token: integers are summed without rounding, in whatever order.

    Args:
        x (`torch.Tensor` of shape `[N, in]`): Of a floating dtype.
        weight (`torch.Tensor` of shape `[out, in]`, int8).
        scale (`torch.Tensor` of shape `[out]`, float32).
        bias (`torch.Tensor` of shape `[out]`, *optional*).

    Returns:
        `torch.Tensor` of shape `[N, out]`, in the dtype of `x`.

    Raises:
        RuntimeError: where `x` is not on the CPU, wants a gradient, or the CPU cannot do this.
    """
    _check(x)
    if not _rounds_tokens.get():
        return _unrounded_linear(x, weight, scale, bias)
    if native.can_multiply(x, weight, scale, bias) and has_right_kernels():
        return native.int8_linear(x, weight, scale, bias)
    return plain_int8_linear(x, weight, scale, bias)


@cache
def has_right_kernels() -> bool:
    """Whether compiled code can be had for this CPU, and gives the numbers of torch's operators."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randint(-127, 128, (7, 36), dtype=torch.int8, generator=generator)
    x, scale = torch.randn(13, 36, generator=generator), torch.rand(7, generator=generator)
    try:
        pairs = [(x[:num], plain_int8_linear(x[:num], weight, scale)) for num in (1, 3, 13)]
        return all([torch.equal(native.int8_linear(lines, weight, scale), expected) for lines, expected in pairs])
    except Exception as error:  # whatever compilers raise
        logger.warning(f"Products in int8 run in torch's own operators: nothing faster can be compiled ({error!r}).")
        return False


def plain_int8_linear(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """The same in torch's own operators: for many tokens, and wherever compiled code cannot run."""
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
    """`int8_linear` of tokens as they are. The weight is widened to float32 a few rows at a time, never as a whole."""
    x_wide = x.float()
    output = torch.cat([linear(x_wide, rows.float()) for rows in weight.split(_ROWS)], dim=-1).mul_(scale)
    if bias is not None:
        output.add_(bias)
    return output.to(x.dtype)


def _sums(values: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """`[N, in]` times `[out, in]`: `[N, out]` int32."""
    if weight.shape[1] == 1:  # where torch's product is wrong
        return values.int() * weight.int().t()
    if not torch_is_exact():
        sums = torch.zeros(len(values), len(weight), dtype=torch.int32)
        for own, factors in zip(values.split(_PART, 1), weight.split(_PART, 1)):
            sums += (own.float() @ factors.float().t()).int()
        return sums
    # The weight comes first: with few tokens, oneDNN is nearly twice as fast this way round.
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
    "nothing can be compiled for it. Run the model in bfloat16 or float32."
)


def has_exact_product() -> bool:
    """Whether sums are exact, and fast: in torch, or in compiled code."""
    return torch_is_exact() or (native.has_kernels() and has_right_kernels())


@cache
def torch_is_exact() -> bool:
    """Whether torch's sums are. On CPUs before VNNI they are not: pairs of products saturate at 16 bits."""
    weight = torch.full((64, 256), _MOST, dtype=torch.int8)
    weight[::2] = -_MOST
    for num_tokens in (1, 3, 16):
        x = torch.full((num_tokens, 256), -_MOST, dtype=torch.int8)
        x[::2] = _MOST
        expected = (weight.long() @ x.long().t()).int()
        if not torch.equal(torch._int_mm(weight, x.t()), expected):
            return False
    return True
