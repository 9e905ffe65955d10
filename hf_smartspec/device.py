"""Small arrays on their way to a device, without waiting for it."""

from collections.abc import Sequence

import numpy as np
import torch


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
    flat = to_device(torch.cat([tensor.reshape(-1) for tensor in tensors]).numpy(), device)
    parts = flat.split([tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors)]
