"""Mixtures of experts of a written-out layer."""

import copy
import inspect
import weakref
from collections.abc import Iterable, Sequence
from itertools import product as pairs_of
from typing import Any

import torch
from torch import nn
from torch.nn.functional import linear

from ...cpu.columns import column_product
from ...cpu.experts import Routing, combined, route
from ...cpu.few_tokens import has_kernels, product, wide_linear
from ...cpu.gates import ClampedGate, can_gate, clamped_gated, gated
from ...cpu.tensor_checks import is_vector
from ..forward_code import mentions
from .mlps import FUNCTIONS, MLP, written_activation
from .parts import Map, Rows, Weighted

Chosen = tuple[torch.Tensor, torch.Tensor]  # experts of tokens, and their weights
PROBES, TOLERANCE = 64, 1e-5  # tokens with which routers are tried out; of weights

_ROUTER, _CHOSEN = ("gate", "router"), (torch.int64, torch.float32)
# Modules of a block beside a router: experts alone, or with an MLP that all tokens share, perhaps with a gate.
_BLOCKS: tuple[set[str], ...] = {"experts"}, {"experts", "shared_experts"}, {"experts", "shared_mlp"}
_BLOCKS += {"experts", "shared_expert"}, {"experts", "shared_expert", "shared_expert_gate"}
# Modules of routers: one that adds the bias (ERNIE), and their map (HunYuan, AFMoE).
_BIASES_OF, _MAP = "moe_statics", ("wg", "gate")
_BIAS = "expert_bias", "e_score_correction_bias"
_FACTOR = "routed_scaling_factor", "router_scaling_factor", "route_scale"
_EPS = 0.0, 1e-6, 1e-20  # added to sums of weights
_BY_ROW = ("AfmoeTokenChoiceRouter",)  # routers that take tokens row by row, `[1, N, hidden]`
_LEAST = "norm_min"  # what these are divided by at least (ERNIE)
# Names in the forwards of blocks of experts and their routers that are known.
_MENTIONS = frozenset(
    "bias bool clamp device dtype e_score_correction_bias empty_like enable_moe_fp32_combine expand expert_bias "
    "expert_selection_fn experts F float float32 forward functional gate gather hidden_dim input_jitter_noise "
    "input_size isinstance jitter_noise linear masked_fill max maybe_autocast moe_statics nn norm_min "
    "norm_topk_prob num_experts num_group num_shared_experts reshape route_scale routed_scaling_factor router "
    "router_jitter_noise router_scaling_factor scatter_ shape shared_expert shared_expert_combination_strategy "
    "shared_expert_gate shared_experts shared_mlp sigmoid size softmax sparsemixer str sum super T to top_k topk "
    "topk_group topk_method torch training type type_as uniform_ unsqueeze use_expert_bias ValueError values view "
    "weight wg zeros_like".split()
)

_EXPERT_MENTIONS = frozenset(
    "act_fn chunk down_proj dtype functional gate_up_proj greater index_add_ linear nn no_grad nonzero num_experts "
    "one_hot permute sum to torch where zeros_like".split()
)
# Further ones of experts with biases, transposed weights, and gates that are clamped.
_CLAMPED_MENTIONS = _EXPERT_MENTIONS | set(
    "_apply_gate alpha clamp device down_proj_bias gate_up_proj_bias limit sigmoid".split()
)
_IMPLEMENTATIONS = None, "eager", "batched_mm", "grouped_mm"  # transformers' own, by the entry of configs
_FLAGS = {"has_gate": True, "has_bias": False, "has_post_expert_norm": False, "is_transposed": False}
_FLAGS |= {"is_concatenated": True, "_is_expert_parallel": False}
_CLAMPED_FLAGS = _FLAGS | {"has_bias": True, "is_transposed": True, "is_concatenated": False}
_WEIGHTS, _BIASES = ("gate_up_proj", "down_proj"), ("gate_up_proj_bias", "down_proj_bias")


