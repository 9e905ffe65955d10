"""One layer's keys and values in a slot cache."""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from transformers.cache_utils import CacheLayerMixin

from ..layout.rows import CacheRow
from ..layout.step_layout import StepLayout


class Lines(Protocol):
    """Attributes of a `SlotCache` that its layers read."""

    layout: StepLayout | None
    num_moves: int

    @property
    def rows(self) -> Sequence[CacheRow]: ...

    @property
    def num_lines(self) -> int: ...

    def memory(self, like: torch.Tensor, *shape: int) -> torch.Tensor: ...


class SlotLayer(CacheLayerMixin):
    """
    Keys and values of one layer, stored as `[lines, heads, head_dim]`.

    Token-major storage makes one token's heads contiguous, so that scattering a packed step and committing an accepted
    path are copies of whole lines; attention reads views `[rows, heads, columns, head_dim]` (`PaddedPart.view`).
    """

    is_sliding = False
    is_compileable = False
    index_size = 0  # of keys of an indexer, which the last memory then holds, each with its rotation
    indexer_position_ids = property(lambda self: None, lambda self, positions: None)  # rotations are kept with the keys

    def __init__(self, cache: Lines):
        self.cache = cache
        self.hold()

    def hold(self, *memories: torch.Tensor) -> None:
        """
        Use these tensors as keys and values, and keep their addresses for compiled code. Asking 60 tensors for their
        addresses takes long, since after a forward none of them is in the processor's cache. Nothing else replaces
        memory.
        """
        self.cache.num_moves += 1
        self._note(memories)

    def _note(self, memories: Sequence[torch.Tensor]) -> None:
        self.memories = memories  # keys and values, once allocated, and the keys of an indexer, if there is one
        on_cpu = [memory for memory in memories if memory.is_cpu]
        self.addresses = tuple([memory.data_ptr() for memory in on_cpu])
        self.line_bytes = tuple([memory.shape[1:].numel() * memory.itemsize for memory in on_cpu])

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take over the state of a copy, whose memory lies at other addresses."""
        vars(self).update(state)
        self._note(self.memories)

    @property
    def keys(self) -> torch.Tensor:  # type: ignore[override]
        """Keys, once allocated."""
        return self.memories[0]

    @property
    def values(self) -> torch.Tensor:  # type: ignore[override]
        """Values, once allocated."""
        return self.memories[1]

    @property
    def is_initialized(self) -> bool:  # type: ignore[override]
        """Return whether memory is allocated."""
        return len(self.memories) > 1

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Allocate memory for states of this kind, `[..., heads, length, head_dim]`."""
        states = key_states, value_states
        self.hold(*[self.cache.memory(item, item.shape[1], item.shape[3]) for item in states], *self.memories)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write packed states `[1, heads, N, head_dim]`; return the whole memory, `[1, heads, lines, head_dim]`."""
        keys, values = self.write(key_states[0].transpose(0, 1), value_states[0].transpose(0, 1))
        return keys.transpose(0, 1)[None], values.transpose(0, 1)[None]

    def write(self, key_states: torch.Tensor, value_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Scatter packed states `[N, heads, head_dim]`; return the whole memory, `[lines, heads, head_dim]`."""
        if not self.is_initialized:
            self.lazy_initialization(key_states[None].transpose(1, 2), value_states[None].transpose(1, 2))
        for memory, states in zip(self.memories, (key_states, value_states)):
            if states.dtype != memory.dtype:
                states = states.to(memory.dtype)
            memory.index_copy_(0, self.lines, states)
        return self.keys, self.values

    @property
    def lines(self) -> torch.Tensor:
        """Lines of the tokens that a packed forward runs, `[N]`."""
        layout = self.cache.layout
        assert layout is not None, "a slot cache is written by a packed forward only"
        return layout.lines

    @property
    def has_index(self) -> bool:
        """Return whether the layer has an indexer, which has run."""
        return self.index_size > 0

    def write_index(self, keys: torch.Tensor, rotations: torch.Tensor) -> torch.Tensor:
        """Scatter an indexer's packed keys `[N, size]`, and their rotations; return the memory of both."""
        size, keys = keys.shape[1], torch.cat([keys, rotations.to(keys.dtype)], dim=1)
        if not self.has_index:
            self.hold(*self.memories, self.cache.memory(keys, 1, keys.shape[1]))
            self.index_size = size
        return self.memories[-1].index_copy_(0, self.lines, keys[:, None])

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.cache.num_lines, 0

    def get_seq_length(self) -> int:
        return max((row.length for row in self.cache.rows), default=0)

    def get_max_length(self) -> int:
        return -1


def zeros(like: torch.Tensor, *shape: int) -> torch.Tensor:
    """Return zeros in the dtype and on the device of `like`, which may be written to in any mode."""
    # Not uninitialised memory: masked columns are multiplied by 0, and 0 * NaN is NaN.
    with torch.inference_mode(False):  # an inference tensor could not be written to outside inference mode
        return torch.zeros(shape, dtype=like.dtype, device=like.device)
