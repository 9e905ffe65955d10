"""The gated delta rule of written-out layers (Qwen3.5, Qwen3-Next), in place of attention."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn
from torch.nn.functional import silu

from ...cpu.norms import can_norm_gated, gated_rms_norm
from ...cpu.recurrence import Rates
from ..recurrent.cache import StateCache
from .convolution import Convolution
from .parts import Map, Weighted

_MAPS = "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"
_MAPS_BY_HEAD = "in_proj_qkvz", "in_proj_ba"
_OTHERS = {"conv1d", "norm", "out_proj"}
NORM_EPS = 1e-6  # of queries and keys, under the root


class DeltaRates(Weighted):
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
        is_by_head (`bool`): Whether what belongs to each head of keys lies together in what maps return, factors and
            decays in a second block (Qwen3-Next).
    """

    layer: int
    key_heads: int
    heads: int
    key_size: int
    value_size: int
    convolution: Convolution
    rates: DeltaRates
    norm: GatedNorm
    is_by_head: bool = False
    is_limited: ClassVar[bool] = False  # whether it has limits that apply to prompts only

    @cached_property
    def sizes(self) -> tuple[int, int, int, int]:
        """Numbers of queries, keys and values together, of gates, of factors, and of decays."""
        values = self.num_outputs
        return 2 * self.key_heads * self.key_size + values, values, self.heads, self.heads

    @property
    def channels(self) -> int:
        """Numbers of a token that are convolved."""
        return self.sizes[0]

    @property
    def scale(self) -> float:
        """Factor of queries."""
        return self.key_size**-0.5

    @cached_property
    def places(self) -> tuple[int, int, int, int, int, int]:
        """
        Places of what is convolved, gates, and decays, which factors precede, in what maps return; and of queries, keys
        and values in what is convolved.
        """
        (channels, values, heads, _), keys = self.sizes, self.key_heads * self.key_size
        return 0, channels, channels + values + heads, 0, keys, 2 * keys

    @cached_property
    def parts(self) -> np.ndarray:
        """
        Places of the parts of `sizes`, head by head, in what maps `by head` return: begin and length of each,
        `[parts, 2]` int64.
        """
        found, begin = [], 0
        for lengths in self._blocks:
            width = sum(lengths)
            firsts = begin + np.cumsum([0, *lengths[:-1]])
            found += [
                (first + head * width, num) for first, num in zip(firsts, lengths) for head in range(self.key_heads)
            ]
            begin += self.key_heads * width
        return np.array(found, np.int64)

    @property
    def _blocks(self) -> tuple[tuple[int, ...], ...]:
        """Numbers of a head of keys in each of the two blocks: its query, key, values and gates; factors and decays."""
        groups = self.heads // self.key_heads
        values = groups * self.value_size
        return (self.key_size, self.key_size, values, values), (groups, groups)

    def _arranged(self, states: torch.Tensor) -> torch.Tensor:
        """Return what maps return, `[N, outputs]`, in the order of `sizes`."""
        if not self.is_by_head:
            return states
        blocks = states.split([self.key_heads * sum(lengths) for lengths in self._blocks], dim=1)
        kinds = [block.unflatten(1, (self.key_heads, -1)).split(own, 2) for block, own in zip(blocks, self._blocks)]
        return torch.cat([kind.flatten(1) for block in kinds for kind in block], dim=1)

    @property
    def num_outputs(self) -> int:
        """Numbers of a token's output."""
        return self.heads * self.value_size

    def run(self, inputs: Map, x: torch.Tensor, cache: StateCache) -> torch.Tensor:
        """Run the rule on `x` of shape `[N, hidden_size]`, in float32; return `[N, num_outputs]` in its dtype."""
        mixed, gates, factors, decays = self._arranged(inputs(x)).split(self.sizes, dim=1)
        cache.enter(self.layer)
        convolved = cache.convolve(mixed, self.convolution.weight(), self.convolution.bias(), "silu", torch.float32)
        keys = self.key_heads * self.key_size
        query, key = (item.unflatten(1, (self.key_heads, -1)) for item in convolved[:, : 2 * keys].split(keys, dim=1))
        value = convolved[:, 2 * keys :].unflatten(1, (self.heads, -1))
        rates = self.rates()
        output = cache.scan(query, key, value, decays, factors, scale=self.scale, eps=NORM_EPS, rates=rates)
        return self.norm(output, gates).flatten(1)

    def can_compile(self, dtype: torch.dtype) -> bool:
        """Return whether there is compiled code for it."""
        sizes = self.key_size, self.value_size, *self.norm.shape
        is_vector = all(item.is_cpu and item.is_contiguous() and item.dtype is dtype for item in self.rates())
        is_known = is_vector and not any(size % 16 for size in sizes) and self.norm.weight().dtype is dtype
        return is_known and self.convolution.can_compile(dtype)


def delta_plan(module: Any) -> DeltaPlan | None:
    """Return the plan of a module, without its maps; None if it is of another structure."""
    is_by_head = set(module._modules) == {*_MAPS_BY_HEAD, *_OTHERS}
    if not is_by_head and set(module._modules) != {*_MAPS, *_OTHERS}:
        return None
    if set(module._parameters) != {"A_log", "dt_bias"}:
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
        Convolution(module.conv1d),
        DeltaRates(module),
        GatedNorm(module.norm),
        is_by_head,
    )
