"""Activations on a CPU, gated in one call where torch makes two."""

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import NamedTuple

import torch
from torch.nn.functional import gelu, relu, silu, softplus

from .few_tokens import has_kernels
from .kernels.gates import GELU, GELU_TANH, RELU, RELU_SQUARED, SILU, XIELU
from .kernels.program import CLAMPED_GATE, GATE, TIMES
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


def xielu(hidden: torch.Tensor, numbers: Sequence[torch.Tensor]) -> torch.Tensor:
    """
    Return the xIELU of `hidden`, `[N, size]`, which must pass `can_gate`.

    Args:
        numbers (sequence of `torch.Tensor`): Alpha of positive and of negative numbers, before their softplus, beta and
            epsilon: one number each, in the dtype of `hidden`.
    """
    return _activated(hidden, XIELU, hidden.shape[1], False, *(item.data_ptr() for item in numbers))


class ClampedGate(NamedTuple):
    """
    `g * sigmoid(alpha * g) * (up + 1)` of clamped numbers (GPT-OSS): gates g of at most `limit`, and `up` from `-limit`
    to `limit`.
    """

    alpha: float
    limit: float

    def by_torch(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return what `clamped_gated` computes."""
        wide = hidden.to(torch.promote_types(hidden.dtype, torch.float32))
        gate, up = wide[:, ::2].clamp(max=self.limit), wide[:, 1::2].clamp(-self.limit, self.limit)
        return (gate * torch.sigmoid(self.alpha * gate) * (up + 1)).to(hidden.dtype)


def clamped_gated(hidden: torch.Tensor, gate: ClampedGate) -> torch.Tensor:
    """
    Return `[N, size]` of `hidden`, `[N, 2 * size]`, each gate before its `up`; rounded once. `hidden` must pass
    `can_gate`.
    """
    num_tokens, size = len(hidden), hidden.shape[1] // 2
    outputs = hidden.new_empty(num_tokens, size)
    addresses = hidden.data_ptr(), outputs.data_ptr()
    run_operator(hidden.dtype, CLAMPED_GATE, _threads(outputs), num_tokens, size, *addresses, *gate)
    return outputs


def sigmoid_gated(x: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
    """
    Return `x`, `[N, size]`, times the sigmoids of `gates`, `[N, num]`, each of which is that of `size // num`
    neighbours; rounded after the sigmoid, too. Both must pass `can_gate`.
    """
    num, size = gates.shape[1], x.shape[1]
    is_one, outputs = num < size, torch.empty_like(x)
    lines, width = (x.numel() // (size // num), size // num) if is_one else (len(x), size)
    places = x.data_ptr(), width, False, gates.data_ptr(), 1 if is_one else width, 0, outputs.data_ptr()
    run_operator(x.dtype, TIMES, _threads(outputs), lines, width, *places, is_one, True)
    return outputs


def sigmoid_gated_by_torch(x: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
    """Return what `sigmoid_gated` computes."""
    return (x.unflatten(1, (gates.shape[1], -1)) * gates.sigmoid()[..., None]).flatten(1)


def _activated(hidden: torch.Tensor, activation: int, size: int, is_gated: bool, *own: int) -> torch.Tensor:
    num_tokens = len(hidden)
    outputs = hidden.new_empty(num_tokens, size)
    addresses = hidden.data_ptr(), outputs.data_ptr()
    run_operator(hidden.dtype, GATE, _threads(outputs), num_tokens, size, activation, is_gated, *addresses, *own)
    return outputs


def _threads(outputs: torch.Tensor) -> int:
    return 1 if outputs.numel() <= _SMALL else torch.get_num_threads()


# What each activation computes, by torch.
FUNCTIONS: dict[int, Callable[[torch.Tensor], torch.Tensor]] = {
    SILU: silu,
    GELU_TANH: partial(gelu, approximate="tanh"),
    GELU: gelu,
    RELU: relu,
    RELU_SQUARED: lambda x: relu(x).square(),
}


def _xielu_by_torch(hidden: torch.Tensor, numbers: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the xIELU in float64."""
    x, (positive, negative, beta, eps) = hidden.double(), (item.double() for item in numbers)
    below = (torch.expm1(torch.minimum(x, eps)) - x) * (beta + softplus(negative))
    return torch.where(x > 0, softplus(positive) * x * x, below) + beta * x


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
        clamped = ClampedGate(1.7, 2.0)
        pair = clamped_gated(hidden, clamped).double(), clamped.by_torch(hidden.double())
        numbers = [torch.full((1,), item, dtype=dtype, device="cpu") for item in (0.3, -1.2, 0.5, -1e-6)]
        every = hidden, hidden[:, :3].contiguous()
        sigmoids = [sigmoid_gated_by_torch(hidden.double(), item.double()) for item in every]
        further = [pair, (xielu(hidden, numbers).double(), _xielu_by_torch(hidden, numbers))]
        further += [(sigmoid_gated(hidden, item).double(), found) for item, found in zip(every, sigmoids)]
        return all(torch.allclose(*pair, rtol=rtol, atol=1e-5) for pair in further)
    except Exception:  # compilers raise errors of many types
        return False
