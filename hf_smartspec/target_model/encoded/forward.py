"""One forward of a decoder with cross attention for all rows: tokens packed as one sequence."""

from collections.abc import Sequence
from typing import Any

import torch
from transformers import DynamicCache, EncoderDecoderCache, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache
from transformers.modeling_outputs import BaseModelOutput

from ..cache.loading import load
from ..cache.slot_cache import SlotCache
from ..forward.packed import PackedForward
from ..forward.ragged import PlannedForward
from ..layout.rows import CacheRow, RowInput
from ..layout.step_layout import StepLayout
from .cross import cross_layout
from .relative import RelativeBias
from .step import EncodedStep, OwnCache, StepCache


class EncodedForward(PackedForward):
    """
    Forward of a decoder over ragged rows, draft trees included, each of which attends to an encoder's outputs, ragged
    as well. Keys and values of encoder outputs lie in a `SlotCache` of their own, one row for every row of the decoder.

    Args:
        model (`PreTrainedModel`): An encoder-decoder model whose decoder follows transformers' attention interface, or
            such a decoder alone.
        num_rows, capacity, prefill_chunk (`int`): See `PackedForward`.
    """

    cache: OwnCache

    def __init__(self, model: PreTrainedModel, num_rows: int = 1, capacity: int = 256, prefill_chunk: int = 512):
        super().__init__(model, num_rows, capacity, prefill_chunk)
        self.cache = OwnCache(num_rows, capacity)
        self.cross = SlotCache(1, 1)
        self.encoded: Cache | None = None  # the model's own cache of encoder outputs, padded, if `encode` keeps it
        self._sources: dict[CacheRow, CacheRow] = {}  # the cross-attention row of each row
        self._prefix = "decoder_" if model.config.is_encoder_decoder else ""
        self._hidden_size = encoder_size(model)
        if _has_position_biases(model):
            self._takes_spans = self._may_use_few_token_attention = False  # neither supports biases

    def add(self, num_tokens: int | None = None) -> CacheRow:
        """Add a row that attends to one encoder output, of zeros."""
        (row,) = self.encode(BaseModelOutput(self._zeros()), num_tokens=num_tokens)
        return row

    @torch.no_grad()
    def encode(
        self,
        outputs: BaseModelOutput,
        mask: torch.Tensor | None = None,
        num_tokens: int | None = None,
        keep: bool = False,
    ) -> list[CacheRow]:
        """
        Add one row for every text that an encoder has read. Their keys and values come from a forward of the model
        itself, of one token per row, so that it projects encoder outputs in its own way.

        Args:
            outputs (`BaseModelOutput`): Its first item is of shape `[rows, length, hidden_size]`.
            mask (`torch.Tensor` of shape `[rows, length]`, *optional*): 0 for padding, which is not attended to, unless
                a row is padding only.
            num_tokens (`int`, *optional*): Number of tokens that the decoder's rows will have.
            keep (`bool`): Whether to keep the model's own cache of encoder outputs, as `encoded`.
        """
        cached = self._read(outputs)
        masks = _masks(outputs, mask)
        self.cross.capacity = masks.shape[1]
        sources: list[CacheRow] = []
        rows: list[CacheRow] = []
        try:
            for length in masks.sum(dim=1).tolist():
                sources.append(self.cross.add(length))
            load(cached, self.cross, sources, list(masks))
            for _ in sources:
                rows.append(self.cache.add(num_tokens))
        except BaseException:  # a failure half-way, such as lack of memory, must not leave rows without an owner
            for cache, added in ((self.cross, sources), (self.cache, rows)):
                for row in added:
                    cache.remove(row)
            raise
        self._sources.update(zip(rows, sources))
        if keep:
            self.encoded = cached
        return rows

    @torch.no_grad()
    def encode_anew(self, row: CacheRow, outputs: BaseModelOutput, mask: torch.Tensor | None = None) -> None:
        """
        Replace a row's encoder output by another of the same length, `[1, length, hidden_size]`; the row's own tokens
        are dropped.
        """
        self.cut(row, 0)
        load(self._read(outputs), self.cross, [self._sources[row]], list(_masks(outputs, mask)))

    def _read(self, outputs: BaseModelOutput) -> DynamicCache:
        """Return the keys and values that the decoder computes from an encoder's outputs."""
        cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
        ids = torch.zeros(len(outputs[0]), 1, dtype=torch.long, device=self.device)
        self.model(
            **{self._prefix + "input_ids": ids, self._cache_name: cache},
            encoder_outputs=outputs,
            use_cache=True,
            return_dict=True,
        )
        return cache.cross_attention_cache

    def _zeros(self) -> torch.Tensor:
        return torch.zeros(1, 1, self._hidden_size, dtype=self.model.dtype, device=self.device)

    def clear(self, own: OwnCache, cross: SlotCache) -> None:
        """Begin again with other memory, which is empty; all rows are gone."""
        self.cache, self.cross, self.encoded = own, cross, None
        self._sources.clear()

    def remove(self, row: CacheRow) -> None:
        super().remove(row)
        self.cross.remove(self._sources.pop(row))

    def compact(self, rows: Sequence[CacheRow]) -> None:
        super().compact(rows)
        self.cross.compact([self._sources[row] for row in rows])

    def padded_context(self, rows: Sequence[CacheRow]) -> int:
        """Return the columns that attention reads in a step of one token per row, encoder outputs included."""
        return super().padded_context(rows) + sum([self._sources[row].length for row in rows])

    def plan(self, inputs: list[RowInput]) -> PlannedForward:
        planned = super().plan(inputs)
        rows = [(self._sources[item.row], item.num_tokens) for item in planned.rows]
        layout = planned.layout
        layout.encoded = EncodedStep(self.cross, cross_layout(rows, self._call), RelativeBias(layout.parts))
        return planned

    def _compute(self, layout: StepLayout) -> torch.Tensor:
        inputs: dict[str, Any] = {"input_ids": layout.tokens, "attention_mask": layout.tokens.new_zeros(1, 1, 1, 1)}
        output = self.model(
            **{self._prefix + name: value for name, value in inputs.items()},
            **{self._cache_name: StepCache(self.cache, self.cross, layout.positions[0])},
            encoder_outputs=BaseModelOutput(self._zeros()),  # a placeholder: their keys and values are cached
            use_cache=True,
            return_dict=True,
        )
        logits = output.logits[0]
        return logits if layout.kept is None else logits[layout.kept]

    def export(
        self, rows: Sequence[CacheRow], columns: Sequence[torch.Tensor], total_length: int, own: Cache
    ) -> EncoderDecoderCache:
        """Return transformers' cache of these rows: `SlotCache.export`, with the cache that `encode` has kept."""
        assert self.encoded is not None, "`encode` was called without `keep`"
        return EncoderDecoderCache(self.cache.export(rows, columns, total_length, own), self.encoded)


def _masks(outputs: BaseModelOutput, mask: torch.Tensor | None) -> torch.Tensor:
    """Return which of the outputs are attended to, bool `[rows, length]`, on the host."""
    masks = torch.ones(outputs[0].shape[:2], dtype=torch.bool) if mask is None else mask.bool().cpu()
    return masks | ~masks.any(dim=1, keepdim=True)  # a softmax over no columns is NaN


def _has_position_biases(model: PreTrainedModel) -> bool:
    return any(hasattr(module, "compute_bias") for module in model.modules())


def encoder_size(model: PreTrainedModel) -> int:
    """Return the dimensions of the encoder outputs that the model's decoder attends to."""
    own = getattr(model.config, "encoder", None)
    return (own if isinstance(own, PreTrainedConfig) else model.config).hidden_size


def masks_encoder(model: PreTrainedModel) -> bool:
    """
    Return whether the decoder leaves out encoder inputs that `attention_mask` masks: those of texts, not of speech.
    """
    return model.main_input_name == "input_ids"
