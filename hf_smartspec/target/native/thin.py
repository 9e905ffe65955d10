"""
The linear map of a few tokens on a CPU. Its time is that of reading the weight, which torch's libraries take up to
twice as long for from two or four tokens on.
"""

import ctypes
from functools import cache

import torch

from .kernels.multiply import FIELDS, multiply_bfloat16, multiply_float32
from .kernels.tiles import num_lanes
from .threads import has_threads, run

_MOST_TOKENS = {torch.float32: 12, torch.bfloat16: 6}  # for more, torch's products are as fast
_CODE = {torch.float32: multiply_float32, torch.bfloat16: multiply_bfloat16}
_SHARE = 2**18  # numbers of a weight that a thread takes at a time
_SMALL = 2**17  # products that one thread is done with before a second one has begun
_ROWS = 12  # a multiple of what tiles have


class _Arguments(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_int64) for name in FIELDS)


@cache
def has_kernels() -> bool:
    """Whether there is compiled code for this CPU, and torch's threads can run it."""
    return num_lanes() > 0 and has_threads()


def can_multiply(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether compiled code computes `linear` of these tokens `[N, in]` faster."""
    return (
        len(x) <= _MOST_TOKENS.get(weight.dtype, 0)
        and x.dtype is weight.dtype
        and weight.device.type == "cpu"
        and not weight.shape[1] % 16
        and weight.is_contiguous()
        and has_kernels()
    )


def thin_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """`linear(x, weight, bias)` where `can_multiply` says so; a token's result does not depend on the others."""
    x = x.contiguous()
    num_tokens, num_inputs = x.shape
    num_outputs, num_threads = len(weight), torch.get_num_threads()
    outputs = torch.empty(num_tokens, num_outputs, dtype=x.dtype)
    arguments = _Arguments(
        0, num_tokens, num_inputs, num_outputs, _share(num_inputs, num_outputs, num_threads),
        weight.data_ptr(), x.data_ptr(), 0 if bias is None else bias.data_ptr(), outputs.data_ptr(),
    )  # fmt: skip
    is_small = num_tokens * num_inputs * num_outputs <= _SMALL
    run(_CODE[x.dtype].address, ctypes.addressof(arguments), 1 if is_small else num_threads)
    return outputs


def _share(num_inputs: int, num_outputs: int, num_threads: int) -> int:
    """How many outputs a thread computes at a time: enough to read memory in one go, a quarter of its part at most."""
    num = min(_SHARE // num_inputs, num_outputs // (4 * num_threads))
    return max(num - num % _ROWS, _ROWS)
