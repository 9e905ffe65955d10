"""Forwards of drafters that continue from a model's features: decoder layers with keys and values of their own."""

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from transformers import PreTrainedConfig

from ..cache.slot_cache import SlotCache
from ..forward.ragged import PlannedForward, RaggedForward
from ..layout.step_layout import StepLayout
from ..written.inputs import Features


class FeatureStep(NamedTuple):
    """Layout of a forward's N tokens, of which M are kept, and the memory of their keys and values."""

    layout: StepLayout
    cache: SlotCache

    def kept(self, states: torch.Tensor) -> torch.Tensor:
        """Return those of `[N, ...]` that are kept, `[M, ...]`."""
        return states if self.layout.kept is None else states[self.layout.kept]


Layers = Callable[[Features, FeatureStep], tuple[torch.Tensor, torch.Tensor]]


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
        Return a function that computes, of the tokens that are kept, the outputs `[M, hidden_size]`, which are features
        of the tokens after them, and logits `[M, own vocab]`.
        """


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

    def _run(self, planned: PlannedForward) -> torch.Tensor:
        planned.hidden, logits = self._layers(self._features(planned), FeatureStep(planned.layout, self.cache))
        return logits

    def _features(self, planned: PlannedForward) -> Features:
        if planned.features is not None:  # features of nodes that are not on the host
            return Features(planned.features, are_states=False)
        own = [item.features for item in planned.rows if item.features is not None]
        features = own[0] if len(own) == 1 else torch.cat(own)
        return Features(
            features.to(device=self.device, dtype=self.model.dtype), are_states=len(planned.rows[0].feed) > 0
        )
