"""
Copies in bfloat16 of float32 weights. Most checkpoints are stored in bfloat16, and hold no other numbers when they are
loaded in float32: then products read half of the memory, and their results are the same, bit for bit.
"""

from collections.abc import Sequence
from weakref import ref

import torch

from .tensor_checks import sums_of_bits, version_of

_ROWS = 1024  # rows of a weight that are compared at a time
_FIRST = 8  # rows that are compared first: most weights that hold other numbers have some there


class NarrowWeights:
    """
    Copies in bfloat16 of those weights that hold no other numbers.

    Args:
        weights (sequence of `torch.Tensor`): float32 weights `[num_outputs, num_inputs]`, contiguous.
        parameters (sequence of `torch.Tensor`): The parameters whose memory they are.

    Attributes:
        copies (dict of `torch.Tensor`): Copies by the address of their weight.
    """

    def __init__(self, weights: Sequence[torch.Tensor], parameters: Sequence[torch.Tensor]):
        self._parameters = [ref(parameter) for parameter in parameters]  # one that is replaced is freed
        self._versions = self._current_versions()  # first, since another thread may change weights meanwhile
        self.copies: dict[int, torch.Tensor] = {}
        self._sums: dict[int, torch.Tensor] = {}
        for weight in weights:
            sums = sums_of_bits(weight)  # before the copy, as the versions are
            if (copy := narrowed(weight.detach())) is not None:
                self.copies[weight.data_ptr()], self._sums[weight.data_ptr()] = copy, sums

    def _current_versions(self) -> list[int]:
        return [version_of(parameter) for item in self._parameters if (parameter := item()) is not None]

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
