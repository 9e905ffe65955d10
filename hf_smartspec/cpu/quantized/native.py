"""The linear layer in two calls of compiled code: one rounds the tokens, the other multiplies."""

from functools import cache

import torch

from ..few_tokens import SMALL
from ..kernels.dots import GROUP, PARTS, SIDE, instructions
from ..kernels.program import INT4, INT8, LEVELS
from ..kernels.vectors import num_lanes
from ..program import DTYPES, run_operator
from ..tensor_checks import is_plain, is_vector
from ..threads import has_threads, share_of

_DTYPES = (torch.int8, torch.float32), (torch.uint8, torch.float16)  # of weights and scales, in int8 and in int4
_FEW = 2**13  # numbers that one thread has rounded by then


@cache
def has_kernels() -> bool:
    """Return whether there is compiled code for this CPU, and torch's threads can run it."""
    return bool(instructions()) and num_lanes() > 0 and has_threads()


def can_read(weight: torch.Tensor, scale: torch.Tensor, num_outputs: int, num_inputs: int) -> bool:
    """Return whether compiled code reads a weight and its scales as they lie in memory."""
    return (
        weight.is_cpu
        and (weight.dtype, scale.dtype) in _DTYPES
        and weight.shape[:2] == scale.shape[:2] == (-(-num_outputs // SIDE), num_groups(num_inputs))
        and weight.is_contiguous()
        and scale.is_contiguous()
        and has_kernels()
    )


def can_multiply(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None, num_outputs: int
) -> bool:
    """Return whether compiled code multiplies these tensors."""
    return (
        can_read(weight, scale, num_outputs, x.shape[1])
        and len(x) > 0
        and is_plain(x)
        and x.dtype in DTYPES
        and (bias is None or (bias.dtype is x.dtype and is_vector(bias, num_outputs)))
    )


def quantized_linear(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None, num_outputs: int
) -> torch.Tensor:
    """Return the results of `product.plain_quantized_linear`, bit by bit, for arguments that pass `can_multiply`."""
    x = x.contiguous()
    num_tokens, num_inputs, num_threads = len(x), x.shape[1], torch.get_num_threads()
    outputs, levels = x.new_empty(num_tokens, num_outputs), Rounded(num_tokens, weight.shape[1])
    fields = num_tokens, num_inputs, x.data_ptr(), *levels.addresses
    run_operator(x.dtype, LEVELS, num_threads if x.numel() > _FEW else 1, *fields)
    num_threads = num_threads if num_tokens * num_outputs * num_inputs > SMALL else 1
    share = blocks_of(num_outputs, num_inputs)
    code = code_of(weight)
    run_operator(
        x.dtype, code, num_threads, num_tokens, weight.shape[1], num_outputs, share, weight.data_ptr(),
        scale.data_ptr(), *levels.read_by(code).values(), 0 if bias is None else bias.data_ptr(),
        outputs.data_ptr(),
    )  # fmt: skip
    return outputs


def code_of(weight: torch.Tensor) -> int:
    """Return the code of the operator that multiplies by a weight."""
    return INT8 if weight.dtype is torch.int8 else INT4


def blocks_of(num_outputs: int, num_inputs: int) -> int:
    """Return the blocks of a weight that a thread takes at a time."""
    return share_of(num_outputs, num_inputs, 4 * SIDE) // SIDE


def num_groups(num_inputs: int) -> int:
    return -(-num_inputs // GROUP)


class Rounded:
    """Memory for rounded tokens; `addresses` are those of levels, steps, offsets and totals."""

    def __init__(self, num_tokens: int, groups: int):
        num, size = num_tokens * groups * GROUP, num_tokens * groups * PARTS * 4
        self._memory = torch.empty(num + 3 * size, dtype=torch.int8, device="cpu")
        begin = self._memory.data_ptr()
        self.addresses = begin, begin + num, begin + num + size, begin + num + 2 * size

    def written(self) -> dict[str, int]:
        """Return the fields of the operator that rounds."""
        return dict(zip(("levels", "steps", "offsets", "totals"), self.addresses))

    def read_by(self, code: int) -> dict[str, int]:
        """Return the fields of an operator that multiplies."""
        levels, steps, offsets, totals = self.addresses
        return {"levels": levels, "steps": steps, "offsets": totals if code == INT4 else offsets}
