"""Mixtures of experts of a written-out layer."""

import copy
import inspect
import weakref
from itertools import product as pairs_of
from typing import Any

import torch
from torch import nn

from ...cpu.experts import Routing, combined, route
from ...cpu.few_tokens import has_kernels, product
from ...cpu.gates import can_gate, gated
from ..forward_code import mentions
from .mlps import FUNCTIONS, MLP, written_activation
from .parts import Map, Rows, Weighted

_ROUTER, _PROBES = ("gate", "router"), 16
_OWN, _SHARED = ("gate", "experts"), ("shared_expert", "shared_expert_gate")
_EPS = 0.0, 1e-6, 1e-20  # added to sums of weights
_TOLERANCE = 1e-5
# Names in the forwards of blocks of experts and their routers that are known.
_MENTIONS = frozenset(
    "F T dtype empty_like expert_bias experts float functional gate gather hidden_dim input_size jitter_noise linear "
    "nn norm_topk_prob num_experts reshape routed_scaling_factor router shape shared_expert shared_expert_gate "
    "sigmoid size softmax sum to top_k topk torch training type_as uniform_ use_expert_bias view weight".split()
)


_EXPERT_MENTIONS = frozenset(
    "act_fn chunk down_proj dtype functional gate_up_proj greater index_add_ linear nn no_grad nonzero num_experts "
    "one_hot permute sum to torch where zeros_like".split()
)
_IMPLEMENTATIONS = None, "eager", "batched_mm", "grouped_mm"  # transformers' own, by the entry of configs
_FLAGS = {"has_gate": True, "has_bias": False, "has_post_expert_norm": False, "is_transposed": False}
_FLAGS |= {"is_concatenated": True, "_is_expert_parallel": False}


