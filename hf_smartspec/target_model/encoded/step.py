"""State of a packed step with cross attention, and the attention of its layers."""

from dataclasses import dataclass
from typing import Any

import torch
from transformers import EncoderDecoderCache

from ..attention.tree_attention import attend_part, packed_attention
from ..cache.slot_cache import SlotCache
from ..layout.step_layout import StepLayout
from .cross import CrossLayout
from .relative import RelativeBias


class OwnCache(SlotCache):
    """Keys and values of the decoder's own tokens, which attention gets as they lie in memory."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """
        Write packed states `[1, heads, N, head_dim]`; return the whole memory, `[lines, heads, head_dim]`. Models that
        prepare biases for as many keys as the last dimension but one then prepare few.
        """
        return self.layer(layer_idx).write(key_states[0].transpose(0, 1), value_states[0].transpose(0, 1))


class StepCache(EncoderDecoderCache):
    """
    Both caches of one step, as transformers' decoders take them; keys and values of the encoder's outputs are complete.

    Args:
        positions (`torch.Tensor` of shape `[N]`): Positions of the step's tokens.
    """

    def __init__(self, own: OwnCache, cross: SlotCache, positions: torch.Tensor):
        self.self_attention_cache, self.cross_attention_cache = own, cross  # type: ignore[assignment]
        self.is_updated = dict.fromkeys(range(len(cross.layers)), True)
        self._ahead = positions - torch.arange(len(positions), device=positions.device)

    def get_seq_length(self, layer_idx: int | None = None) -> Any:
        """
        Return by how much the positions of the N tokens exceed their indices in the step, `[N]`: decoders that embed
        positions add the indices. For a single layer, return 0, for biases that are not used.
        """
        return self._ahead if layer_idx is None else 0


@dataclass(eq=False)
class EncodedStep:
    """
    One step of a decoder that attends to its own tokens and to an encoder's outputs in turn.

    Args:
        cross (`SlotCache`): Keys and values of encoder outputs.
        cross_layout (`CrossLayout`): The outputs that each token attends to.
        bias (`RelativeBias`): For decoders whose attention gets biases by position.
    """

    cross: SlotCache
    cross_layout: CrossLayout
    bias: RelativeBias

    def owners(self) -> list[Any]:
        """Return the objects whose tensors are sent to the device."""
        return [self.cross_layout, *self.cross_layout.parts]

    def attend(
        self,
        module: torch.nn.Module,
        packed: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        layout: StepLayout,
        position_bias: torch.Tensor | None,
        **options: Any,
    ) -> torch.Tensor:
        """Compute `packed_attention` for queries `[N, heads, head_dim]` and memory `[lines, heads, head_dim]`."""
        if any(key is memory for layer in self.cross.layers for memory in layer.memories):
            return self._attend_across(packed, key, value, **options)
        if position_bias is None:
            return packed_attention(packed, key, value, layout, **options)
        self.bias.enter(module)
        return packed_attention(packed, key, value, layout, **options, bias=self.bias.of)

    def _attend_across(
        self, packed: torch.Tensor, key: torch.Tensor, value: torch.Tensor, window: int | None, **options: Any
    ) -> torch.Tensor:
        parts, scatter = self.cross_layout.parts, self.cross_layout.scatter
        outputs = [attend_part(packed, key, value, part, None, **options) for part in parts]
        output = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return output if scatter is None else output.index_select(0, scatter)
