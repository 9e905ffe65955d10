"""
Copies in bfloat16 of float32 weights. Most checkpoints are stored in bfloat16, and hold no other numbers when they are
loaded in float32: then products read half of the memory, and their results are the same, bit for bit.
"""

from collections.abc import Sequence
from time import perf_counter
from weakref import ref

import torch

from .tensor_checks import version_of

_PAUSE = 0.05  # seconds between two looks at torch's count of changes
_ROWS = 1024  # rows of a weight that are compared at a time
_WHOLE = 8  # rows of a weight of which all numbers are compared later, where others are sampled
_SAMPLE = 16  # neighbouring numbers of every row that are compared later: a line of the processor's cache in float32


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
        found = {weight.data_ptr(): copy for weight in weights if (copy := narrowed(weight.detach())) is not None}
        self.copies: dict[int, torch.Tensor] = found
        self._num_checks, self._seen = 0, perf_counter()

    def _current_versions(self) -> list[int]:
        return [version_of(parameter) for item in self._parameters if (parameter := item()) is not None]

    def is_unchanged(self) -> bool:
        """
        Return whether the parameters are as they were copied, by torch's count of changes in place. This is looked at
        twenty times a second, since after a forward none of them is in the processor's cache.
        """
        if not self.copies or (now := perf_counter()) < self._seen + _PAUSE:
            return True
        self._seen = now
        return self._current_versions() == self._versions

    def is_of(self, weights: Sequence[torch.Tensor]) -> bool:
        """
        Return whether the weights still are as they were copied, also where torch has counted no change, as with
        `weight.data`: in some numbers of each row, and in all of some rows; others each time.
        """
        if self.copies and self._current_versions() != self._versions:
            return False
        pairs = [(weight.detach(), self.copies.get(weight.data_ptr())) for weight in weights]
        self._num_checks += 1
        return all([copy is None or _are_equal(weight, copy, self._num_checks) for weight, copy in pairs])


def narrowed(weight: torch.Tensor) -> torch.Tensor | None:
    """Return a float32 weight in bfloat16; None where this would round a number."""
    first = weight[:_WHOLE]
    if not torch.equal(first.bfloat16().float(), first):  # as where nearly all numbers are others
        return None
    copy = torch.empty_like(weight, dtype=torch.bfloat16)
    for part, own in zip(weight.split(_ROWS), copy.split(_ROWS)):
        if not torch.equal(own.copy_(part).float(), part):  # NaN equals nothing
            return None
    return copy


def _are_equal(weight: torch.Tensor, copy: torch.Tensor, number: int) -> bool:
    step, sample = max(len(weight) // _WHOLE, 1), number * _SAMPLE % weight.shape[1]
    rows, columns = slice(number % step, None, step), (slice(None), slice(sample, sample + _SAMPLE))
    return all([torch.equal(weight[part].contiguous(), copy[part].float()) for part in (rows, columns)])
