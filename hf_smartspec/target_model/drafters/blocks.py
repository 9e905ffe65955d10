"""Forwards of block drafters: keys and values of a text, made of a target's hidden states, and queries of a block."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from transformers import PreTrainedConfig

from ...drafts.tree import DraftTree
from ..attention.tree_attention import packed_attention
from ..forward.ragged import PlannedForward, RaggedForward
from ..layout.rows import CacheRow, RowInput
from ..layout.step_layout import PaddedPart, StepLayout, send

_NOTHING = np.empty(0, np.int64)

Rotation = tuple[torch.Tensor, torch.Tensor]  # cosines and sines, [..., 1, head_dim]


class BlockLayers(Protocol):
    """Layers that a `BlockForward` runs."""

    @property
    def config(self) -> PreTrainedConfig: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def layers(self) -> Iterable[Any]:
        """
        The layers. Each has `causal` (whether a slot sees no later slots of its block) and `window` (the last positions
        that a slot sees, its own included, or None), makes keys and values `[N, kv_heads, head_dim]` of committed
        tokens (`context(combined, rotation)`), and maps hidden states of a block's slots to its output, `[R, S,
        hidden_size]` (`layer(hidden, rotation, attend)`). `attend` takes queries `[R, S, heads, head_dim]`, keys and
        values `[R, S, kv_heads, head_dim]`, and, last, None or the layer's sinks `[heads]`, which are logits that join
        each head's scores; it returns `[R, S, heads, head_dim]`.
        """

    def rotation(self, positions: torch.Tensor) -> Rotation:
        """Return what rotates queries and keys at positions `[...]`."""

    def combine(self, states: torch.Tensor) -> torch.Tensor:
        """Return what context is made of, `[N, hidden_size]`, of hidden states `[N, layers * target's hidden_size]`."""

    def embed(self, anchors: torch.Tensor, num_slots: int) -> torch.Tensor:
        """Return embeddings `[R, num_slots, hidden_size]` of blocks that begin with the tokens `anchors` `[R]`."""

    def norm(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the output `[..., hidden_size]` of the final norm."""


class BlockForward(RaggedForward):
    """
    Forward of a block drafter over ragged rows. `forward` adds committed tokens to the rows, from the target's hidden
    states, which its inputs carry as features: it runs no layer, and predicts nothing. `blocks` runs all rows' blocks
    at once, of which nothing stays.

    Args:
        model (`BlockLayers`): The layers, on their device.
    """

    def __init__(self, model: BlockLayers):
        super().__init__(model.config, model.device, model.dtype)
        self.model = model
        # Now rather than in a step: a GPU's host waits for frequencies that are copied to it.
        model.rotation(torch.zeros(1, dtype=torch.long, device=model.device))

    @property
    def device(self) -> torch.device:
        return self.model.device

    def _run(self, planned: PlannedForward) -> torch.Tensor:
        features = torch.cat([item.features for item in planned.rows if item.features is not None])
        combined = self.model.combine(features.to(device=self.device, dtype=self.model.dtype))
        rotation = self.model.rotation(planned.layout.positions[0])
        for number, layer in enumerate(self.model.layers):
            self.cache.layer(number).write(*layer.context(combined, rotation))
        return combined[:0]

    def blocks(self, rows: Sequence[CacheRow], anchors: Sequence[int], num_slots: int) -> torch.Tensor:
        """
        Run the blocks that follow the rows' texts.

        Args:
            anchors (sequence of `int`): The token after each row's, with which its block begins.
            num_slots (`int`): Slots of every block, S, the anchor's included.

        Returns:
            `torch.Tensor` of shape `[R, S, hidden_size]`: The output of the final norm, in the order of `rows`.
        """
        planned = self.plan([RowInput(row, _NOTHING, DraftTree.chain(np.zeros(num_slots))) for row in rows])
        places = {item.row: place for place, item in enumerate(planned.rows)}
        order = torch.tensor([places[row] for row in rows])
        first = torch.empty_like(order)
        first[order] = torch.tensor(anchors)
        layouts = {
            causal: planned.layout if causal else _whole(planned.layout)
            for causal in {layer.causal for layer in self.model.layers}
        }
        more = [first, order, planned.layout.positions]
        first, order, positions = send(list(layouts.values()), self.device, self.staging, more)
        hidden = self.model.embed(first, num_slots)
        rotation = self.model.rotation(positions.view(len(rows), num_slots))
        for number, layer in enumerate(self.model.layers):
            hidden = layer(hidden, rotation, partial(self._attend, number, layouts[layer.causal], layer.window))
        return self.model.norm(hidden)[order]

    def _attend(
        self,
        number: int,
        layout: StepLayout,
        window: int | None,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        self.cache.layout = layout
        memory = self.cache.layer(number).write(keys.flatten(0, 1), values.flatten(0, 1))
        return packed_attention(queries.flatten(0, 1), *memory, layout, window, sinks=sinks).view(queries.shape)


def _whole(layout: StepLayout) -> StepLayout:
    """Return the same step of chains, in which every token sees all tokens of its row, also those after it."""
    starts = np.flatnonzero(np.diff(layout.firsts, prepend=-1))
    ends = np.maximum.reduceat(layout.columns, starts)
    columns = np.repeat(ends, np.diff(starts, append=len(layout.columns)))
    parts = [_whole_part(part) for part in layout.parts]
    return replace(layout, columns=columns, parts=parts, spans=None, seen={})


def _whole_part(part: PaddedPart) -> PaddedPart:
    limits = part.limits.amax(dim=1, keepdim=True).expand_as(part.limits).contiguous()
    return replace(
        part,
        limits=limits,
        query_positions=part.limits - 1,  # of padding: any
        nodes=torch.empty(2, 0, dtype=torch.long),  # every token is in the column of its position
        on_host=None,
        sees_all=bool((limits == part.num_columns).all()),
        _masks={},
    )
