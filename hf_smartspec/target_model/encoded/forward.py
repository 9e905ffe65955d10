"""One forward of a decoder behind an encoder, for all rows: tokens packed as one sequence."""

from collections.abc import Sequence
from typing import Any

import torch
from transformers import DynamicCache, EncoderDecoderCache, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache
from transformers.modeling_outputs import BaseModelOutput

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
    Runs a decoder over ragged rows, draft trees included, each of which sees the outputs of an encoder, ragged as well.
    Their keys and values lie in a `SlotCache` of their own, one row for every row of the decoder.

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
        self.encoded: Cache | None = None  # what the encoder's outputs became, padded, where `encode` is to keep it
        self._sources: dict[CacheRow, CacheRow] = {}  # where each row's encoder outputs lie
        self._prefix = "decoder_" if model.config.is_encoder_decoder else ""
        self._hidden_size = encoder_size(model)
        if _has_position_biases(model):
            self._takes_spans = self._may_be_thin = False  # neither knows of biases

    def add(self, num_tokens: int | None = None) -> CacheRow:
        """A new row that sees one encoder output, of zeros."""
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
        New rows, one for every text that an encoder has read. Their keys and values come from a forward of the model's
        own, of one token a row: it knows what it makes of encoder outputs.

        Args:
            outputs (`BaseModelOutput`): Its first item is of shape `[rows, length, hidden_size]`.
            mask (`torch.Tensor` of shape `[rows, length]`, *optional*): 0 where there is padding, which nobody sees,
                unless a row is nothing else.
            num_tokens (`int`, *optional*): That the decoder's rows will have.
            keep (`bool`): Whether the model's own cache of encoder outputs is wanted later, as `encoded`.
        """
        cached = self._read(outputs)
        masks = _masks(outputs, mask)
        self.cross.capacity = masks.shape[1]
        sources: list[CacheRow] = []
        rows: list[CacheRow] = []
        try:
            for length in masks.sum(dim=1).tolist():
                sources.append(self.cross.add(length))
            self.cross.load(cached, sources, list(masks))
            for _ in sources:
                rows.append(self.cache.add(num_tokens))
        except BaseException:  # what fails half-way, for want of memory say, leaves no row that nobody has
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
        """Another encoder output `[1, length, hidden_size]` for a row, of the same length; its own tokens go."""
        self.cut(row, 0)
        self.cross.load(self._read(outputs), [self._sources[row]], list(_masks(outputs, mask)))

    def _read(self, outputs: BaseModelOutput) -> DynamicCache:
        """Keys and values that the decoder makes of an encoder's outputs."""
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
        """Begins with other memory, which is empty; all rows are gone."""
        self.cache, self.cross, self.encoded = own, cross, None
        self._sources.clear()

    def remove(self, row: CacheRow) -> None:
        super().remove(row)
        self.cross.remove(self._sources.pop(row))

    def compact(self, rows: Sequence[CacheRow]) -> None:
        super().compact(rows)
        self.cross.compact([self._sources[row] for row in rows])

    def padded_context(self, rows: Sequence[CacheRow]) -> int:
        """The columns that attention reads in a step of one token a row, encoder outputs included."""
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
            encoder_outputs=BaseModelOutput(self._zeros()),  # all is known of them that matters
            use_cache=True,
            return_dict=True,
        )
        logits = output.logits[0]
        return logits if layout.kept is None else logits[layout.kept]

    def export(
        self, rows: Sequence[CacheRow], columns: Sequence[torch.Tensor], total_length: int, own: Cache
    ) -> EncoderDecoderCache:
        """As `SlotCache.export`, beside what `encode` has kept."""
        assert self.encoded is not None, "`encode` has been told to keep nothing"
        return EncoderDecoderCache(self.cache.export(rows, columns, total_length, own), self.encoded)


def _masks(outputs: BaseModelOutput, mask: torch.Tensor | None) -> torch.Tensor:
    """Which of the outputs are seen, bool `[rows, length]`, on the host."""
    masks = torch.ones(outputs[0].shape[:2], dtype=torch.bool) if mask is None else mask.bool().cpu()
    return masks | ~masks.any(dim=1, keepdim=True)  # a softmax over nothing is NaN


def _has_position_biases(model: PreTrainedModel) -> bool:
    return any(hasattr(module, "compute_bias") for module in model.modules())


def encoder_size(model: PreTrainedModel) -> int:
    """Dimensions of the encoder outputs that the model's decoder looks at."""
    own = getattr(model.config, "encoder", None)
    return (own if isinstance(own, PreTrainedConfig) else model.config).hidden_size


def masks_encoder(model: PreTrainedModel) -> bool:
    """Whether the decoder leaves out what `attention_mask` masks of the encoder's inputs: of texts, not of speech."""
    return model.main_input_name == "input_ids"
