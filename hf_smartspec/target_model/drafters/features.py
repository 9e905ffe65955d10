"""Forwards of drafters that go on from a model's features: decoder layers with keys and values of their own."""

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
    """Where the tokens of a forward stand, and the memory of their keys and values."""

    layout: StepLayout
    cache: SlotCache

    @property
    def positions(self) -> torch.Tensor:
        """`[1, N]`"""
        return self.layout.positions

    def attend(
        self, plan: LayerPlan, x: torch.Tensor, tables: Mapping[str | None, tuple[torch.Tensor, torch.Tensor]]
    ) -> torch.Tensor:
        """What a planned layer's attention gives for `[N, width]`, with its rotary embeddings by type of layer."""
        return attend(plan, x, self.layout, self.cache.layer(0), tables)


Layers = Callable[[torch.Tensor, torch.Tensor, FeatureStep], torch.Tensor]


class FeatureLayers(Protocol):
    """What a `FeatureForward` runs."""

    @property
    def config(self) -> PreTrainedConfig: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def layers(self) -> Layers:
        """
        What computes `[N, hidden_size]` from tokens `[N]` and features `[N, hidden_size]`. It serves as long as the
        weights stay where they are.
        """

    def combine(self, states: torch.Tensor) -> torch.Tensor:
        """Features `[N, hidden_size]` of the target's hidden states `[N, layers * target's hidden_size]`."""

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits `[M, own vocab]` of what the layers have left `[M, hidden_size]`."""


class FeatureForward(RaggedForward):
    """
    Runs layers that go on from features over ragged rows. Inputs bring the target's hidden states of the text, or, of
    nodes, what their parents have left.

    Args:
        model (`FeatureLayers`): On its device.
    """

    def __init__(self, model: FeatureLayers):
        super().__init__(model.config, model.device, model.dtype)
        self.model, self._layers = model, model.layers()

    @property
    def device(self) -> torch.device:
        return self.model.device

    def reuse(self, row: CacheRow, other: CacheRow, length: int) -> None:
        """A row begins with the first `length` tokens of another."""
        self.cache.reserve([row], [length])
        self.cache.copy(other, row, length)
        row.length, row.num_nodes = length, 0

    def _run(self, planned: PlannedForward) -> torch.Tensor:
        layout = planned.layout
        hidden = self._layers(layout.tokens[0], self._features(planned), FeatureStep(layout, self.cache))
        planned.hidden = hidden if layout.kept is None else hidden[layout.kept]
        return self.model.logits(planned.hidden)

    def _features(self, planned: PlannedForward) -> torch.Tensor:
        if planned.features is not None:  # of nodes that only the device knows
            return planned.features
        features = torch.cat([item.features for item in planned.rows if item.features is not None])
        if not len(planned.rows[0].feed):
            return features
        return self.model.combine(features.to(device=self.device, dtype=self.model.dtype))
