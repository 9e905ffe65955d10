"""Small arrays on their way to a device, without waiting for it."""

import numpy as np
import torch


def to_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """A tensor of the array's values; on a CPU it shares their memory."""
    tensor = torch.from_numpy(array)
    if device.type == "cuda":
        tensor = tensor.pin_memory()  # else the copy waits for whatever the device has still to do
    return tensor.to(device, non_blocking=True)
