"""Checks of whether compiled code can read a tensor as it lies in memory."""

import torch

_APART = 32  # rows of which one counts in sums of columns, which take several times as long as those of rows


def is_vector(vector: torch.Tensor, num: int) -> bool:
    """Return whether a tensor is `num` contiguous numbers on the CPU."""
    return vector.is_cpu and vector.shape == (num,) and vector.is_contiguous()


def is_plain(x: torch.Tensor) -> bool:
    """Return whether a tensor is an ordinary one on the CPU, and no compiler or tracer records its operations."""
    return type(x) is torch.Tensor and x.is_cpu and not torch.compiler.is_compiling() and not torch.jit.is_tracing()


def version_of(tensor: torch.Tensor) -> int:
    """Return torch's count of changes in place; those of inference tensors are not counted."""
    return 0 if tensor.is_inference() else tensor._version


def has_sums_of_bits(weight: torch.Tensor) -> bool:
    """Return whether the bits of a weight lie as integers of 64 bits: another tensor may lie before it in memory."""
    return not weight.storage_offset() * weight.itemsize % 8 and not weight.shape[1] * weight.itemsize % 8


def sums_of_bits(weight: torch.Tensor) -> torch.Tensor:
    """Return the sums of all rows' bits, and those of columns' bits in some rows, in integers of 64 bits."""
    bits = weight.detach().view(torch.int64)
    return torch.cat([bits.sum(dim=1), bits[::_APART].sum(dim=0)])
