"""Rotary embeddings by position, computed once where they depend on nothing else."""

import operator
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import nn

from ...cpu.tensor_checks import version_of
from ..forward.rotary import depends_on_length
from .inputs import Tables

ByType = Mapping[str | None, Tables]
Compute = Callable[[torch.Tensor, torch.Tensor], ByType]
_LEAST, _MOST = 256, 2**15  # positions of which embeddings are kept


class RotaryTables:
    """
    Rotary embeddings on a CPU, looked up by position: computing those of a token takes as long as half a layer.

    Args:
        module (`nn.Module`): The module that computes them, by the frequencies in its buffers.
    """

    def __init__(self, module: nn.Module):
        self._may_keep = not depends_on_length(module)
        self._kept: _Kept | None = None

    def check(self, module: nn.Module) -> None:
        """Forget the embeddings if the frequencies have changed in a way that torch does not count."""
        kept, frequencies = self._kept, _frequencies(module)
        if kept is not None and not all(map(torch.equal, kept.copies, frequencies)):
            self._kept = None

    def __call__(self, compute: Compute, module: nn.Module, x: torch.Tensor, positions: torch.Tensor) -> ByType:
        """
        Return embeddings by type of layer, those that are computed to the last bit.

        Args:
            compute (`Callable`): Computes embeddings from `x` and positions: two tensors `[N, 1, dim]` for each type.
            module (`nn.Module`): The module that it calls, as it is now.
            x (`torch.Tensor` of shape `[N, size]`): A tensor with the dtype and device of the result.
            positions (`torch.Tensor` of shape `[1, N]`): Positions of the tokens.
        """
        if not self._may_keep or not x.is_cpu:
            return compute(x, positions)
        frequencies, kept = _frequencies(module), self._kept
        if kept is not None and kept.is_of(x.dtype, frequencies):
            try:
                return kept.of(positions[0])
            except IndexError:  # of positions beyond those that are kept
                pass
        found, num = compute(x, positions), int(positions.max()) + 1
        if num <= _MOST:
            every = torch.arange(max(1 << (num - 1).bit_length(), _LEAST), device=positions.device)[None]
            tables = {name: (cos.contiguous(), sin.contiguous()) for name, (cos, sin) in compute(x, every).items()}
            versions, copies = list(map(version_of, frequencies)), [tensor.clone() for tensor in frequencies]
            kept = _Kept(x.dtype, frequencies, versions, copies, tables)
            own = kept.of(positions[0])
            self._may_keep = all(torch.equal(*pair) for name, pairs in found.items() for pair in zip(pairs, own[name]))
            self._kept = kept
        return found


class _Kept(NamedTuple):
    """Embeddings of the first positions, and the frequencies that they are made of."""

    dtype: torch.dtype
    frequencies: list[torch.Tensor]
    versions: list[int]
    copies: list[torch.Tensor]
    tables: dict[str | None, Tables]

    def is_of(self, dtype: torch.dtype, frequencies: list[torch.Tensor]) -> bool:
        return (
            self.dtype is dtype
            and len(self.frequencies) == len(frequencies)
            and all(map(operator.is_, self.frequencies, frequencies))
            and self.versions == list(map(version_of, frequencies))
        )

    def of(self, positions: torch.Tensor) -> ByType:
        return {
            name: (cos.index_select(0, positions), sin.index_select(0, positions))
            for name, (cos, sin) in self.tables.items()
        }


def _frequencies(module: nn.Module) -> list[torch.Tensor]:
    return [tensor for tensor in module._buffers.values() if tensor is not None]
