"""
Memory that lives as long as its model is used: keys and values, the buffers by which layouts are sent, and what is
recorded on both, serve one call after the other, at the same addresses.

Kept is the most that a call had, as long as that is little: a sixteenth of a GPU's memory, 256 MiB elsewhere. It goes
with the model, when `disable` is called, and with the next call where dtype, device or stream are others then. A call
that begins while another has it gets memory of its own.
"""

from dataclasses import dataclass
from threading import RLock
from weakref import WeakKeyDictionary

import torch
from transformers import PreTrainedModel

from ...device import Wire
from ..forward.packed import PackedForward
from ..graphs import ForwardRecordings

_GPU_SHARE, _MOST_ELSEWHERE = 16, 2**28


@dataclass(frozen=True)
class _Kept:
    setting: tuple
    memories: list[torch.Tensor]
    wire: Wire
    recordings: ForwardRecordings | None


_kept: WeakKeyDictionary[PreTrainedModel, _Kept] = WeakKeyDictionary()
_lock = RLock()  # what is freed meanwhile may end here again


def lend(forward: PackedForward) -> None:
    """Gives what is kept of its model, if nobody has it, to a forward that has not been run."""
    with _lock:
        kept = _kept.pop(forward.model, None)
    if kept is not None and kept.setting == _setting(forward.model):
        is_lent = forward.cache.lend(kept.memories)
        forward.wire = kept.wire
        if is_lent and forward.recordings is not None and kept.recordings is not None:
            forward.recordings = kept.recordings


def take_back(forward: PackedForward) -> None:
    """Keeps a forward's memory for the next one; this one holds nothing any more."""
    memories = forward.cache.give_back()
    size = _bytes(memories)
    if 0 < size <= _most_bytes(forward.device):
        kept = _Kept(_setting(forward.model), memories, forward.wire, forward.recordings)
        with _lock:
            other = _kept.get(forward.model)
            if other is None or _bytes(other.memories) <= size:
                _kept[forward.model] = kept


def forget(model: PreTrainedModel) -> None:
    """Frees what is kept of a model."""
    with _lock:
        _kept.pop(model, None)


def kept_bytes(model: PreTrainedModel) -> int:
    """Of keys and values that are kept for a model's next call; 0 while one has them."""
    with _lock:
        kept = _kept.get(model)
    return 0 if kept is None else _bytes(kept.memories)


def _bytes(memories: list[torch.Tensor]) -> int:
    return sum(memory.element_size() * memory.numel() for memory in memories)


def _most_bytes(device: torch.device) -> int:
    if device.type != "cuda":
        return _MOST_ELSEWHERE
    return torch.cuda.get_device_properties(device).total_memory // _GPU_SHARE


def _setting(model: PreTrainedModel) -> tuple:
    """What memory must not be used beyond: what another stream does with it is not waited for."""
    stream = torch.cuda.current_stream(model.device) if model.device.type == "cuda" else None
    return model.dtype, model.device, stream
