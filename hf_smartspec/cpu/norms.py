"""Norms of a few tokens on a CPU, in one call where torch makes up to ten."""

from functools import cache

import torch

from .few_tokens import has_kernels, most_tokens
from .kernels.norms import CENTERED, CENTERED_SHIFTED, ONCE, PLAIN, SHIFTED
from .kernels.program import GATED_NORM, NORM, STATE_NORM
from .program import DTYPES, run_operator
from .tensor_checks import is_plain, is_vector

_SMALL = 2**15  # numbers that one thread has normalized before a second one has begun


def can_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> bool:
    """
    Return whether compiled code is faster for norms over the last dimension, and can read the tensors as they lie.
    """
    return (
        is_plain(x)
        and x.dtype is weight.dtype
        and 0 < x.shape[0] <= most_tokens(x.dtype)  # as for products, so that both reorder sums together
        and x.numel() > 0
        and not x.shape[-1] % 16
        and is_vector(weight, x.shape[-1])
        and (bias is None or (bias.dtype is x.dtype and is_vector(bias, x.shape[-1])))
        and not (torch.is_grad_enabled() and any(item.requires_grad for item in (x, weight, bias) if item is not None))
        and has_norms(x.dtype)
    )


def few_token_norm(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float, form: int
) -> torch.Tensor:
    """
    Return the norm of a `form`: `x / sqrt(mean(x ** 2) + eps)` times `weight`, rounded in between, too (`PLAIN`), or
    once (`ONCE`), or times `1 + weight` and rounded once (`SHIFTED`); or the layer norm, with a bias if there is one,
    rounded once (`CENTERED`), or times `1 + weight`, which is rounded, too (`CENTERED_SHIFTED`). Arguments must pass
    `can_norm`.
    """
    x, size = x.contiguous(), x.shape[-1]
    outputs = x.new_empty(x.shape)
    addresses = x.data_ptr(), weight.data_ptr(), 0 if bias is None else bias.data_ptr(), outputs.data_ptr()
    num_threads = torch.get_num_threads() if x.numel() > _SMALL else 1
    fields = x.numel() // size, 1, size, size, size, size, form, *addresses, 0, eps, 1.0
    run_operator(x.dtype, NORM, num_threads, *fields)
    return outputs


def can_norm_gated(x: torch.Tensor, gates: torch.Tensor, weight: torch.Tensor) -> bool:
    """Return whether compiled code computes `gated_rms_norm`, and can read the tensors as they lie."""
    return (
        is_plain(x)
        and x.dtype is torch.float32
        and 0 < x.shape[0] <= most_tokens(gates.dtype)
        and not x.shape[-1] % 16
        and is_plain(gates)
        and gates.stride(1) == 1
        and gates.dtype is weight.dtype
        and is_vector(weight, x.shape[-1])
        and not (torch.is_grad_enabled() and any(item.requires_grad for item in (x, gates, weight)))
        and has_norms(gates.dtype)
    )


def gated_rms_norm(x: torch.Tensor, gates: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """
    Return the RMS norm of `x`, `[N, heads, size]` in float32, times the SiLU of gates, `[N, heads * size]`, rounded to
    the dtype of these as a `PLAIN` norm rounds. Arguments must pass `can_norm_gated`.
    """
    x, (num, heads, size), outputs = x.contiguous(), x.shape, x.new_empty(x.shape, dtype=gates.dtype)
    addresses = x.data_ptr(), weight.data_ptr(), gates.data_ptr(), gates.stride(0), outputs.data_ptr()
    num_threads = torch.get_num_threads() if x.numel() > _SMALL else 1
    run_operator(gates.dtype, GATED_NORM, num_threads, num, heads, size, *addresses, eps)
    return outputs


def can_norm_states(
    x: torch.Tensor, values: torch.Tensor, gates: torch.Tensor, skips: torch.Tensor, weight: torch.Tensor, groups: int
) -> bool:
    """Return whether compiled code computes `state_norm`, and can read the tensors as they lie."""
    items, dtype = (x, values, gates, skips, weight), gates.dtype
    return (
        is_plain(x)
        and x.is_contiguous()
        and is_plain(values)
        and is_plain(gates)
        and x.dtype is values.dtype is torch.float32
        and skips.dtype is weight.dtype is dtype
        and 0 < x.shape[0] <= most_tokens(dtype)
        and not x.shape[1] // groups % 16
        and values.stride(1) == gates.stride(1) == 1
        and is_vector(skips, len(skips))
        and is_vector(weight, x.shape[1])
        and not (torch.is_grad_enabled() and any(item.requires_grad for item in items))
        and has_norms(dtype)
    )


def state_norm(
    x: torch.Tensor,
    values: torch.Tensor,
    gates: torch.Tensor,
    skips: torch.Tensor,
    weight: torch.Tensor,
    groups: int,
    eps: float,
) -> torch.Tensor:
    """
    Return the RMS norms, group by group, of `(x + skips * values) * silu(gates)`, rounded once, to the dtype of gates;
    `x` changes. Arguments must pass `can_norm_states`.

    Args:
        x, values (`torch.Tensor` of shape `[N, size]`, float32): Outputs of states, and what they were written from.
        gates (`torch.Tensor` of shape `[N, size]`), weight (`torch.Tensor` of shape `[size]`): In one dtype.
        skips (`torch.Tensor` of shape `[heads]`): Factors of the values of each head, in that dtype.
    """
    (num, size), outputs = x.shape, torch.empty_like(x, dtype=gates.dtype)
    own = x.data_ptr(), values.data_ptr(), values.stride(0), skips.data_ptr(), weight.data_ptr()
    fields = num, groups, size // groups, len(skips), *own, gates.data_ptr(), gates.stride(0), outputs.data_ptr(), eps
    run_operator(gates.dtype, STATE_NORM, torch.get_num_threads() if x.numel() > _SMALL else 1, *fields)
    return outputs


@cache
def has_norms(dtype: torch.dtype) -> bool:
    """Return whether there is compiled code for this CPU, and its results are right."""
    if dtype not in DTYPES or not has_kernels(dtype):  # the latter logs why
        return False
    try:
        generator = torch.Generator().manual_seed(0)
        shapes = (3, 48), (48,), (48,)
        x, weight, bias = (torch.randn(shape, generator=generator, device="cpu").to(dtype) for shape in shapes)
        forms = PLAIN, ONCE, SHIFTED, CENTERED, CENTERED_SHIFTED
        found = [few_token_norm(x, weight, bias if form >= CENTERED else None, 0.5, form).double() for form in forms]
        x, raised, weight, bias = (item.double() for item in (x, weight + 1, weight, bias))
        normalized = torch.rms_norm(x, (48,), None, 0.5)
        expected = [normalized * factor for factor in (weight, weight, weight + 1)]
        expected += [torch.layer_norm(x, (48,), factor, bias, 0.5) for factor in (weight, raised)]
        return all(torch.allclose(*pair, rtol=2e-2, atol=1e-5) for pair in zip(found, expected))
    except Exception:  # compilers raise errors of many types
        return False
