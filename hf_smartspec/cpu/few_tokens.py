"""
The linear layer of a few tokens on a CPU, in the time of reading the weight. torch's libraries take longer from two or
four tokens on; in bfloat16 on CPUs without AMX, and in float32 on AMD's, they do so for any number.
"""

import os
from functools import cache

import torch
from torch.nn.functional import linear

from ..jit.writing import cpu_features, cpu_name
from ..log import get_logger
from .kernels.multiply import MANY, NARROW_TOKENS, part_rows, scratch_size, tokens_at_once
from .kernels.program import MULTIPLY, WIDE_MULTIPLY
from .kernels.vectors import num_lanes
from .program import DTYPES, run_operator
from .tensor_checks import is_plain, is_vector
from .threads import has_threads, share_of

logger = get_logger(__name__)

SMALL = 2**17  # products that one thread has computed before a second one has begun
ROWS = 12  # a multiple of the rows of tiles
_SWITCH = "HF_SMARTSPEC_REPRODUCIBLE"
_FEW, _SOME, _MANY, ANY = 6, 64, 256, 2**16  # tokens
_HAS_MKL = torch.backends.mkl.is_available()
_MOST_TRANSPOSED = 32  # tokens in float32; in bfloat16 half as many
_LARGE = 2**20  # entries of a weight


def product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Return `linear(x, weight, bias)` of tokens `[N, in]`; few tokens on a CPU by the product that is fastest."""
    if can_multiply(x, weight, bias):
        return few_token_linear(x, weight, bias)
    if len(x) == 1 and weight.dtype == torch.bfloat16 and weight.device.type == "cpu":
        # oneDNN's product takes 1.2 to 1.6 times as long for a single line.
        line = torch.mv(weight, x[0]) if bias is None else torch.addmv(bias, weight, x[0])
        return line[None]
    if not _is_transposed_faster(len(x), weight):
        return linear(x, weight, bias)
    if bias is None:
        return torch.mm(weight, x.t()).t().contiguous()
    return torch.addmm(bias[:, None], weight, x.t()).t().contiguous()


def _is_transposed_faster(num_tokens: int, weight: torch.Tensor) -> bool:
    """
    Return whether the transposed product is faster, as measured with MKL and oneDNN, whose products of a few lines by a
    large matrix are slower than the reverse.
    """
    if weight.device.type != "cpu" or num_tokens > _MOST_TRANSPOSED or not _HAS_MKL:
        return False
    if weight.dtype == torch.float32:
        return num_tokens >= (4 if weight.numel() >= _LARGE else 6)
    return weight.dtype == torch.bfloat16 and 2 <= num_tokens <= _MOST_TRANSPOSED // 2


@cache
def has_kernels(dtype: torch.dtype) -> bool:
    """Return whether there is compiled code for this CPU, torch's threads can run it, and its results are right."""
    if dtype not in DTYPES or not num_lanes() or not has_threads():
        return False
    try:
        generator, shapes = torch.Generator().manual_seed(0), ((5, 32), (7, 32), (7,))
        x, weight, bias = (torch.randn(shape, generator=generator, device="cpu").to(dtype) for shape in shapes)
        found = torch.cat([few_token_linear(x, weight, bias), few_token_linear(x[:NARROW_TOKENS], weight, bias)])
        expected = linear(x.float(), weight.float(), bias.float())
        expected = torch.cat([expected, expected[:NARROW_TOKENS]])
        return torch.allclose(found.float(), expected, rtol=1e-5 if dtype is torch.float32 else 1e-2, atol=1e-4)
    except Exception as error:  # compilers raise errors of many types
        logger.warning(
            f"Products of few tokens run in torch's own operators: no faster code can be compiled ({error!r})."
        )
        return False


@cache
def most_tokens(dtype: torch.dtype) -> int:
    """Return the number of tokens up to which compiled code is faster than torch; 0 where there is no such code."""
    return _most_tokens(dtype) if has_kernels(dtype) else 0


