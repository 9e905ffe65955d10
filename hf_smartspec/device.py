"""Small arrays on their way to a device, without waiting for it."""

from collections.abc import Sequence

import numpy as np
import torch

_WITHOUT_FLOAT64 = {"mps"}
_LEAST_BUFFER = 2**12  # numbers


def has_float64(device: torch.device) -> bool:
    """Whether the device computes in double precision."""
    return device.type not in _WITHOUT_FLOAT64


def waits_are_free(device: torch.device) -> bool:
    """Whether the host can look at what the device has computed without waiting for it: where they are one."""
    return device.type == "cpu"


def to_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """A tensor of the array's values; on a CPU it shares their memory."""
    tensor = torch.from_numpy(array)
    if device.type == "cuda":
        tensor = tensor.pin_memory()  # else the copy waits for whatever the device has still to do
    return tensor.to(device, non_blocking=True)


def send_together(tensors: Sequence[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """Tensors (int64, of the host) on a device, where they are views of one that was sent; a CPU's stay as they are."""
    if device.type == "cpu":
        return list(tensors)
    if not tensors:
        return []
    return _parts(to_device(torch.cat([tensor.reshape(-1) for tensor in tensors]).numpy(), device), tensors)


def _parts(flat: torch.Tensor, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """What is one behind the other there, in the shapes that it has here."""
    parts = flat.split([tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors)]


class Wire:
    """
    What is sent along it arrives in one buffer on the device, always the same one as long as it is large enough: who
    sends again has no use for what came before. The device's own order of work sees to it that nothing is overwritten
    which is still needed there; the host waits for earlier copies from its own buffers, of which there are two.
    """

    def __init__(self) -> None:
        self._there: torch.Tensor | None = None
        self._here: list[torch.Tensor] = []
        self._copied: list[torch.cuda.Event] = []  # that what is in the buffers here has arrived

    def send(self, tensors: Sequence[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
        """Tensors (int64, of the host) on a device, where they are views of one buffer; a CPU's stay as they are."""
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
        if self._there is None or len(self._there) < size or self._there.device != device:
            size = max(_LEAST_BUFFER, 1 << (size - 1).bit_length())
            with torch.inference_mode(False):  # others write to it outside
                self._there = torch.empty(size, dtype=torch.int64, device=device)
                if device.type == "cuda":
                    self._here = [torch.empty(size, dtype=torch.int64, pin_memory=True) for _ in range(2)]
                    self._copied = [torch.cuda.Event() for _ in range(2)]
        return self._there

    def _copy_pinned(self, pieces: list[torch.Tensor], target: torch.Tensor) -> None:
        self._here.reverse()
        self._copied.reverse()
        self._copied[0].synchronize()
        torch.cat(pieces, out=self._here[0][: len(target)])
        target.copy_(self._here[0][: len(target)], non_blocking=True)
        self._copied[0].record(torch.cuda.current_stream(target.device))


def fetch_together(tensors: Sequence[torch.Tensor]) -> list[np.ndarray]:
    """The values of tensors (float32, or integers below 2**31) on the host, with one wait for their device."""
    if waits_are_free(tensors[0].device):
        return [tensor.numpy() for tensor in tensors]
    return values_in(bits_of(tensors).cpu(), tensors)


def bits_of(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Tensors (float32, or integers below 2**31) end to end, int32 `[n]`: floats as the bits that they have."""
    bits = [tensor.view(torch.int32) if tensor.is_floating_point() else tensor.to(torch.int32) for tensor in tensors]
    return torch.cat([item.reshape(-1) for item in bits])


def values_in(bits: torch.Tensor, like: Sequence[torch.Tensor]) -> list[np.ndarray]:
    """The values of which `bits_of` has made these bits, once they are on the host; `like` has shapes and dtypes."""
    parts = bits.split([tensor.numel() for tensor in like])
    values = [part.view(torch.float32) if tensor.is_floating_point() else part for part, tensor in zip(parts, like)]
    return [value.numpy().reshape(tensor.shape) for value, tensor in zip(values, like)]
