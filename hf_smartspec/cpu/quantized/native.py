"""The linear layer of a few tokens in two calls of compiled code: one rounds the tokens, the other multiplies."""

import ctypes
from functools import cache
from typing import Any

import torch

from ..tensor_checks import is_plain, is_vector
from ..threads import has_threads, run, share_of
from .kernels.arguments import BFLOAT16, FIELDS, FLOAT16, FLOAT32
from .kernels.dots import LINE, has_dots, widest
from .kernels.levels import to_levels
from .kernels.multiply import ROWS, multiply
from .kernels.multiply_many import multiply_many
from .kernels.tiles import SIDE, configuration, has_tiles

_MOST_TOKENS = 32  # for more, torch's product is faster, where it is exact
_MOST_IN_REGISTERS = 512  # the same with matrix registers; levels of more tokens outgrow the caches
_MANY = 12  # tokens from which on matrix registers are faster
_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA = 158, 0x1023, 18  # Linux's numbers for these
_KINDS = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16, torch.float16: FLOAT16}
_SMALL = 2**17  # products that one thread has computed before a second one has begun
_FEW = 2**13  # numbers that one thread has rounded by then


class _Arguments(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_int64) for name in FIELDS)


@cache
def has_kernels() -> bool:
    """Return whether there is compiled code for this CPU, and torch's threads can run it."""
    return widest() > 0 and has_threads()


@cache
def has_matrix_registers() -> bool:
    """Return whether the CPU has matrix registers and Linux, which must be asked, lets this process use them."""
    return has_tiles() and ctypes.CDLL(None).syscall(_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA) == 0


def _takes(num_tokens: int, weight: torch.Tensor) -> bool:
    """Return whether compiled code is faster for `num_tokens` than torch's product, or torch's is not exact."""
    most = _MOST_IN_REGISTERS if _fits_registers(weight) else _MOST_TOKENS
    return 0 < num_tokens <= most or (num_tokens > 0 and not has_dots())


def _fits_registers(weight: torch.Tensor) -> bool:
    return weight.shape[1] % 4 == 0 and has_matrix_registers()


@cache
def _registers(num_inputs: int) -> ctypes.Array:
    return ctypes.create_string_buffer(configuration(num_inputs))


def can_multiply(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None = None) -> bool:
    """Return whether compiled code is faster for these tensors, and can read them as they lie in memory."""
    return (
        has_kernels()
        and _takes(len(x), weight)
        and is_plain(x)
        and x.dtype in _KINDS
        and x.shape[1] == weight.shape[1]
        and weight.is_cpu
        and weight.dtype == torch.int8
        and weight.is_contiguous()
        and scale.dtype == torch.float32
        and is_vector(scale, len(weight))
        and (bias is None or (bias.dtype in _KINDS and is_vector(bias, len(weight))))
    )


def int8_linear(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the results of `product.plain_int8_linear`, bit by bit, for arguments that pass `can_multiply`."""
    x = x.contiguous()
    num_tokens, num_outputs, num_threads = len(x), len(weight), torch.get_num_threads()
    outputs = torch.empty(num_tokens, num_outputs, dtype=x.dtype)
    arguments = _Arguments(
        num_tokens=num_tokens,
        num_inputs=x.shape[1],
        num_outputs=num_outputs,
        share=share_of(num_outputs, x.shape[1], ROWS),
        tokens=x.data_ptr(),
        outputs=outputs.data_ptr(),
        kind=_KINDS[x.dtype],
        scales=scale.data_ptr(),
        weight=weight.data_ptr(),
    )
    if bias is not None:
        arguments.bias, arguments.bias_kind = bias.data_ptr(), _KINDS[bias.dtype]
    is_many = num_tokens >= _MANY and _fits_registers(weight)
    held = _reserve(arguments, is_many)  # noqa: F841 (keeps the memory alive until all is done)
    address = ctypes.addressof(arguments)
    run(to_levels.address, address, num_threads if num_tokens > 1 and x.numel() > _FEW else 1)
    arguments.next = 0
    function = multiply_many if is_many else multiply
    run(function.address, address, num_threads if num_tokens * weight.numel() > _SMALL else 1)
    return outputs


def _reserve(arguments: Any, is_many: bool) -> tuple[torch.Tensor, ctypes.Array | None]:
    """
    Allocate memory for levels, steps and offsets, and for levels in the order of matrix registers if `is_many`; return
    it with the registers' configuration. Both must outlive the calls.
    """
    num_tokens = arguments.num_tokens
    line = -(-arguments.num_inputs // LINE) * LINE
    num_packed = -(-num_tokens // SIDE) * SIDE if is_many else 0
    memory = torch.empty((num_packed + num_tokens) * line + num_tokens * 8, dtype=torch.int8)
    arguments.levels = memory.data_ptr() + num_packed * line
    arguments.steps = arguments.levels + num_tokens * line
    arguments.offsets = arguments.steps + num_tokens * 4
    if not is_many:
        return memory, None
    registers = _registers(arguments.num_inputs)
    arguments.packed, arguments.registers = memory.data_ptr(), ctypes.addressof(registers)
    return memory, registers
