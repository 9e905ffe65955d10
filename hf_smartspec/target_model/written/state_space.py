"""State spaces (Mamba-2) of written-out layers, in place of attention."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch.nn.functional import silu

from ...cpu.norms import can_norm_states, state_norm
from ...cpu.recurrence import Rates
from ..forward_code import mentions
from ..recurrent.cache import StateCache
from ..recurrent.scan import steps_of
from .convolution import Convolution
from .delta import DeltaRates
from .names import STATE_SPACE
from .parts import Map, Weighted

_MODULES = {"in_proj", "conv1d", "norm", "out_proj", "act"}
# Names in the forwards of norms that are known: they multiply by gates first, and normalize groups.
_NORM_MENTIONS = frozenset(
    "dtype float32 functional group_size mean nn pow rsqrt shape silu to torch variance_epsilon view weight".split()
)
_NO_LIMITS = 0.0, float("inf")


class Skips(Weighted):
    """Factors by which the values of each head are added to its outputs."""

    def __call__(self) -> torch.Tensor:
        found: torch.Tensor = self._parameters()["D"]
        return found


class StateNorm(Weighted):
    """`x / sqrt(mean(x ** 2) + eps) * weight` of outputs that were multiplied by the SiLU of gates, in groups."""

    def __init__(self, module: Any, skips: Skips):
        super().__init__(module)
        self.skips, self.eps, self.size = skips, float(module.variance_epsilon), len(module.weight)
        self.groups = self.size // module.group_size

    def weight(self) -> torch.Tensor:
        found: torch.Tensor = self._parameters()["weight"]
        return found

    def __call__(self, x: torch.Tensor, values: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
        """
        Return the outputs `[N, size]` of `x`, which changes, and values in this shape and float32, and gates, in the
        dtype of these.
        """
        weight, skips = self.weight(), self.skips()
        if can_norm_states(x, values, gates, skips, weight, self.groups):
            return state_norm(x, values, gates, skips, weight, self.groups, self.eps)
        gated = (x + skips.float().repeat_interleave(self.size // len(skips)) * values) * silu(gates.float())
        normed = torch.rms_norm(gated.unflatten(1, (self.groups, -1)), (self.size // self.groups,), None, self.eps)
        return (normed.flatten(1) * weight.float()).to(gates.dtype)


@dataclass(eq=False)
class StateSpacePlan:
    """
    Plan of a state space. Its layer's `query_key_value` maps inputs to gates, to values, keys (B) and queries (C),
    which are convolved, and to time steps, side by side; `attention_output` maps its outputs.

    Args:
        layer (`int`): Index of the layer in caches.
        key_heads, heads, key_size, value_size (`int`): Heads of keys and of values, and numbers of each.
        limits (pair of `float`): Limits of time steps, which apply to prompts only.
    """

    layer: int
    key_heads: int
    heads: int
    key_size: int
    value_size: int
    convolution: Convolution
    rates: DeltaRates
    norm: StateNorm
    limits: tuple[float, float] = _NO_LIMITS

    @property
    def is_limited(self) -> bool:
        """Return whether it has limits, which apply to prompts only."""
        return self.limits != _NO_LIMITS

    @property
    def num_outputs(self) -> int:
        """Numbers of a token's output."""
        return self.heads * self.value_size

    @cached_property
    def sizes(self) -> tuple[int, int, int]:
        """Numbers of gates, of what is convolved, and of time steps."""
        return self.num_outputs, self.num_outputs + 2 * self.key_heads * self.key_size, self.heads

    @property
    def channels(self) -> int:
        """Numbers of a token that are convolved."""
        return self.sizes[1]

    @property
    def scale(self) -> float:
        """Factor of queries."""
        return 1.0

    @cached_property
    def places(self) -> tuple[int, int, int, int, int, int]:
        """
        Places of what is convolved, gates, and time steps in what maps return; and of queries, keys and values in what
        is convolved.
        """
        (values, channels, _), keys = self.sizes, self.key_heads * self.key_size
        return values, 0, values + channels, values + keys, values, 0

    def run(self, inputs: Map, x: torch.Tensor, cache: StateCache) -> torch.Tensor:
        """Run it on `x` of shape `[N, hidden_size]`, in float32; return `[N, num_outputs]` in its dtype."""
        gates, mixed, steps = inputs(x).split(self.sizes, dim=1)
        cache.enter(self.layer)
        is_limited = self.is_limited and bool(cache.is_prompt().any())
        # Compiled recurrences after compiled convolutions have decays of one dtype with their inputs: of time steps
        # that are limited, these are float32.
        dtype, weight, rates = None if is_limited else torch.float32, self.convolution.weight(), self.rates()
        convolved = cache.convolve(mixed, weight, self.convolution.bias(), "silu", dtype).float()
        both = self.key_heads * self.key_size
        values, key, query = convolved.split([self.num_outputs, both, both], dim=1)
        value = values.unflatten(1, (self.heads, -1))
        key, query = (item.unflatten(1, (self.key_heads, -1)) for item in (key, query))
        if is_limited:
            limited = self._limited(steps, rates, cache.is_prompt())
            written, decays = value * limited[..., None], -rates[0].float().exp() * limited
            output = cache.scan(query, key, written, decays, None, is_transposed=True)
        else:
            output = cache.scan(query, key, value, steps, None, is_transposed=True, rates=rates)
        return self.norm(output.flatten(1), values, gates)

    def _limited(self, steps: torch.Tensor, rates: Rates, is_prompt: torch.Tensor) -> torch.Tensor:
        found = steps_of(steps, rates)
        return torch.where(is_prompt[:, None], found.clamp(*self.limits), found)

    def can_compile(self, dtype: torch.dtype) -> bool:
        """Return whether there is compiled code for it."""
        own = [*self.rates(), self.norm.skips(), self.norm.weight()]
        is_vector = all(item.is_cpu and item.is_contiguous() and item.dtype is dtype for item in own)
        sizes = self.key_size, self.value_size, self.norm.size // self.norm.groups
        return is_vector and not any(size % 16 for size in sizes) and self.convolution.can_compile(dtype)


def state_space_plan(module: Any) -> StateSpacePlan | None:
    """Return the plan of a module, without its maps; None if it is of another structure."""
    if not set(module._modules) <= _MODULES or set(module._parameters) != {*STATE_SPACE} or module._buffers:
        return None
    norm, convolution = module.norm, module.conv1d
    if type(convolution) is not nn.Conv1d or set(norm._parameters) != {"weight"}:
        return None
    if module.activation not in ("silu", "swish") or not mentions(type(norm)) <= _NORM_MENTIONS:
        return None
    own = [*module._parameters.values(), norm.weight, *convolution.parameters()]
    if len({parameter.dtype for parameter in own}) > 1:  # compiled code reads all as numbers of one kind
        return None
    low, high = module.time_step_limit
    plan = StateSpacePlan(
        module.layer_idx,
        module.n_groups,
        module.num_heads,
        module.ssm_state_size,
        module.head_dim,
        Convolution(convolution),
        DeltaRates(module),
        StateNorm(norm, Skips(module)),
        (float(low), float(high)),
    )
    sizes = plan.sizes
    is_known = convolution.out_channels == convolution.groups == sizes[1] and module.in_proj.out_features == sum(sizes)
    return plan if is_known and plan.norm.size == plan.num_outputs else None
