"""
Copies of weights in fewer bits that hold the same numbers: products read less memory, and their results are the same,
bit for bit. Most checkpoints are stored in bfloat16, so that a copy in bfloat16 holds all numbers of weights that are
loaded in float32. Those of a matrix in bfloat16 have exponents close to one another, and fit 13 bits.
"""

from collections.abc import Sequence
from functools import cache
from operator import attrgetter
from weakref import proxy, ref

import numpy as np
import torch

from ..log import get_logger
from .few_tokens import few_token_linear, has_kernels
from .kernels.packed import BLOCK, BLOCK_BYTES, MOST_CODES, MOST_TOKENS, PACK_FIELDS, can_unpack, note_first_bytes, pack
from .tensor_checks import sums_of_bits
from .threads import run

logger = get_logger(__name__)

_ROWS = 1024  # rows of a weight that are compared at a time
_FIRST = 8  # rows that are compared first: most weights that hold other numbers have some there
_SHARE = 256  # blocks that a thread packs at a time
_version = attrgetter("_version")  # quicker than a comprehension, for hundreds of weights at every token
_BITS = {torch.float32: 16, torch.bfloat16: 13}  # of a number's copy


class CompactWeights:
    """
    Copies of those weights that fit fewer bits: of float32 in bfloat16, of bfloat16 as the bytes that `packed` returns.

    Args:
        parameters (sequence of `torch.Tensor`): The parameters whose memory the weights are.

    Attributes:
        copies (dict of `torch.Tensor`): Copies by the address of their weight.
    """

    def __init__(self, parameters: Sequence[torch.Tensor]):
        # Weakly, so that those that are replaced are freed; torch counts no changes of inference tensors.
        self._counted = [proxy(parameter) for parameter in parameters if not parameter.is_inference()]
        self._uncounted = [ref(parameter) for parameter in parameters if parameter.is_inference()]
        self._versions = self._current_versions()  # first, since another thread may change weights meanwhile
        self.copies: dict[int, torch.Tensor] = {}
        self._sums: dict[int, torch.Tensor] = {}

    def add(self, weight: torch.Tensor) -> None:
        """Copy a weight `[num_outputs, num_inputs]`, contiguous, if it fits fewer bits."""
        sums = sums_of_bits(weight)  # before the copy, as the versions are
        copy = (narrowed if weight.dtype is torch.float32 else packed)(weight.detach())
        if copy is not None:
            self.copies[weight.data_ptr()], self._sums[weight.data_ptr()] = copy, sums

    def _current_versions(self) -> list[int] | None:
        """Return torch's counts of changes in place; None if a parameter was replaced."""
        try:
            versions = list(map(_version, self._counted))
        except ReferenceError:
            return None
        return versions if all([item() is not None for item in self._uncounted]) else None

    def is_unchanged(self) -> bool:
        """Return whether the parameters are as they were copied, by torch's count of changes in place."""
        return not self.copies or self._current_versions() == self._versions

    def is_of(self, weights: Sequence[torch.Tensor]) -> bool:
        """
        Return whether the weights are as they were copied, by torch's count and by their bits, as `weight.data` is not
        counted.
        """
        pairs = [(weight, self._sums.get(weight.data_ptr())) for weight in weights]
        return self.is_unchanged() and all(
            [sums is None or torch.equal(sums, sums_of_bits(weight)) for weight, sums in pairs]
        )


def compact_bytes(weight: torch.Tensor) -> int:
    """Return the most bytes of a weight's copy."""
    return weight.numel() * _BITS[weight.dtype] // 8


def narrowed(weight: torch.Tensor) -> torch.Tensor | None:
    """Return a float32 weight in bfloat16; None where this would round a number."""
    first = weight[:_FIRST]
    if not torch.equal(first.bfloat16().float(), first):
        return None
    copy = torch.empty_like(weight, dtype=torch.bfloat16)
    for part, own in zip(weight.split(_ROWS), copy.split(_ROWS)):
        if not torch.equal(own.copy_(part).float(), part):  # NaN equals nothing
            return None
    return copy


def packed(weight: torch.Tensor) -> torch.Tensor | None:
    """
    Return a bfloat16 weight as bytes: a table of its numbers' first bytes, `MOST_CODES` at most, and its packed blocks
    (`pack`); None where there are more of them, where rows are not whole blocks, or where the CPU cannot unpack them.
    """
    if not can_unpack() or weight.shape[1] % BLOCK or not weight.numel():
        return None
    num_blocks, codes = weight.numel() // BLOCK, np.zeros(256, np.uint8)
    fields = np.array([0, num_blocks, _SHARE, weight.data_ptr(), codes.ctypes.data, 0])
    run(note_first_bytes.address, fields.ctypes.data, torch.get_num_threads())
    table = np.flatnonzero(codes)
    if len(table) > MOST_CODES:
        return None
    copy = np.empty(MOST_CODES + num_blocks * BLOCK_BYTES, np.uint8)
    codes[table], copy[:MOST_CODES] = np.arange(len(table)), np.pad(table, (0, MOST_CODES - len(table)))
    fields[[PACK_FIELDS.index("next"), PACK_FIELDS.index("outputs")]] = 0, copy.ctypes.data + MOST_CODES
    run(pack.address, fields.ctypes.data, torch.get_num_threads())
    return torch.from_numpy(copy)


@cache
def can_pack() -> bool:
    """Return whether there is compiled code for products with packed weights, and its results are right."""
    if not has_kernels(torch.bfloat16) or not can_unpack():
        return False
    generator = torch.Generator().manual_seed(0)
    weight, x = (torch.randn(num, 2 * BLOCK, generator=generator, device="cpu").bfloat16() for num in (7, MOST_TOKENS))
    try:
        copy = packed(weight)
        return copy is not None and all(
            torch.equal(few_token_linear(x[:num], weight, packed=copy), few_token_linear(x[:num], weight))
            for num in range(1, MOST_TOKENS + 1)
        )
    except Exception as error:  # compilers raise errors of many types
        logger.warning(f"Weights are read as they are, since no faster code can be compiled ({error!r}).")
        return False
