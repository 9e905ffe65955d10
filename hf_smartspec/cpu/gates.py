"""Activations on a CPU, gated in one call where torch makes two."""

from collections.abc import Callable
from functools import cache, partial

import torch
from torch.nn.functional import gelu, relu, silu

from .few_tokens import has_kernels
from .kernels.gates import GELU, GELU_TANH, RELU, RELU_SQUARED, SILU
from .kernels.program import GATE
from .program import DTYPES, run_operator
from .tensor_checks import is_plain

_SMALL = 2**14  # numbers that one thread has computed before a second one has begun


def can_gate(hidden: torch.Tensor) -> bool:
    """Return whether compiled code computes activations of `hidden`, `[N, size]`, as it lies in memory."""
    return (
        is_plain(hidden)
        and hidden.is_contiguous()
        and not (torch.is_grad_enabled() and hidden.requires_grad)
        and has_gates(hidden.dtype)
    )


def gated(hidden: torch.Tensor, activation: int) -> torch.Tensor:
    """
    Return `act(gate) * up` of `hidden` (`[N, 2 * size]`, gate beside up), `[N, size]`, rounded after the activation,
    too. `activation` is one of those in `kernels.gates`; `hidden` must pass `can_gate`.
    """
    return _activated(hidden, activation, hidden.shape[1] // 2, is_gated=True)


def activated(hidden: torch.Tensor, activation: int) -> torch.Tensor:
    """Return `act(hidden)` of `[N, size]`; arguments as those of `gated`."""
    return _activated(hidden, activation, hidden.shape[1], is_gated=False)


def _activated(hidden: torch.Tensor, activation: int, size: int, is_gated: bool) -> torch.Tensor:
    num_tokens = len(hidden)
    outputs = hidden.new_empty(num_tokens, size)
    num_threads = 1 if num_tokens * size <= _SMALL else torch.get_num_threads()
    addresses = hidden.data_ptr(), outputs.data_ptr()
    run_operator(hidden.dtype, GATE, num_threads, num_tokens, size, activation, is_gated, *addresses)
    return outputs


# What each activation computes, by torch.
FUNCTIONS: dict[int, Callable[[torch.Tensor], torch.Tensor]] = {
    SILU: silu,
    GELU_TANH: partial(gelu, approximate="tanh"),
    GELU: gelu,
    RELU: relu,
    RELU_SQUARED: lambda x: relu(x).square(),
}


@cache
def has_gates(dtype: torch.dtype) -> bool:
    """Return whether there is compiled code for this CPU, and its results are right."""
    if dtype not in DTYPES or not has_kernels(dtype):  # the latter logs why
        return False
    try:
        hidden = torch.linspace(-9, 9, 96, device="cpu").view(2, 48).to(dtype)
        gate, up = hidden.double().chunk(2, dim=1)
        rtol = 1e-5 if dtype is torch.float32 else 2e-2
        for key, function in FUNCTIONS.items():
            whole = activated(hidden, key).double()
            pairs = (gated(hidden, key).double(), function(gate) * up), (whole, function(hidden.double()))
            if not all(torch.allclose(*pair, rtol=rtol, atol=1e-5) for pair in pairs):
                return False
        return True
    except Exception:  # compilers raise errors of many types
        return False
