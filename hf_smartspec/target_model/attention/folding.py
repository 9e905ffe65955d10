"""Conversion of packed queries to the padded batch of a part, with grouped heads as further queries, and back."""

import torch

from ..layout.step_layout import PaddedPart


def fold(packed: torch.Tensor, part: PaddedPart, kv_heads: int) -> torch.Tensor:
    """
    Reshape `[tokens, heads, head_dim]` to `[R, kv_heads, S * groups, head_dim]`, so that keys are not repeated for
    grouped heads.
    """
    padded = packed if part.gather is None else packed.index_select(0, part.gather)
    num_heads = packed.shape[1]
    if part.width == 1:
        return padded.view(part.num_rows, kv_heads, num_heads // kv_heads, -1)
    folded = padded.view(part.num_rows, part.width, kv_heads, num_heads // kv_heads, -1).transpose(1, 2)
    return folded.reshape(part.num_rows, kv_heads, part.width * (num_heads // kv_heads), -1)


def unfold(output: torch.Tensor, part: PaddedPart, num_heads: int) -> torch.Tensor:
    """Reshape `[R, kv_heads, S * groups, dim]` to `[R * S, heads, dim]`."""
    if part.width > 1:
        num_rows, kv_heads, _, dim = output.shape
        output = output.view(num_rows, kv_heads, part.width, num_heads // kv_heads, dim).transpose(1, 2)
    return output.reshape(part.num_rows * part.width, num_heads, -1)


def unpad(padded: torch.Tensor, part: PaddedPart) -> torch.Tensor:
    """Drop padding: `[R * S, ...]` to `[tokens, ...]`."""
    return padded if part.scatter is None else padded.index_select(0, part.scatter)
