"""Gated activations on a CPU, in one call where torch makes two."""

from functools import cache

import torch
from torch.nn.functional import gelu, silu

from .few_tokens import has_kernels
from .kernels.gates import GELU_TANH, SILU
from .kernels.program import GATE
from .program import DTYPES, run_operator
from .tensor_checks import is_plain

_SMALL = 2**14  # numbers that one thread has computed before a second one has begun


def can_gate(hidden: torch.Tensor) -> bool:
    """Return whether compiled code computes gates from `hidden`, `[N, 2 * size]`, as it lies in memory."""
    return (
        is_plain(hidden)
        and hidden.is_contiguous()
        and not (torch.is_grad_enabled() and hidden.requires_grad)
        and has_gates(hidden.dtype)
    )


def gated(hidden: torch.Tensor, activation: int) -> torch.Tensor:
    """
    Return `act(gate) * up` of `hidden` (`[N, 2 * size]`, gate beside up), `[N, size]`, rounded after the activation,
    too. `activation` is `SILU` or `GELU_TANH`; `hidden` must pass `can_gate`.
    """
    num_tokens, size = len(hidden), hidden.shape[1] // 2
    outputs = hidden.new_empty(num_tokens, size)
    num_threads = 1 if num_tokens * size <= _SMALL else torch.get_num_threads()
    addresses = hidden.data_ptr(), outputs.data_ptr()
    run_operator(hidden.dtype, GATE, num_threads, num_tokens, size, activation, *addresses)
    return outputs


@cache
def has_gates(dtype: torch.dtype) -> bool:
    """Return whether there is compiled code for this CPU, and its results are right."""
    if dtype not in DTYPES or not has_kernels(dtype):  # the latter logs why
        return False
    try:
        hidden = torch.linspace(-9, 9, 96, device="cpu").view(2, 48).to(dtype)
        gate, up = hidden.double().chunk(2, dim=1)
        expected = {SILU: silu(gate) * up, GELU_TANH: gelu(gate, approximate="tanh") * up}
        found = {activation: gated(hidden, activation).double() for activation in expected}
        rtol = 1e-5 if dtype is torch.float32 else 2e-2
        return all(torch.allclose(found[key], expected[key], rtol=rtol, atol=1e-5) for key in expected)
    except Exception:  # compilers raise errors of many types
        return False
