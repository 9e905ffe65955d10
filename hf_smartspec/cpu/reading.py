"""What compiled code can read as it lies in memory."""

import torch


def is_vector(vector: torch.Tensor, num: int) -> bool:
    """Whether these are so many numbers side by side, on the CPU."""
    return vector.is_cpu and vector.shape == (num,) and vector.is_contiguous()


def is_plain(x: torch.Tensor) -> bool:
    """Whether a tensor has memory, and nobody takes down what is done with it."""
    return type(x) is torch.Tensor and x.is_cpu and not torch.compiler.is_compiling() and not torch.jit.is_tracing()
