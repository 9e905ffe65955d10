"""The plan of a decoder: what each of its parts computes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..logits import LogitScaling
from .latent import LatentPlan
from .layer_inputs import Factor, LayerInput, LayerInputs
from .parts import Fused, Map, Positions, Sinks, Transposed
from .placeholders import Placeholders
from .query_factors import QueryFactors
from .recurrences import Recurrence
from .rotations import OwnRotation, Rotation


class UnknownStructureError(Exception):
    """Error for a model with parts that a plan cannot describe, or that computes otherwise than planned."""


def absent(x: torch.Tensor) -> torch.Tensor:
    """Stand in a plan for a part that its layer does not have."""
    raise AssertionError("a part that is not there")


@dataclass(eq=False)
class LayerPlan:
    """
    Plan of one layer. Norms are None where it has none. Of a parallel layer, attention and MLP read the same `x`, and
    the same normed one where there is no norm before the MLP. A layer with a `source`, the number of an earlier one,
    has maps of queries alone, and attends to what that layer has stored. One with a `latent` plan stores vectors of
    `head_dim` numbers, of which keys and values are made. Where a layer is one part alone, the MLP or the maps of
    attention are `absent`.
    """

    before_attention: Map | None
    after_attention: Map | None
    before_mlp: Map | None
    after_mlp: Map | None
    query_key_value: Map
    query_norm: Map | None
    key_norm: Map | None
    norms_heads: bool  # whether each head is normalized on its own
    attention_output: Map
    mlp: Map
    num_heads: int
    kv_heads: int
    head_dim: int
    scaling: float
    softcap: float | None
    window: int | None
    rotation: Rotation | OwnRotation | None
    layer_type: str | None  # selects rotary embeddings, where types differ
    is_parallel: bool = False
    multiplier: float = 1.0  # of the outputs of attention and MLP
    is_by_head: bool = False  # whether each head's query, key and value lie together in what maps return
    has_gates: bool = False  # whether every head's query is followed by a gate of its output, before a sigmoid
    recurrence: Recurrence | None = None  # in place of attention
    value_norm: Map | None = None  # of each head
    has_equal_values: bool = False  # whether values are keys, before the norms and rotation of these
    source: int | None = None  # while a model is recognised, -1 for a layer that is not known yet
    layer_input: LayerInput | None = None
    factor: Factor | None = None  # of the layer's output
    sinks: Sinks | None = None
    latent: LatentPlan | None = None
    norms_last: bool = False  # whether queries and keys are normalized after they were rotated, not before
    # Map of attention's input to gates before a sigmoid: one of each head, or of each number that it returns.
    output_gates: Map | None = None
    query_factors: QueryFactors | None = None  # by position; layers of one config share them

    @property
    def attends(self) -> bool:
        """Return whether the layer has attention."""
        return self.recurrence is None and self.query_key_value is not absent

    @property
    def stores(self) -> bool:
        """Return whether the layer has keys and values, or states, of its own."""
        return self.recurrence is not None or (self.attends and self.source is None)

    @property
    def products(self) -> list[Any]:
        """Products of all tokens with one weight, those of inputs of its own and of latents left out."""
        maps = [self.query_key_value, self.attention_output, *getattr(self.mlp, "products", ())]
        return [item for item in maps if item is not absent]

    @property
    def has_norms(self) -> bool:
        """Return whether queries are normalized, and keys, if the layer has any."""
        return self.query_norm is not None and (self.key_norm is not None or self.source is not None)

    @property
    def num_stored(self) -> int:
        """Return the number of key/value heads that the layer has itself."""
        return self.kv_heads if self.source is None else 0

    @property
    def stored_sizes(self) -> tuple[int, int]:
        """Return the numbers of a key and of a value, as the layer stores them."""
        return self.head_dim, self.head_dim if self.latent is None else self.latent.turned_size


@dataclass(eq=False)
class FeaturePlan:
    """
    Plan of the input of heads that continue from features. From the embedding e of a token and the feature f before it,

        x = f    attention reads [embedding_norm e, feature_norm f]

    or, with a map of both, x = both [e, f], which attention reads, too.

    Args:
        states_norms (sequence of `Callable`): Norms of the target's hidden states, which lie side by side: one of all
            numbers, one of each state, or none.
        states_map (`Callable`, *optional*): Map from these to features; without a map, the states are features.
        adds_normed (`bool`): Whether x is `feature_norm f`.
    """

    states_norms: Sequence[Any]
    states_map: Map | None
    embedding_norm: Map | None
    feature_norm: Map | None
    both: Map | None
    adds_normed: bool


@dataclass(eq=False)
class DecoderPlan:
    """
    Plan of a causal language model, or of heads that continue from its features.

    Args:
        rotary (`Callable`, *optional*): None without rotary embeddings.
        laid_out (`list`): Maps whose weights are laid out for them once the plan was found right.
        calls_modules (`bool`): Whether some modules, beside embeddings, are called as they are.
        features (`FeaturePlan`, *optional*): Input of the first layer, for heads.
        positions (`Callable`, *optional*): Learnt embeddings of positions.
        layer_inputs (`Callable`, *optional*): Inputs of each layer beside hidden states.
        embedding_norm (`Callable`, *optional*): Norm of embeddings.
        placeholders (`Callable`, *optional*): Tokens that are replaced before embeddings are looked up.
    """

    embedding: Map
    embedding_multiplier: float
    rotary: Callable[..., tuple[torch.Tensor, torch.Tensor]] | None
    rotary_types: tuple[str | None, ...]
    layers: list[LayerPlan]
    final_norm: Map
    head: Map
    logit_scaling: LogitScaling
    laid_out: list[Fused | Transposed]
    calls_modules: bool = False
    features: FeaturePlan | None = None
    positions: Positions | None = None
    layer_inputs: LayerInputs | None = None
    placeholders: Placeholders | None = None
    embedding_norm: Map | None = None


def products_of(plan: DecoderPlan) -> list[Any]:
    """Return all products of a forward."""
    layers: list[Any] = plan.layers
    others = [item for layer in layers for item in layer.products]
    others += [item for layer in layers if layer.layer_input is not None for item in layer.layer_input.products]
    others += [layer.output_gates for layer in layers if layer.output_gates is not None]
    others += [item for layer in layers if layer.latent is not None for item in layer.latent.products]
    others += [] if plan.features is None else [plan.features.states_map]
    return [plan.head, *others]
