"""Checks of whether compiled code can read a tensor as it lies in memory."""

import torch


def is_vector(vector: torch.Tensor, num: int) -> bool:
    """Return whether a tensor is `num` contiguous numbers on the CPU."""
    return vector.is_cpu and vector.shape == (num,) and vector.is_contiguous()


def is_plain(x: torch.Tensor) -> bool:
    """Return whether a tensor is an ordinary one on the CPU, and no compiler or tracer records its operations."""
    return type(x) is torch.Tensor and x.is_cpu and not torch.compiler.is_compiling() and not torch.jit.is_tracing()


def version_of(tensor: torch.Tensor) -> int:
    """Return torch's count of changes in place; those of inference tensors are not counted."""
    return 0 if tensor.is_inference() else tensor._version