class Experts(Weighted):
    """
    The sum of the outputs of each token's experts, of which a token's numbers do not depend on the others.

    Args:
        block (`nn.Module`): The block of experts and their router.
        routing (`Routing`): How experts are chosen.
        activation (`int`): The activation of gates, one of those in `cpu.kernels.gates`.

    Attributes:
        shared (pair of `Callable`, *optional*): An MLP that all tokens share, and the map to its gate.
    """

    def __init__(self, block: Any, routing: Routing, activation: int):
        super().__init__(block.experts)
        self.routing, self.activation = routing, activation
        self.shared: tuple[MLP, Map] | None = None
        self.router, self._block = Rows(_router_of(block)), weakref.ref(block)
        self.num, self.hidden, self.size = block.experts.down_proj.shape

    @property
    def products(self) -> tuple[Map, ...]:
        """Products of all tokens with one weight."""
        return (self.router, *([] if self.shared is None else (*self.shared[0].products, self.shared[1])))

    def bias(self) -> torch.Tensor | None:
        """Return the summand of probabilities where experts are chosen, `[experts]`, if there is one."""
        block: Any = self._block()
        return block._buffers.get("expert_bias")

    def weights(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return gates beside their numbers, `[experts, 2 * size, hidden]`, and outputs, `[experts, hidden, size]`."""
        parameters = self._parameters()
        return parameters["gate_up_proj"], parameters["down_proj"]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        choices, weights = route(self.router(x), self.bias(), self.routing)
        (inputs, outputs), chosen = self.weights(), self.routing.num_chosen
        flat = choices.flatten()
        found = x.new_empty(len(flat), self.hidden)
        for expert in flat.unique().tolist():
            (own,) = (flat == expert).nonzero(as_tuple=True)
            hidden = product(x[own // chosen], inputs[expert], None)
            found[own] = product(self._activated(hidden), outputs[expert], None)
        shared = [] if self.shared is None else [item(x).contiguous() for item in self.shared]
        return combined(found.view(len(x), chosen, -1), weights, *shared)

    def _activated(self, hidden: torch.Tensor) -> torch.Tensor:
        if can_gate(hidden):
            return gated(hidden, self.activation)
        gate, up = hidden.chunk(2, dim=-1)
        return FUNCTIONS[self.activation](gate) * up


def written_experts(block: Any, dtype: torch.dtype) -> Experts | None:
    """Return a block of experts in compiled code, on a CPU; None if it is of another structure or without such code."""
    router, experts = _router_of(block), block._modules.get("experts")
    if router is None or experts is None or (len(block._modules) != 2 and set(block._modules) != {*_SHARED, *_OWN}):
        return None
    if set(experts._parameters) != {"gate_up_proj", "down_proj"} or set(router._parameters) != {"weight"}:
        return None
    weights = experts.gate_up_proj, experts.down_proj, router.weight
    are_plain = all(type(item) is nn.Parameter and item.is_contiguous() and item.is_cpu for item in weights)
    if not are_plain or any(item.dtype is not dtype for item in weights) or not has_kernels(dtype):
        return None
    if not _is_known(block, router, experts) or weights[1].dim() != 3:
        return None
    (num, hidden, size), activation = weights[1].shape, written_activation(experts.act_fn)
    if weights[0].shape != (num, 2 * size, hidden) or weights[2].shape != (num, hidden) or hidden % 16 or size % 16:
        return None
    bias = block._buffers.get("expert_bias")
    if not isinstance(activation, int) or (bias is not None and bias.dtype not in (torch.float32, dtype)):
        return None
    try:
        routing = _routing_of(router, bias is not None)
    except Exception:  # routers of unknown kinds may fail in any way
        return None
    return None if routing is None else Experts(block, routing, activation)


def _is_known(block: Any, router: Any, experts: Any) -> bool:
    """Return whether forwards mention known names only, and experts are computed as transformers does by default."""
    config = getattr(experts, "config", None)
    implementation = getattr(config, "_experts_implementation", None)
    flags = {name: getattr(experts, name, usual) for name, usual in _FLAGS.items()}
    return (
        mentions(type(block)) | mentions(type(router)) <= _MENTIONS
        and mentions(type(experts)) <= _EXPERT_MENTIONS
        and not getattr(block, "jitter_noise", False)
        and implementation in _IMPLEMENTATIONS
        and flags == _FLAGS
    )


def _router_of(block: nn.Module) -> Any:
    return next((block._modules[name] for name in _ROUTER if name in block._modules), None)


@torch.no_grad()
def _routing_of(router: Any, has_bias: bool) -> Routing | None:
    """Return how a router chooses, found by trying it with other weights in float32; None if it is of no known form."""
    num, hidden = router.weight.shape
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(_PROBES, hidden, generator=generator), torch.randn(num, hidden, generator=generator)
    bias = torch.randn(num, generator=generator) * 0.1 if has_bias else None
    probe = copy.copy(router)
    probe._parameters = {"weight": nn.Parameter(weight / hidden**0.5, requires_grad=False)}
    takes_bias = len(inspect.signature(type(router).forward).parameters) > 2
    if has_bias and not takes_bias:
        return None
    found = type(router).forward(probe, x, *([bias] if takes_bias else []))
    choices, weights = (_only(found, kind) for kind in (torch.int64, torch.float32))
    if choices is None or weights is None or choices.shape != weights.shape:
        return None
    order = choices.argsort(dim=1)
    factor = float(getattr(router, "routed_scaling_factor", 1.0))
    scores = x @ probe.weight.t()
    errors = {}
    for is_sigmoid, norms, eps in pairs_of((False, True), (True, False), _EPS):
        routing = Routing(choices.shape[1], is_sigmoid, norms, eps, factor)
        own, own_weights = route(scores, bias, routing)
        own_order = own.argsort(dim=1)
        if torch.equal(own.gather(1, own_order), choices.gather(1, order)):
            errors[routing] = float((own_weights.gather(1, own_order) / weights.gather(1, order) - 1).abs().max())
    best = min(errors, key=errors.__getitem__, default=None)
    return best if best is not None and errors[best] <= _TOLERANCE else None


def _only(found: Any, dtype: torch.dtype) -> torch.Tensor | None:
    """Return the last tensor of a dtype: routers return their scores first."""
    items = [item for item in found if isinstance(item, torch.Tensor) and item.dtype is dtype]
    return items[-1] if items else None
