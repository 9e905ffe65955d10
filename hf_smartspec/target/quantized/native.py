"""The linear map of a few tokens in two calls of compiled code: one rounds the tokens, the other does the rest."""

import ctypes
from functools import cache

import torch

from .kernels.arguments import BFLOAT16, FIELDS, FLOAT16, FLOAT32
from .kernels.dots import LINE, widest
from .kernels.levels import to_levels
from .kernels.multiply import ROWS, multiply
from .threads import has_threads, run

_MOST_TOKENS = 32  # for more, torch's product is faster
_KINDS = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16, torch.float16: FLOAT16}
_SHARE = 2**18  # bytes of a weight that a thread takes at a time
_SMALL = 2**17  # products that one thread is done with before a second one has begun
_FEW = 2**13  # numbers that it has rounded by then


class _Arguments(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_int64) for name in FIELDS)


@cache
def has_kernels() -> bool:
    """Whether there is compiled code for this CPU, and torch's threads can run it."""
    return widest() > 0 and has_threads()


def can_multiply(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None = None) -> bool:
    """Whether compiled code is faster for these, and can read them as they lie in memory."""
    return (
        0 < len(x) <= _MOST_TOKENS
        and type(x) is torch.Tensor
        and x.dtype in _KINDS
        and x.shape[1] == weight.shape[1]
        and weight.is_cpu
        and weight.dtype == torch.int8
        and weight.is_contiguous()
        and scale.dtype == torch.float32
        and (bias is None or bias.dtype in _KINDS)
        and has_kernels()
        and not torch.compiler.is_compiling()
    )


def int8_linear(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """What `product.plain_int8_linear` gives, bit by bit, where `can_multiply` says so."""
    x = x.contiguous()
    num_tokens, num_inputs = x.shape
    num_outputs, num_threads = len(weight), torch.get_num_threads()
    outputs = torch.empty(num_tokens, num_outputs, dtype=x.dtype)
    line = -(-num_inputs // LINE) * LINE
    memory = torch.empty(num_tokens * (line + 8), dtype=torch.int8)  # levels, steps, offsets
    levels = memory.data_ptr()
    steps = levels + num_tokens * line
    arguments = _Arguments(
        num_tokens=num_tokens, num_inputs=num_inputs, num_outputs=num_outputs,
        share=_share(num_inputs, num_outputs, num_threads),
        tokens=x.data_ptr(), outputs=outputs.data_ptr(), kind=_KINDS[x.dtype], scales=scale.data_ptr(),
        weight=weight.data_ptr(), levels=levels, steps=steps, offsets=steps + 4 * num_tokens,
    )  # fmt: skip
    if bias is not None:
        arguments.bias, arguments.bias_kind = bias.data_ptr(), _KINDS[bias.dtype]
    address = ctypes.addressof(arguments)
    run(to_levels.address, address, num_threads if num_tokens > 1 and x.numel() > _FEW else 1)
    arguments.next = 0
    run(multiply.address, address, num_threads if num_tokens * weight.numel() > _SMALL else 1)
    return outputs


def _share(num_inputs: int, num_outputs: int, num_threads: int) -> int:
    """How many outputs a thread computes at a time: enough to read memory in one go, a quarter of its part at most."""
    num = min(_SHARE // num_inputs, num_outputs // (4 * num_threads))
    return max(num - num % ROWS, ROWS)
