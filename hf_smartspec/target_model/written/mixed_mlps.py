"""MLPs beside mixtures of experts, whose outputs are added (Gemma 4)."""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.functional import linear
from torch.nn.utils import skip_init

from ...cpu.experts import Routing, route
from ...cpu.kernels.norms import ONCE
from ..forward_code import mentions
from .experts import PROBES, TOLERANCE, Experts, are_plain, choices_of, difference, written_activation_of
from .mlps import MLP
from .norms import Norm
from .parts import Map, Weighted, is_plain_map

# Names in the forwards of routers that are known.
_MENTIONS = frozenset(
    "config dtype float32 functional nn norm per_expert_scale proj scalar_root_size scale softmax sum top_k_experts "
    "topk torch".split()
)


class RouterNorm(Norm):
    """
    The norm of a router's input, with the router's scale as its weight: rounded once.

    Args:
        router (`nn.Module`): Its factor of what is scaled is one of scores, `Routing.scale`.
    """

    def __init__(self, router: Any):
        Weighted.__init__(self, router)
        self.eps, self.form, self.shape = float(router.norm.eps), ONCE, tuple(router.scale.shape)

    def weights(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        return self._parameters()["scale"], None


class MixedMLP:
    """
    `after(mlp(before(x))) + after_experts(experts(before_experts(x)))`, where the router reads `before_router(x)`.

    Args:
        norms (pair of `Norm`): Those before and after the MLP.
        expert_norms (three of `Norm`): Those before experts, after them, and of the router.
    """

    def __init__(self, mlp: MLP, experts: Experts, norms: Sequence[Any], expert_norms: Sequence[Any]):
        self.mlp, self.experts, self.activation = mlp, experts, mlp.activation
        self.before, self.after = norms
        self.before_experts, self.after_experts, self.before_router = expert_norms

    @property
    def products(self) -> tuple[Map, ...]:
        """Products of all tokens with one weight."""
        return (*self.mlp.products, *self.experts.products)

    @property
    def norms(self) -> list[Any]:
        return [self.before, self.after, self.before_experts, self.after_experts, self.before_router]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        out = self.after(self.mlp(self.before(x)))
        more: torch.Tensor = self.after_experts(self.experts(self.before_experts(x), self.before_router(x)))
        return out.add_(more)


def mlps_of(layers: Sequence[Any]) -> list[Any]:
    """Return the MLPs and the mixtures of experts of layers, one by one; others, too, which these may have instead."""
    mlps = [layer.mlp for layer in layers]
    return [part for mlp in mlps for part in ((mlp.mlp, mlp.experts) if isinstance(mlp, MixedMLP) else (mlp,))]


def written_layer_experts(layer: Any, proj: Map, dtype: torch.dtype) -> Experts | None:
    """
    Return the experts that a layer has beside its MLP, in compiled code, with the router's map `proj`; None if they are
    of another structure or without such code.
    """
    router, activation = layer.router, written_activation_of(layer.experts, dtype)
    if activation is None or set(router._modules) != {"norm", "proj"} or not is_plain_map(router.proj):
        return None
    num, hidden, _ = layer.experts.down_proj.shape
    shapes = {"scale": (hidden,), "per_expert_scale": (num,)}
    if {name: tuple(item.shape) for name, item in router._parameters.items() if item is not None} != shapes:
        return None
    if not are_plain(router._parameters.values(), dtype) or not mentions(type(router)) <= _MENTIONS:
        return None
    try:
        routing = _routing_of(router, num, hidden)
    except Exception:  # routers of unknown kinds may fail in any way
        return None
    return None if routing is None else Experts(layer, routing, activation, proj)


@torch.no_grad()
def _routing_of(router: Any, num: int, hidden: int) -> Routing | None:
    """Return how a router chooses, found by trying it with other weights in float32; None if it is of no known form."""
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(PROBES, hidden, generator=generator), torch.randn(num, hidden, generator=generator)
    scale, factors = (torch.randn(size, generator=generator) for size in (hidden, num))
    probe, proj = copy.copy(router), skip_init(nn.Linear, hidden, num, bias=False)
    proj.weight = nn.Parameter(weight, requires_grad=False)
    probe._modules = router._modules | {"proj": proj}
    pairs = {"scale": scale, "per_expert_scale": factors}
    probe._parameters = {name: nn.Parameter(own, requires_grad=False) for name, own in pairs.items()}
    norm = RouterNorm(probe)
    x *= norm.eps**0.5  # small numbers, so that eps counts
    expected = choices_of(type(router).forward(probe, x))
    if expected is None:
        return None
    routing = Routing(expected[0].shape[1], False, True, scale=float(router.scalar_root_size))
    found = route(linear(norm.by_torch(x), weight), None, routing, factors)
    return routing if difference(found, expected) <= TOLERANCE else None
