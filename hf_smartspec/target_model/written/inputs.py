"""What a written-out decoder runs on."""

from collections.abc import Mapping
from typing import NamedTuple

import torch

from ..cache.slot_cache import SlotCache
from ..layout.step_layout import StepLayout

Tables = tuple[torch.Tensor, torch.Tensor]  # rotary embeddings of tokens


class Features(NamedTuple):
    """
    Features from which heads continue.

    Args:
        values (`torch.Tensor` of shape `[N, D]`): Features of all tokens, or the target's hidden states.
        are_states (`bool`): Whether these are hidden states of the target.
    """

    values: torch.Tensor
    are_states: bool


class DecoderInput(NamedTuple):
    """
    What the layers of a decoder run on.

    Args:
        x (`torch.Tensor` of shape `[N, hidden_size]`): Embeddings, which are not changed.
        layout (`StepLayout`): Layout of N tokens, of which M are kept.
        cache (`SlotCache`): Where their keys and values are stored.
        tables (mapping): Rotary embeddings, from `WrittenDecoder.tables`.
        features (`Features`, *optional*): The features of all tokens, for heads.
        layer_inputs (`torch.Tensor` of shape `[N, num_layers, size]`, *optional*): From `DecoderPlan.layer_inputs`.
    """

    x: torch.Tensor
    layout: StepLayout
    cache: SlotCache
    tables: Mapping[str | None, Tables]
    features: Features | None = None
    layer_inputs: torch.Tensor | None = None
