"""Norms, rotary embeddings and gates of half precision, in one call each where torch makes two to six."""

from functools import cache

import torch
from torch.nn.functional import silu

from .support import agrees, has_triton, next_power

_TOLERANCE = 1e-2  # relative to the largest value: one bit of bfloat16
_ROUNDS = {"enable_fp_fusion": False}  # products are rounded before they are added
_MOST = 2**14  # numbers of a line that is normalized by one program


def serves(x: torch.Tensor) -> bool:
    """Return whether compiled code computes from this tensor in half precision on a GPU."""
    is_tried = x.is_cuda and x.dtype.itemsize == 2 and x.dtype.is_floating_point
    return is_tried and not (torch.is_grad_enabled() and x.requires_grad) and _are_right(x.device, x.dtype)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, is_shifted: bool) -> torch.Tensor:
    """
    Return `x / sqrt(mean(x ** 2) + eps)`, rounded, times `weight`; if `is_shifted`, times `1 + weight` and rounded
    once. The last dimension of `x` has at most 16,384 numbers.
    """
    from . import kernels

    x, size = x.contiguous(), x.shape[-1]
    output = torch.empty_like(x)
    with torch.cuda.device_of(x):  # Triton launches on the current device
        kernels.norm[(x.numel() // size,)](
            x, weight, output, size, eps, IS_SHIFTED=is_shifted, SIZE=next_power(size), **_ROUNDS
        )
    return output


def can_norm(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Return whether `rms_norm` computes this."""
    is_known = serves(x) and weight.dtype is x.dtype and weight.is_contiguous()
    is_known = is_known and not (torch.is_grad_enabled() and weight.requires_grad)
    return is_known and 0 < x.shape[-1] <= _MOST and x.numel() > 0


def can_gate(hidden: torch.Tensor) -> bool:
    """Return whether `silu_gated` computes this."""
    return serves(hidden) and hidden.is_contiguous() and hidden.numel() > 0


def silu_gated(hidden: torch.Tensor) -> torch.Tensor:
    """Return `silu(gate) * up` of contiguous `hidden`, `[N, 2 * size]`, gate beside up, rounded after both."""
    from . import kernels

    num_tokens, size, block = len(hidden), hidden.shape[1] // 2, 1024
    output = hidden.new_empty(num_tokens, size)
    with torch.cuda.device_of(hidden):
        kernels.gate[(num_tokens, -(-size // block))](hidden, output, size, SIZE=block, **_ROUNDS)
    return output


def can_rotate(
    rotated: torch.Tensor,
    values: torch.Tensor,
    tables: tuple[torch.Tensor, torch.Tensor],
    memories: tuple[torch.Tensor, ...],
) -> bool:
    """Return whether `rotate_and_write` computes this."""
    tensors = [rotated, values, *tables, *memories]
    return (
        serves(rotated)
        and all([item.dtype is rotated.dtype and item.stride(-1) == 1 for item in tensors])
        and tables[0].stride() == tables[1].stride()
        and memories[0].stride() == memories[1].stride()
    )


def rotate_and_write(
    rotated: torch.Tensor,
    values: torch.Tensor,
    tables: tuple[torch.Tensor, torch.Tensor],
    num_heads: int,
    memories: tuple[torch.Tensor, torch.Tensor],
    lines: torch.Tensor,
) -> None:
    """
    Rotate queries in place, and write rotated keys, and values, to the memory.

    Args:
        rotated (`torch.Tensor` of shape `[N, num_heads + kv_heads, head_dim]`): Queries and keys.
        values (`torch.Tensor` of shape `[N, kv_heads, head_dim]`): Values.
        tables (tuple): Factors of the first `dim` dimensions and of these with their halves exchanged, `[N, 1, dim]`.
        memories (tuple): Keys and values of all lines, `[lines, kv_heads, head_dim]`, of equal strides.
        lines (`torch.Tensor` of shape `[N]`, int64): Where each token is written.
    """
    from . import kernels

    (cosines, sines), (keys, values_memory), block = tables, memories, 8
    num_tokens, kv_heads, dim = values.shape
    half = cosines.shape[-1] // 2
    grid = num_tokens, -(-(num_heads + 2 * kv_heads) // block)
    with torch.cuda.device_of(rotated):
        kernels.rotate_and_write[grid](
            rotated, values, cosines, sines, lines, keys, values_memory,
            rotated.stride(0), rotated.stride(1), values.stride(0), values.stride(1), cosines.stride(0),
            keys.stride(0), keys.stride(1), half,
            QUERY_HEADS=num_heads, KV_HEADS=kv_heads, DIM=dim, HALVES=next_power(half), DIMS=next_power(dim),
            HEADS=block, HAS_REST=dim > 2 * half, **_ROUNDS,
        )  # fmt: skip


@cache
def _are_right(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether there is compiled code for this device, and its results are those of torch."""
    if not has_triton(device):
        return False
    with torch.no_grad():
        generator = torch.Generator().manual_seed(0)
        x, y = (torch.randn(3, 2, 48, generator=generator).to(device, dtype) for _ in range(2))
        weight = x[0, 0].contiguous()
        expected = torch.rms_norm(y, (48,), None, 0.5).mul_(weight)
        shifted = torch.rms_norm(y.float(), (48,), weight.float() + 1.0, 0.5).to(dtype)
        hidden = y.view(3, 96)
        return (
            agrees("norms", lambda: rms_norm(y, weight, 0.5, False), expected, _TOLERANCE)
            and agrees("norms", lambda: rms_norm(y, weight, 0.5, True), shifted, _TOLERANCE)
            and agrees("gates", lambda: silu_gated(hidden), silu(hidden[:, :48]) * hidden[:, 48:], _TOLERANCE)
            and agrees("rotary embeddings", lambda: _rotated(x, y), _expected(x, y), _TOLERANCE)
        )


def _rotated(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Rotate half of the dimensions of one query and one key of 3 tokens; return them with what is in the memory."""
    rotated, memories = x.clone(), (torch.zeros_like(y[:, :1]), torch.zeros_like(y[:, :1]))
    tables = y[:, :1, :24].contiguous(), y[:, 1:, :24].contiguous()
    rotate_and_write(rotated, y[:, 1:], tables, 1, memories, torch.tensor([2, 0, 1], device=x.device))
    return torch.cat([rotated[:, :1], *memories], dim=1)


def _expected(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    rotated, own = x.clone(), x[..., :24]
    rotated[..., :24] = own * y[:, :1, :24] + own.roll(12, -1) * y[:, 1:, :24]
    places = [1, 2, 0]
    return torch.cat([rotated[:, :1], rotated[places, 1:], y[places, 1:]], dim=1)
