"""
Memory that lives as long as its model is used: keys and values, the buffers in which layouts are sent, and the graphs
recorded on both serve one call after the other, at the same addresses.

The largest memory that a call had is kept, up to a sixteenth of a GPU's memory, or 256 MiB elsewhere. It is freed with
the model, by `disable`, and at the next call if dtype, device or stream have changed. A call that begins while another
uses it gets memory of its own.
"""

from dataclasses import dataclass
from threading import RLock

import torch
from transformers import PreTrainedModel

from ...device import StagingBuffer
from ..forward.packed import PackedForward
from ..graphs import ForwardRecordings
from ..model_state import state_of

_GPU_SHARE, _MOST_ELSEWHERE = 16, 2**28


@dataclass(frozen=True)
class _Kept:
    setting: tuple
    memories: list[torch.Tensor]
    staging: StagingBuffer
    recordings: ForwardRecordings | None


_lock = RLock()  # reentrant, since freeing objects under the lock may call back into this module


def borrow_memory(forward: PackedForward) -> None:
    """Pass the memory kept of its model, unless another call uses it, to a forward that has not run yet."""
    state = state_of(forward.model)
    with _lock:
        kept, state.memory = state.memory, None
    if kept is not None and kept.setting == _setting(forward.model):
        is_borrowed = forward.cache.borrow(kept.memories)
        forward.staging = kept.staging
        if is_borrowed and forward.recordings is not None and kept.recordings is not None:
            forward.recordings = kept.recordings


def release_memory(forward: PackedForward) -> None:
    """Keep a forward's memory for the next one, and leave the forward without any."""
    memories = forward.cache.release()
    size = _bytes(memories)
    if 0 < size <= _most_bytes(forward.device):
        kept = _Kept(_setting(forward.model), memories, forward.staging, forward.recordings)
        with _lock:
            state = state_of(forward.model)
            if state.memory is None or _bytes(state.memory.memories) <= size:
                state.memory = kept


def _bytes(memories: list[torch.Tensor]) -> int:
    return sum(memory.element_size() * memory.numel() for memory in memories)


def _most_bytes(device: torch.device) -> int:
    if device.type != "cuda":
        return _MOST_ELSEWHERE
    return torch.cuda.get_device_properties(device).total_memory // _GPU_SHARE


def _setting(model: PreTrainedModel) -> tuple:
    """Return the setting in which memory may be reused; work on it in another stream would not be waited for."""
    stream = torch.cuda.current_stream(model.device) if model.device.type == "cuda" else None
    return model.dtype, model.device, stream
