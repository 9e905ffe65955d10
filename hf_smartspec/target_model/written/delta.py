"""The gated delta rule of written-out layers (Qwen3.5), in place of attention."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch.nn.functional import silu

from ...cpu.norms import can_norm_gated, gated_rms_norm
from ...cpu.recurrence import Rates, can_convolve
from ..recurrent.cache import StateCache
from .parts import Map, Weighted

MAPS = "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"
_OTHERS = {"conv1d", "norm", "out_proj"}
NORM_EPS = 1e-6  # of queries and keys, under the root


class _Convolution(Weighted):
    """Weights of a causal convolution over the inputs of single channels."""

    def __init__(self, module: nn.Conv1d):
        super().__init__(module)
        self.width = module.kernel_size[0]

    def weight(self) -> torch.Tensor:
        """Return `[channels, width]`."""
        found: torch.Tensor = self._parameters()["weight"]
        return found.squeeze(1)

    def bias(self) -> torch.Tensor | None:
        return self._parameters()["bias"]


class _Rates(Weighted):
    """Weights from which decays are computed."""

    def __call__(self) -> Rates:
        parameters = self._parameters()
        return parameters["A_log"], parameters["dt_bias"]


class GatedNorm(Weighted):
    """`x / sqrt(mean(x ** 2) + eps) * weight * silu(gate)` over the last dimension."""

    def __init__(self, module: Any):
        super().__init__(module)
        self.eps, self.shape = module.variance_epsilon, tuple(module.weight.shape)

    def weight(self) -> torch.Tensor:
        found: torch.Tensor = self._parameters()["weight"]
        return found

    def __call__(self, x: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
        """
        Return the outputs `[N, heads, size]` of `x` in this shape and float32, and gates `[N, heads * size]`, in the
        dtype of these.
        """
        weight = self.weight()
        if can_norm_gated(x, gates, weight):
            return gated_rms_norm(x, gates, weight, self.eps)
        normed = torch.rms_norm(x, self.shape, None, self.eps).to(gates.dtype).mul_(weight)
        return (normed * silu(gates.reshape(x.shape).float())).to(gates.dtype)


@dataclass(eq=False)
class DeltaPlan:
    """
    Plan of a gated delta rule. Its layer's `query_key_value` maps inputs to queries, keys and values, gates of the
    norm, and what factors and decays are computed from, side by side; `attention_output` maps its outputs.

    Args:
        layer (`int`): Index of the layer in caches.
        key_heads, heads, key_size, value_size (`int`): Heads of keys and of values, and numbers of each.
    """

    layer: int
    key_heads: int
    heads: int
    key_size: int
    value_size: int
    convolution: _Convolution
    rates: _Rates
    norm: GatedNorm

    @cached_property
    def sizes(self) -> tuple[int, int, int, int]:
        """Numbers of queries, keys and values together, of gates, of factors, and of decays."""
        values = self.heads * self.value_size
        return 2 * self.key_heads * self.key_size + values, values, self.heads, self.heads


def delta_plan(module: Any) -> DeltaPlan | None:
    """Return the plan of a module, without its maps; None if it is of another structure."""
    if set(module._modules) != {*MAPS, *_OTHERS} or set(module._parameters) != {"A_log", "dt_bias"}:
        return None
    is_silu = module.activation == module.norm.activation == "silu"
    own = [module.A_log, module.dt_bias, module.norm.weight, *module.conv1d.parameters()]
    if len({parameter.dtype for parameter in own}) > 1:  # compiled code reads all as numbers of one kind
        return None
    if not is_silu or type(module.conv1d) is not nn.Conv1d:
        return None
    return DeltaPlan(
        module.layer_idx,
        module.num_k_heads,
        module.num_v_heads,
        module.head_k_dim,
        module.head_v_dim,
        _Convolution(module.conv1d),
        _Rates(module),
        GatedNorm(module.norm),
    )


def can_compile_delta(plan: DeltaPlan, dtype: torch.dtype) -> bool:
    """Return whether there is compiled code for it."""
    weight = plan.convolution.weight()
    is_vector = all(item.is_cpu and item.is_contiguous() and item.dtype is dtype for item in plan.rates())
    sizes = plan.key_size, plan.value_size, *plan.norm.shape
    with torch.no_grad():
        inputs = torch.empty(1, len(weight), dtype=dtype, device="cpu")
        can_read = can_convolve(inputs, weight, plan.convolution.bias())
    return can_read and is_vector and not any(size % 16 for size in sizes) and plan.norm.weight().dtype is dtype


def run_delta(plan: DeltaPlan, inputs: Map, x: torch.Tensor, cache: StateCache) -> torch.Tensor:
    """Run the rule on `x` of shape `[N, hidden_size]`, in float32; return `[N, heads * value_size]` in its dtype."""
    mixed, gates, factors, decays = inputs(x).split(plan.sizes, dim=1)
    cache.enter(plan.layer)
    convolved = cache.convolve(mixed, plan.convolution.weight(), plan.convolution.bias(), "silu", torch.float32)
    keys = plan.key_heads * plan.key_size
    query, key = (item.unflatten(1, (plan.key_heads, -1)) for item in convolved[:, : 2 * keys].split(keys, dim=1))
    value = convolved[:, 2 * keys :].unflatten(1, (plan.heads, -1))
    scale, rates = plan.key_size**-0.5, plan.rates()
    output = cache.scan(query, key, value, decays, factors, scale=scale, eps=NORM_EPS, rates=rates)
    return plan.norm(output, gates).flatten(1)