class Experts(Weighted):
    """
    The sum of the outputs of each token's experts, of which a token's numbers do not depend on the others.

    Args:
        block (`nn.Module`): The block of experts and their router.
        routing (`Routing`): How experts are chosen.
        activation (`int` or `ClampedGate`): The activation of gates, one of those in `cpu.kernels.gates`, or what
            replaces it.
        router (`Callable`, *optional*): Map to scores, where that is not the router's own weight.

    Attributes:
        shared (pair of `Callable`, *optional*): An MLP that all tokens share, and the map to its gate, if it has one.
        factor (`float`): Factor of the sum of its outputs and those of experts.
    """

    def __init__(self, block: Any, routing: Routing, activation: int | ClampedGate, router: Map | None = None):
        super().__init__(block.experts)
        self.routing, self.activation = routing, activation
        self.shared: tuple[MLP, Map | None] | None = None
        self.factor = 1.0
        self.router = _scores_of(block) if router is None else router
        self._block = weakref.ref(block)
        self.is_transposed: bool = getattr(block.experts, "is_transposed", False)
        self.num, *sizes = block.experts.down_proj.shape
        self.hidden, self.size = reversed(sizes) if self.is_transposed else sizes

    @property
    def products(self) -> tuple[Map, ...]:
        """Products of all tokens with one weight, in the dtype of tokens."""
        own = [] if isinstance(self.router, WideRows) else [self.router]
        if self.shared is not None:
            mlp, gate = self.shared
            own += [*mlp.products, *([] if gate is None else [gate])]
        return tuple(own)

    def bias(self) -> torch.Tensor | None:
        """Return the summand of probabilities where experts are chosen, `[experts]`, if there is one."""
        return _bias_of(self._block())

    def factors(self) -> torch.Tensor | None:
        """Return factors of each expert's weights, `[experts]`, if there are any."""
        found: torch.Tensor | None = router_of(self._block())._parameters.get("per_expert_scale")
        return found

    def weights(self) -> tuple[torch.Tensor, torch.Tensor]:
        """
        Return gates beside their numbers, `[experts, 2 * size, hidden]`, and outputs, `[experts, hidden, size]`; or if
        weights are transposed, each gate before its number, `[experts, hidden, 2 * size]`, and `[experts, size,
        hidden]`.
        """
        gates, outputs = map(self._parameters().__getitem__, _WEIGHTS)
        return gates, outputs

    def biases(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return the biases of both, `[experts, 2 * size]` and `[experts, hidden]`, where there are any."""
        gates, outputs = map(self._parameters().get, _BIASES)
        return gates, outputs

    def __call__(self, x: torch.Tensor, routed: torch.Tensor | None = None) -> torch.Tensor:
        """Return outputs of tokens `[N, hidden]`, whose router may have an input of its own."""
        scores = self.router(x if routed is None else routed)
        choices, weights = route(scores.contiguous(), self.bias(), self.routing, self.factors())
        (inputs, outputs), chosen = zip(self.weights(), self.biases()), self.routing.num_chosen
        flat = choices.flatten()
        found = x.new_empty(len(flat), self.hidden)
        for expert in flat.unique().tolist():
            (own,) = (flat == expert).nonzero(as_tuple=True)
            hidden = self._product(x[own // chosen], expert, *inputs)
            found[own] = self._product(self._activated(hidden), expert, *outputs)
        mlp, gate = self.shared or (None, None)
        shared, gates = (None if item is None else item(x).contiguous() for item in (mlp, gate))
        return combined(found.view(len(x), chosen, -1), weights, shared, gates, self.factor)

    def _product(self, x: torch.Tensor, expert: int, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        own = None if bias is None else bias[expert]
        return (column_product if self.is_transposed else product)(x, weight[expert], own)

    def _activated(self, hidden: torch.Tensor) -> torch.Tensor:
        if isinstance(self.activation, ClampedGate):
            can_clamp = can_gate(hidden)
            return clamped_gated(hidden, self.activation) if can_clamp else self.activation.by_torch(hidden)
        if can_gate(hidden):
            return gated(hidden, self.activation)
        gate, up = hidden.chunk(2, dim=-1)
        return FUNCTIONS[self.activation](gate) * up


def written_experts(block: Any, dtype: torch.dtype) -> Experts | None:
    """Return a block of experts in compiled code, on a CPU; None if it is of another structure or without such code."""
    router, experts = router_of(block), block._modules.get("experts")
    if router is None or experts is None or {*block._modules} - {*_ROUTER} not in _BLOCKS:
        return None
    activation, names = written_activation_of(experts, dtype), {"weight"}
    if isinstance(activation, ClampedGate):
        names.add("bias")
    rows = _rows_of(router)
    parameters = {name: item for name, item in rows._parameters.items() if item is not None}
    if activation is None or set(parameters) != names or not {*router._modules} <= {_BIASES_OF, *_MAP}:
        return None
    if not mentions(type(block)) | mentions(type(router)) <= _MENTIONS or getattr(block, "jitter_noise", False):
        return None
    is_wide = _scores_in_float32(router, dtype)
    if not are_plain(parameters.values(), torch.float32 if is_wide else dtype):
        return None
    num, bias = len(rows.weight), _bias_of(block)
    if num != len(experts.down_proj) or not (bias is None or _is_bias(bias, num, torch.float32 if is_wide else dtype)):
        return None
    try:
        is_sparse = bias is None and getattr(router, "router_jitter_noise", 0.0) > 0.0  # without, unknown in training
        routing = sparse_routing_of(router) if is_sparse else _routing_of(router, bias is not None)
    except Exception:  # routers of unknown kinds may fail in any way
        return None
    return None if routing is None else Experts(block, routing, activation)


def written_activation_of(experts: Any, dtype: torch.dtype) -> int | ClampedGate | None:
    """
    Return the activation of experts that compiled code computes, on a CPU, as transformers does by default; None if
    they are of another structure or without such code.
    """
    is_clamped = getattr(experts, "has_bias", False)
    names: tuple[str, ...] = _WEIGHTS
    known, usual = _EXPERT_MENTIONS, _FLAGS
    if is_clamped:
        names, known, usual = _WEIGHTS + _BIASES, _CLAMPED_MENTIONS, _CLAMPED_FLAGS
    config, flags = getattr(experts, "config", None), {name: getattr(experts, name, _FLAGS[name]) for name in _FLAGS}
    if getattr(config, "_experts_implementation", None) not in _IMPLEMENTATIONS or flags != usual:
        return None
    if set(experts._parameters) != {*names} or not mentions(type(experts)) <= known:
        return None
    parameters = [experts._parameters[name] for name in names]
    if not are_plain(parameters, dtype) or not has_kernels(dtype) or experts.down_proj.dim() != 3:
        return None
    num, *sizes = experts.down_proj.shape
    hidden, size = reversed(sizes) if is_clamped else sizes
    shapes: list[tuple] = [(num, 2 * size, hidden), (num, hidden, size)]
    if is_clamped:
        shapes = [(num, hidden, 2 * size), (num, size, hidden), (num, 2 * size), (num, hidden)]
    if [tuple(item.shape) for item in parameters] != shapes or hidden % 16 or size % 16:
        return None
    activation = _clamped_gate_of(experts) if is_clamped else written_activation(experts.act_fn)
    return activation if isinstance(activation, int | ClampedGate) else None


def are_plain(parameters: Iterable[Any], dtype: torch.dtype) -> bool:
    """Return whether these are parameters in a dtype that compiled code can read, on a CPU."""
    are_parameters = all(type(item) is nn.Parameter for item in parameters)
    return are_parameters and all(item.is_contiguous() and item.is_cpu and item.dtype is dtype for item in parameters)


@torch.no_grad()
def _clamped_gate_of(experts: Any) -> ClampedGate | None:
    """Return the activation of experts, found by trying it past its limits; None if it is another one."""
    gate = ClampedGate(float(experts.alpha), float(experts.limit))
    numbers = torch.randn(PROBES, 64, generator=torch.Generator().manual_seed(0))
    hidden = torch.cat([numbers, numbers * 2 * gate.limit])
    return gate if torch.allclose(type(experts)._apply_gate(experts, hidden), gate.by_torch(hidden)) else None


def router_of(block: Any) -> Any:
    """Return the router of a block of experts, None if it has none."""
    return next((block._modules[name] for name in _ROUTER if name in block._modules), None)


def _rows_of(router: Any) -> Any:
    """Return the module that holds the weight of a router: itself, or a linear layer."""
    own = next((router._modules[name] for name in _MAP if name in router._modules), None)
    return own if type(own) is nn.Linear else router


def _bias_of(block: Any) -> torch.Tensor | None:
    """Return the bias with which a block, or its router, chooses experts; None if there is none."""
    router = router_of(block)
    if (own := router._modules.get(_BIASES_OF)) is not None:
        found = own._parameters.get("e_score_correction_bias")
        return None if found is None else found.squeeze(0)
    held = block._parameters | block._buffers | router._buffers
    return next((held[name] for name in _BIAS if name in held), None)


def _is_bias(bias: torch.Tensor, num: int, dtype: torch.dtype) -> bool:
    return is_vector(bias, num) and bias.dtype in (torch.float32, dtype)


class WideRows(Rows):
    """A router's weight in float32, by which tokens are multiplied as they are: scores are not rounded."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return wide_linear(x, self.whole().weight)


def _scores_of(block: Any) -> Rows:
    router, down = _rows_of(router_of(block)), block.experts.down_proj
    return (Rows if router.weight.dtype is down.dtype else WideRows)(router)


@torch.no_grad()
def _scores_in_float32(router: Any, dtype: torch.dtype) -> bool:
    """Return whether a router multiplies tokens in another dtype in float32, and returns the scores first."""
    if dtype is torch.float32 or "bias" in router._parameters:
        return False
    weight = _rows_of(router).weight
    x = torch.randn(PROBES, weight.shape[1], generator=torch.Generator().manual_seed(0)).to(dtype)
    bias = [torch.zeros(len(weight))] if _takes_bias(router) else []
    try:
        found: Any = type(router).forward(router, x, *bias)[0]
    except Exception:  # routers of unknown kinds may fail in any way
        return False
    expected = linear(x.float(), weight.float())
    is_float32 = isinstance(found, torch.Tensor) and found.dtype is torch.float32
    return is_float32 and torch.allclose(found, expected, atol=TOLERANCE * float(expected.abs().max()))


def _takes_bias(router: Any) -> bool:
    return len(inspect.signature(type(router).forward).parameters) > 2


@torch.no_grad()
def _routing_of(router: Any, has_bias: bool) -> Routing | None:
    """Return how a router chooses, found by trying it with other weights in float32; None if it is of no known form."""
    num, hidden = _rows_of(router).weight.shape
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(PROBES, hidden, generator=generator), torch.randn(num, hidden, generator=generator)
    bias = torch.randn(num, generator=generator) * 0.1 if has_bias else None
    probe = copy.copy(router)
    probe._modules = {name: copy.copy(module) for name, module in router._modules.items()}
    rows, least = _rows_of(probe), 0.0
    rows._parameters = {"weight": nn.Parameter(weight / hidden**0.5, requires_grad=False), "bias": None}
    if router._parameters.get("bias") is not None:
        rows._parameters["bias"] = nn.Parameter(torch.randn(num, generator=generator), requires_grad=False)
    own = [name for name in _BIAS if name in router._buffers]
    probe._buffers = router._buffers | dict.fromkeys(own, bias)
    if bias is not None and (adds := probe._modules.get(_BIASES_OF)) is not None:
        own = list(adds._parameters)
        adds._parameters = dict.fromkeys(own, nn.Parameter(bias[None], requires_grad=False))
    if hasattr(router, _LEAST):
        least = 0.7  # of some tokens, sums are less
        setattr(probe, _LEAST, least)
    takes_bias = _takes_bias(router)
    if has_bias and takes_bias == bool(own):
        return None
    given = x[None] if type(router).__name__ in _BY_ROW else x
    expected = choices_of(type(router).forward(probe, given, *([bias] if takes_bias else [])))
    if expected is None:
        return None
    num_chosen = expected[0].shape[1]
    factor = float(next((getattr(router, name) for name in _FACTOR if hasattr(router, name)), 1.0))
    scores = linear(x, *rows._parameters.values())
    errors = {}
    for is_sigmoid, norms, eps, groups in pairs_of((False, True), (True, False), _EPS, _groups_of(router, num_chosen)):
        routing = Routing(num_chosen, is_sigmoid, norms, eps, factor, 1.0, *groups, least=least)
        errors[routing] = difference(route(scores, bias, routing), expected)
    best = min(errors, key=errors.__getitem__)
    if errors[best] > TOLERANCE:
        return None
    return best._replace(least=float(getattr(router, _LEAST))) if least else best


def _groups_of(router: Any, num_chosen: int) -> list[tuple[int, int, bool]]:
    """Return the ways in which a router may choose groups of experts first, none of them included."""
    num, groups = len(_rows_of(router).weight), getattr(router, "num_group", None) or 0
    num_groups = getattr(router, "topk_group", None) or 0
    are_known = groups > 1 and num_groups > 0 and not num % groups and num_groups * (num // groups) >= num_chosen
    return [(0, 0, False), *[(groups, num_groups, adds) for adds in (False, True) if are_known]]


@torch.no_grad()
def sparse_routing_of(router: Any) -> Routing | None:
    """
    Return how a sparse mixer chooses (PhiMoE), found by trying it with other weights in float32, whose scores are near
    one another; None if it is of another form.
    """
    num, hidden = router.weight.shape
    generator = torch.Generator().manual_seed(0)
    x, noise = torch.randn(PROBES, hidden, generator=generator), torch.randn(num, hidden, generator=generator)
    cap = 2.0 * router.router_jitter_noise
    weight = torch.randn(1, hidden, generator=generator) + noise * cap
    probe = copy.copy(router)
    probe._parameters = {"weight": nn.Parameter(weight / hidden**0.5, requires_grad=False), "bias": None}
    probe.training = False
    expected = choices_of(type(router).forward(probe, x))
    if expected is None:
        return None
    routing = Routing(expected[0].shape[1], False, False, cap=cap)
    found = route(linear(x, probe.weight), None, routing)
    return routing if difference(found, expected) <= TOLERANCE else None


def choices_of(found: Sequence[Any]) -> Chosen | None:
    """Return the experts that a router has chosen and their weights, `[N, num_chosen]`; routers return scores first."""
    kinds = [[item for item in found if isinstance(item, torch.Tensor) and item.dtype is kind] for kind in _CHOSEN]
    if not all(kinds):
        return None
    choices, weights = (items[-1] for items in kinds)
    return (choices, weights) if choices.shape == weights.shape else None


def difference(found: Chosen, expected: Chosen) -> float:
    """Return the largest relative difference of weights; infinite where other experts are chosen."""
    (choices, weights), (own, own_weights) = found, expected
    order, own_order = choices.argsort(dim=1), own.argsort(dim=1)
    if not torch.equal(choices.gather(1, order), own.gather(1, own_order)):
        return float("inf")
    return float((weights.gather(1, order) / own_weights.gather(1, own_order) - 1).abs().max())
