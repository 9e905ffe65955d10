"""Rotary embeddings by position, computed once where they depend on nothing else."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from ...cpu.tensor_checks import version_of
from ..forward.rotary import depends_on_length

Tables = tuple[torch.Tensor, torch.Tensor]
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
        self.forget()

    def forget(self) -> None:
        """Delete all embeddings."""
        self._made_of: Any = None
        self._kept: dict[str | None, Tables] = {}

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
        frequencies = [tensor for tensor in module._buffers.values() if tensor is not None]
        made_of = x.dtype, [(tensor.data_ptr(), version_of(tensor)) for tensor in frequencies]
        if made_of == self._made_of:
            try:
                return self._of(positions[0])
            except IndexError:  # of positions beyond those that are kept
                pass
        found, num = compute(x, positions), int(positions.max()) + 1
        if num <= _MOST:
            every = torch.arange(max(1 << (num - 1).bit_length(), _LEAST))[None]
            kept = compute(x, every)
            self._kept = {name: (cos.contiguous(), sin.contiguous()) for name, (cos, sin) in kept.items()}
            self._made_of = made_of
            looked_up = self._of(positions[0])
            self._may_keep = all(
                torch.equal(*pair) for name, pairs in found.items() for pair in zip(pairs, looked_up[name])
            )
        return found

    def _of(self, positions: torch.Tensor) -> ByType:
        return {
            name: (cos.index_select(0, positions), sin.index_select(0, positions))
            for name, (cos, sin) in self._kept.items()
        }