def _most_tokens(dtype: torch.dtype) -> int:
    """
    Return the measured limit; for more tokens, torch's products are as fast. In bfloat16 there is none where compiled
    products of many tokens take about as long, or where `HF_SMARTSPEC_REPRODUCIBLE=1` is set in the environment: a
    token's sums are then the same whatever is computed beside it.
    """
    if num_lanes() == 8:
        return _MANY if dtype is torch.float32 else ANY
    if dtype is torch.float32:  # MKL does not use AVX-512 on AMD's CPUs
        return ANY if cpu_name().startswith("znver") else _SOME
    has_tiles = "+amx-bf16" in cpu_features()
    return ANY if not has_tiles or os.environ.get(_SWITCH) == "1" else _FEW


def can_multiply(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> bool:
    """Return whether compiled code is faster for `linear` of tokens `[N, in]`, and can read the tensors as they lie."""
    num_tokens, num_inputs = x.shape
    return (
        is_plain(x)
        and weight.is_cpu
        and x.dtype is weight.dtype
        and 0 < num_tokens <= most_tokens(weight.dtype)
        and num_inputs == weight.shape[1] > 0
        and not num_inputs % 16
        and weight.is_contiguous()
        and (bias is None or (bias.dtype is weight.dtype and is_vector(bias, weight.shape[0])))
        and not (
            torch.is_grad_enabled() and any([item.requires_grad for item in (x, weight, bias) if item is not None])
        )
    )


def few_token_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, packed: torch.Tensor | None = None
) -> torch.Tensor:
    """
    Return `linear(x, weight, bias)` for arguments that pass `can_multiply`, and perhaps the `packed` weight. A token's
    result does not depend on the others.
    """
    x = x.contiguous()
    num_tokens, num_inputs = x.shape
    num_outputs = weight.shape[0]
    outputs = x.new_empty(num_tokens, num_outputs)
    num_threads = 1 if num_tokens * num_inputs * num_outputs <= SMALL else torch.get_num_threads()
    at_once, size, scratch = tokens_at_once(num_tokens, num_inputs, x.itemsize), 0, None
    if needs_scratch(x.dtype, num_tokens):
        size = scratch_size(num_tokens, num_inputs, x.itemsize)
        scratch = x.new_empty(num_threads * size, dtype=torch.float32)
    run_operator(
        x.dtype, MULTIPLY, num_threads, num_tokens, num_inputs, num_outputs, share_of(num_outputs, num_inputs, ROWS),
        at_once, weight.data_ptr(), x.data_ptr(), 0 if bias is None else bias.data_ptr(), outputs.data_ptr(),
        0 if scratch is None else scratch.data_ptr(), size, 0 if packed is None else packed.data_ptr(),
        part_rows(num_outputs, num_inputs, x.itemsize, num_threads),
    )  # fmt: skip
    return outputs


def wide_linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """
    Return `linear(x.float(), weight)` of tokens `[N, in]` in a dtype that `has_kernels`, and a weight in float32, both
    contiguous, with a multiple of 16 inputs. A token's result does not depend on the others.
    """
    x = x.contiguous()
    (num_tokens, num_inputs), num_outputs = x.shape, weight.shape[0]
    outputs = x.new_empty(num_tokens, num_outputs, dtype=torch.float32)
    num_threads = 1 if num_tokens * num_inputs * num_outputs <= SMALL else torch.get_num_threads()
    run_operator(
        x.dtype, WIDE_MULTIPLY, num_threads, num_tokens, num_inputs, num_outputs,
        share_of(num_outputs, num_inputs, ROWS), tokens_at_once(num_tokens, num_inputs, x.itemsize),
        weight.data_ptr(), x.data_ptr(), 0, outputs.data_ptr(), 0, 0, 0, 0,
    )  # fmt: skip
    return outputs


def needs_scratch(dtype: torch.dtype, num_tokens: int) -> bool:
    """
    Return whether products of so many tokens may need memory of their own (`scratch_size`): for tokens that are widened
    once for all tiles, or for sums of parts of long rows.
    """
    return (num_tokens > NARROW_TOKENS and dtype is torch.bfloat16) if num_lanes() == 8 else num_tokens >= MANY
