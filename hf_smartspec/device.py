"""Copies of small arrays between the host and a device, with as few waits as possible."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch

_WITHOUT_FLOAT64 = {"mps"}
_LEAST_BUFFER = 2**12  # numbers


def has_float64(device: torch.device) -> bool:
    """Return whether the device computes in double precision."""
    return device.type not in _WITHOUT_FLOAT64


def waits_are_free(device: torch.device) -> bool:
    """Return whether reading the device's results costs the host no wait: true of CPUs only."""
    return device.type == "cpu"


def autocasts(device: torch.device) -> bool:
    """Return whether this thread is within `torch.autocast` for devices of this type."""
    return torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type)


def without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Return a context in which operations on the device compute in their arguments' dtypes."""
    return torch.autocast(device.type, enabled=False) if autocasts(device) else nullcontext()


def to_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """Return a tensor of the array's values on `device`; on a CPU it shares their memory."""
    tensor = torch.from_numpy(array)
    if device.type == "cuda":
        tensor = tensor.pin_memory()  # a copy from pageable memory would wait for the work queued on the device
    return tensor.to(device, non_blocking=True)


def send_together(tensors: Sequence[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """
    Return int64 host tensors on `device`, as views of one tensor copied at once; on a CPU, the tensors themselves.
    """
    if device.type == "cpu":
        return list(tensors)
    if not tensors:
        return []
    return _parts(to_device(torch.cat([tensor.reshape(-1) for tensor in tensors]).numpy(), device), tensors)


def _parts(flat: torch.Tensor, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Split `flat`, which holds the values of `tensors` end to end, into views of their shapes."""
    parts = flat.split([tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors)]


class StagingBuffer:
    """
    A buffer on the device for host tensors that are sent at every step. It is reused as long as it is large enough, so
    each `send` invalidates the views that the one before returned. The device's stream order keeps a copy from
    overwriting values that queued work still reads; the host waits until the older of its two pinned buffers is copied.
    """

    def __init__(self) -> None:
        self._on_device: torch.Tensor | None = None
        self._on_host: list[torch.Tensor] = []
        self._copied: list[torch.cuda.Event] = []  # recorded after the copy from each host buffer

    def send(self, tensors: Sequence[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
        """Return int64 host tensors on `device`, as views of the buffer; on a CPU, the tensors themselves."""
        if device.type == "cpu":
            return list(tensors)
        if not tensors:
            return []
        pieces = [tensor.reshape(-1) for tensor in tensors]
        size = sum(map(len, pieces))
        flat = self._buffer(size, device)[:size]
        if device.type == "cuda":
            self._copy_pinned(pieces, flat)
        else:
            flat.copy_(torch.cat(pieces), non_blocking=True)
        return _parts(flat, tensors)

    def _buffer(self, size: int, device: torch.device) -> torch.Tensor:
        if self._on_device is None or len(self._on_device) < size or self._on_device.device != device:
            size = max(_LEAST_BUFFER, 1 << (size - 1).bit_length())
            with torch.inference_mode(False):  # an inference tensor could not be written to outside inference mode
                self._on_device = torch.empty(size, dtype=torch.int64, device=device)
                if device.type == "cuda":
                    self._on_host = [torch.empty(size, dtype=torch.int64, pin_memory=True) for _ in range(2)]
                    self._copied = [torch.cuda.Event() for _ in range(2)]
        return self._on_device

    def _copy_pinned(self, pieces: list[torch.Tensor], target: torch.Tensor) -> None:
        self._on_host.reverse()
        self._copied.reverse()
        self._copied[0].synchronize()
        torch.cat(pieces, out=self._on_host[0][: len(target)])
        target.copy_(self._on_host[0][: len(target)], non_blocking=True)
        self._copied[0].record(torch.cuda.current_stream(target.device))


def fetch_together(tensors: Sequence[torch.Tensor]) -> list[np.ndarray]:
    """Return the values of tensors (float32, or integers below 2**31) on the host, with one wait for their device."""
    if waits_are_free(tensors[0].device):
        return [tensor.numpy() for tensor in tensors]
    return values_in(bits_of(tensors).cpu(), tensors)


def bits_of(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the bits of tensors (float32, or integers below 2**31) end to end, int32 `[n]`."""
    bits = [tensor.view(torch.int32) if tensor.is_floating_point() else tensor.to(torch.int32) for tensor in tensors]
    return torch.cat([item.reshape(-1) for item in bits])


def values_in(bits: torch.Tensor, like: Sequence[torch.Tensor]) -> list[np.ndarray]:
    """Decode the bits that `bits_of` made, once they are on the host; `like` has the shapes and dtypes."""
    parts = bits.split([tensor.numel() for tensor in like])
    values = [part.view(torch.float32) if tensor.is_floating_point() else part for part, tensor in zip(parts, like)]
    return [value.numpy().reshape(tensor.shape) for value, tensor in zip(values, like)]
