"""Forwards of drafters that continue from a model's features: decoder layers with keys and values of their own."""

from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol

import torch
from transformers import PreTrainedConfig

from ..cache.slot_cache import SlotCache
from ..forward.ragged import PlannedForward, RaggedForward
from ..layout.rows import CacheRow
from ..layout.step_layout import StepLayout
from ..written.decoder import attend
from ..written.plan import LayerPlan


class FeatureStep(NamedTuple):
    """Positions and layout of a forward's tokens, and the memory of their keys and values."""

    layout: StepLayout
    cache: SlotCache

    @property
    def positions(self) -> torch.Tensor:
        """Positions of the tokens, `[1, N]`."""
        return self.layout.positions

    def attend(
        self, plan: LayerPlan, x: torch.Tensor, tables: Mapping[str | None, tuple[torch.Tensor, torch.Tensor]]
    ) -> torch.Tensor:
        """Return the attention output of a planned layer for `[N, width]`, with rotary embeddings by type of layer."""
        return attend(plan, x, self.layout, self.cache.layer(0), tables)


Layers = Callable[[torch.Tensor, torch.Tensor, FeatureStep], torch.Tensor]


class FeatureLayers(Protocol):
    """Layers that a `FeatureForward` runs."""

    @property
    def config(self) -> PreTrainedConfig: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def layers(self) -> Layers:
        """
        Return a function that computes `[N, hidden_size]` from tokens `[N]` and features `[N, hidden_size]`. It is
        valid as long as the weights stay where they are.
        """

    def combine(self, states: torch.Tensor) -> torch.Tensor:
        """Return features `[N, hidden_size]` of the target's hidden states `[N, layers * target's hidden_size]`."""

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits `[M, own vocab]` of the layers' outputs `[M, hidden_size]`."""


class FeatureForward(RaggedForward):
    """
    Forward of layers that continue from features, over ragged rows. Inputs carry the target's hidden states of the
    text, or, for nodes, the layers' outputs at their parents.

    Args:
        model (`FeatureLayers`): The layers, on their device.
    """

    def __init__(self, model: FeatureLayers):
        super().__init__(model.config, model.device, model.dtype)
        self.model, self._layers = model, model.layers()

    @property
    def device(self) -> torch.device:
        return self.model.device

    def reuse(self, row: CacheRow, other: CacheRow, length: int) -> None:
        """Begin a row with the first `length` tokens of another."""
        self.cache.reserve([row], [length])
        self.cache.copy(other, row, length)
        row.length, row.num_nodes = length, 0

    def _run(self, planned: PlannedForward) -> torch.Tensor:
        layout = planned.layout
        hidden = self._layers(layout.tokens[0], self._features(planned), FeatureStep(layout, self.cache))
        planned.hidden = hidden if layout.kept is None else hidden[layout.kept]
        return self.model.logits(planned.hidden)

    def _features(self, planned: PlannedForward) -> torch.Tensor:
        if planned.features is not None:  # features of nodes that are not on the host
            return planned.features
        features = torch.cat([item.features for item in planned.rows if item.features is not None])
        if not len(planned.rows[0].feed):
            return features
        return self.model.combine(features.to(device=self.device, dtype=self.model.dtype))
