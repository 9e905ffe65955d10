"""Recognition of MLPs and mixtures of experts, by the names and shapes of their modules."""

from typing import Any

from torch import nn
from torch.nn.functional import silu
from transformers import PreTrainedModel

from ..forward_code import mentions
from .experts import Experts, written_experts
from .mixed_mlps import MixedMLP, RouterNorm, written_layer_experts
from .mlps import MLP, CalledMLP, written_activation
from .modules import but_dropouts
from .names import ACTIVATION, BESIDE_EXPERTS, MIXED_NORMS, MLP_MAPS, MLPS, SHARED
from .notes import Notes
from .parts import Map
from .plan import UnknownStructureError

_FACTORS = {"sum": 1.0, "average": 0.5}  # of experts and shared ones together (Cohere 2)


class MLPNotes(Notes):
    """
    Notes of layers' MLPs.

    Attributes:
        bodies (list of `nn.Module`): Layers, their attention and their MLPs.
    """

    def __init__(self, model: PreTrainedModel):
        super().__init__(model)
        self.bodies: list[nn.Module] = []

    def _mlp(self, layer: nn.Module) -> Map:
        """Return the MLP, whose maps may be the layer's own (OPT); unknown ones are called as they are."""
        own = self._optional(layer, MLPS)
        beside = layer._modules.get(BESIDE_EXPERTS)
        if own is not beside and beside is not None:
            return self._experts_beside(own, beside)
        found = self._known_mlp(layer if own is None else own, own is not None)
        if found is None and own is None:
            raise UnknownStructureError("MLP")
        if found is not None:
            return found
        self._know(own)
        experts = self._experts(own)
        self.calls_modules |= experts is None
        return CalledMLP(own) if experts is None else experts

    def _known_mlp(self, mlp: nn.Module, is_alone: bool = True) -> MLP | None:
        """Return an MLP of a known kind; None for others, and for modules that have more if it `is_alone`."""
        names = next((row for row in MLP_MAPS if {*row[0], row[1]} <= set(mlp._modules)), None)
        activation = self._optional(mlp, ACTIVATION) or (silu if "silu" in mentions(type(mlp)) else None)
        if names is None or activation is None or (is_alone and len(but_dropouts(mlp)) > len(names[0]) + 2):
            return None
        inputs, output = names
        self.bodies.append(mlp)
        self._bypass(mlp)
        if isinstance(activation, nn.Module):
            self._bypass(activation)
            self._know(activation)  # Apertus' has parameters
        fused = self._map([self._child(mlp, name) for name in inputs])
        is_gated = inputs[0] in ("gate_proj", "gate_up_proj", "w1", "input_linear")
        return MLP(fused, written_activation(activation), self._map([self._child(mlp, output)]), is_gated)

    def _experts_beside(self, block: Any, mlp: nn.Module) -> Experts:
        """Return experts beside an MLP that all tokens share (Granite 4)."""
        experts, shared = self._experts(block), self._known_mlp(mlp)
        if experts is None or shared is None or experts.shared is not None:
            raise UnknownStructureError("experts")
        self._know(block)
        experts.shared = shared, None
        return experts

    def _experts(self, block: Any) -> Experts | None:
        """Return a mixture of experts in compiled code, where there is such code."""
        experts = written_experts(block, self.model.dtype)
        shared = self._optional(block, SHARED)
        if experts is not None and shared is not None:
            mlp, gate = self._known_mlp(shared), block._modules.get("shared_expert_gate")
            factor = _FACTORS.get(getattr(block, "shared_expert_combination_strategy", "sum"))
            if mlp is None or factor is None:
                return None
            experts.factor = factor
            experts.shared = mlp, None if gate is None else self._map([gate])
        if experts is not None:
            self._bypass(*block.modules())
        return experts

    def _mixed_mlp(self, layer: Any, mlp: Map, before: Map | None) -> MixedMLP:
        """Return an MLP beside the layer's own experts (Gemma 4), which have further norms."""
        router = self._child(layer, "router")
        experts = written_layer_experts(layer, self._map([self._child(router, "proj")]), self.model.dtype)
        if experts is None or before is None or not isinstance(mlp, MLP):
            raise UnknownStructureError("experts")
        for module in (router, layer.experts):
            self._know(module)
            self._bypass(*module.modules())
        after, *others = [self._norm(self._child(layer, name)) for name in MIXED_NORMS]
        return MixedMLP(mlp, experts, (before, after), (*others, RouterNorm(router)))
