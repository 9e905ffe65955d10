"""Small arrays on their way to a device, without waiting for it."""

from collections.abc import Sequence

import numpy as np
import torch

_WITHOUT_FLOAT64 = {"mps"}


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
    flat = to_device(torch.cat([tensor.reshape(-1) for tensor in tensors]).numpy(), device)
    parts = flat.split([tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors)]


def fetch_together(tensors: Sequence[torch.Tensor]) -> list[np.ndarray]:
    """The values of tensors (float32, or integers below 2**31) on the host, with one wait for their device."""
    if waits_are_free(tensors[0].device):
        return [tensor.numpy() for tensor in tensors]
    bits = [tensor.view(torch.int32) if tensor.is_floating_point() else tensor.to(torch.int32) for tensor in tensors]
    flat = torch.cat([item.reshape(-1) for item in bits]).cpu()
    parts = flat.split([tensor.numel() for tensor in tensors])
    values = [part.view(torch.float32) if tensor.is_floating_point() else part for part, tensor in zip(parts, tensors)]
    return [value.numpy().reshape(tensor.shape) for value, tensor in zip(values, tensors)]
