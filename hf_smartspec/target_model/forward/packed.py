"""One forward of a causal language model for all rows: tokens packed as one sequence."""

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers import PreTrainedModel

from ...cpu.kernels.screen import CHUNK
from ...cpu.screening import Picks
from ...drafts.tree import DraftTree
from ...sampling.top import Top, argmax, best_by_bounds, best_of
from ..attention.tree_attention import attention_configs, tree_attention_step
from ..cache.footprint import Footprint
from ..cache.slot_cache import SlotCache
from ..compat import cache_name
from ..graphs import recordings_for
from ..graphs.padding import MOST_TOKENS, ROUNDING, pad
from ..layout.rows import CacheRow, RowInput
from ..layout.shared_prefix import may_share
from ..layout.step_layout import StepLayout
from ..recurrent.cache import StateCache
from ..recurrent.functions import recurrent_layers
from .hidden_states import HiddenStateTaps
from .ragged import ForwardSeries, PlannedForward, RaggedForward
from .rotary import LengthwiseRotary, seen_lengths

if TYPE_CHECKING:
    from ..written.decoder import WrittenDecoder


class PackedForward(RaggedForward):
    """
    Forward of a causal language model over ragged rows, draft trees included, at the cost of exactly their tokens.

    Args:
        model (`PreTrainedModel`): A model that follows transformers' attention interface.
        num_rows, capacity (`int`): Rows and tokens per row to make room for; both grow on demand.
        prefill_chunk (`int`): Longer feeds are run in pieces of this many tokens a row, which bounds the memory of
            attention masks and activations.
        choose (`Callable`, *optional*): Returns, before every forward, the written-out decoder that computes it, or
            None for the model's own forward. It gets whether changes of the model may be noticed a moment later, as
            while the same rows run. If not given, the model's own forward computes all.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        num_rows: int = 1,
        capacity: int = 256,
        prefill_chunk: int = 512,
        choose: "Callable[[bool], WrittenDecoder | None] | None" = None,
    ):
        config = model.config.get_text_config(decoder=True)
        super().__init__(config, model.device, model.dtype, num_rows, capacity, prefill_chunk)
        self.recurrent = recurrent_layers(model)
        if self.recurrent is not None:
            self.plans_by_trees = True
            self.cache = self.new_cache(num_rows, capacity)
        self.model, self._choose = model, choose
        self.trees = True
        self.taps = HiddenStateTaps(model)
        self._configs = attention_configs(model)
        self.rotary = LengthwiseRotary(model)
        # These embeddings are chosen on the host, by lengths, and steps of recurrent layers are laid out there.
        is_own = choose is None or self.recurrent is not None or bool(self.rotary)
        self.recordings = None if is_own else recordings_for(self.device)
        # MiniMax would insist on a cache of its own.
        self._takes_any_cache = model._supports_default_dynamic_cache()  # type: ignore[operator]
        self._cache_name = cache_name(model.forward)
        self._selects_logits = "logits_to_keep" in inspect.signature(model.forward).parameters

    @property
    def device(self) -> torch.device:
        return self.model.get_input_embeddings().weight.device  # type: ignore[return-value]

    def new_cache(self, num_slots: int, capacity: int, most_lines: int | None = None) -> SlotCache:
        """Return an empty cache of the kind that the model needs; see `SlotCache`."""
        if self.recurrent is None:
            return SlotCache(num_slots, capacity, most_lines)
        return StateCache(num_slots, capacity, most_lines, self.recurrent.chunk)

    @torch.no_grad()
    def footprint(self) -> Footprint:
        """Measure the memory of a text by a forward of a token and a draft."""
        self.forward([RowInput(self.add(), np.zeros(1, np.int64), DraftTree.chain([0]))])
        return Footprint(self.cache.bytes_per_row, self.cache.bytes_per_line)

    @property
    def shares_prefixes(self) -> bool:
        """
        Return whether rows may share prefixes. On GPUs they may not: forwards are recorded there, and attend in other
        ways.
        """
        config = self.model.config.get_text_config(decoder=True)
        is_sharing = self.device.type == "cpu" and not self.rotary and self.recurrent is None
        return is_sharing and may_share(config)

    def argmax(self, logits: Any) -> list[int]:
        if isinstance(logits, Picks):
            return logits.tokens
        return argmax(logits)

    def top(self, logits: Any, count: int, num_lines: int, with_argmax: bool) -> Top | None:
        if isinstance(logits, Picks):  # what is likely may be by scores that are nearly right
            return Top(logits.tokens, *best_by_bounds(logits.scores, logits.bounds, CHUNK, count, num_lines))
        return best_of(logits, count, num_lines, with_argmax)

    def plan(self, inputs: list[RowInput]) -> PlannedForward:
        may_be_recorded = self.recordings is not None and self.recordings.may_serve
        is_padded = may_be_recorded and sum([item.num_tokens for item in inputs]) <= MOST_TOKENS
        rows, layout = self._laid_out(inputs, ROUNDING if is_padded else None)
        planned = self._planned(rows, layout)
        if self.rotary:
            planned.seen_lengths = seen_lengths(rows, layout.positions[0].numpy())
        if is_padded:
            pad(layout)
        return planned

    def run_series(self, series: ForwardSeries) -> list[np.ndarray]:
        if self.recordings is not None and self._choose is not None and not self.taps.is_taking:
            decoder = self._chosen()
            if decoder is not None:
                return self.recordings.run_series(decoder, series, self.cache, self.run)
        return super().run_series(series)

    def run(self, planned: PlannedForward) -> Any:
        logits = super().run(planned)
        self.taps.note(planned.rows)
        return logits

    def _run(self, planned: PlannedForward) -> Any:
        if not isinstance(self.cache, StateCache):
            return self._run_chosen(planned)
        self.cache.begin(planned.rows, self.device)
        try:
            return self._run_chosen(planned)
        except BaseException:  # some layers have run these tokens, and others have not
            for item in planned.rows:
                self.cache.rest(item.row)
                self.cut(item.row, item.row.length)  # to its last kept states
            raise

    def _run_chosen(self, planned: PlannedForward) -> Any:
        """Run the written-out decoder, or else the model's own forward."""
        layout = planned.layout
        decoder = self._chosen()
        if decoder is None and self.recordings is not None:
            self.recordings.may_serve = False
        if decoder is not None:
            return self._run_written(decoder, planned)
        with tree_attention_step(self._configs, layout), self._lengths_step(planned), self.taps.installed():
            if self.recurrent is None:
                return self._compute(layout)
            assert isinstance(self.cache, StateCache), "the cache that the model needs"
            with self.recurrent.step(self.cache):
                return self._compute(layout)

    def _chosen(self) -> "WrittenDecoder | None":
        """Return the written-out decoder, if that is to run."""
        has_new_rows, self.cache.has_new_rows = self.cache.has_new_rows, False
        # A host that only launches has modules and weights in its caches, and looks at them in no time.
        return (
            None
            if self._choose is None
            else self._choose(self.device.type == "cpu" and self.recordings is None and not has_new_rows)
        )

    def cut(self, row: CacheRow, length: int) -> None:
        """Cut a row; if it has states, which cannot be taken back, to its last kept ones of at most `length` tokens."""
        super().cut(row, self.cache.restore(row, length) if isinstance(self.cache, StateCache) else length)

    def _compute(self, layout: StepLayout) -> torch.Tensor:
        """Run the model's own forward."""
        kwargs: dict[str, Any] = {self._cache_name: self.cache}
        if self._selects_logits:
            kwargs["logits_to_keep"] = 0 if layout.kept is None else layout.kept
        mask = layout.tokens.new_zeros(1, 1, 1, 1)
        if self.recurrent is not None and self.recurrent.chooses_keys:
            mask = mask == 0  # their layers combine it with another one, which is bool
            # The model reads `cache.layers[i]` before its layer i asks for it.
            self.cache.layer(self.model.config.get_text_config(decoder=True).num_hidden_layers - 1)
        # A 4-D mask makes models skip the building of their own; tree attention reads the layout instead.
        output = self.model(
            input_ids=layout.tokens,
            position_ids=layout.positions,
            attention_mask=mask,
            use_cache=self._takes_any_cache,  # the cache is passed all the same
            return_dict=True,
            **kwargs,
        )
        logits = output.logits[0]
        return logits if layout.kept is None or self._selects_logits else logits[layout.kept]

    def _run_written(self, decoder: "WrittenDecoder", planned: PlannedForward) -> Any:
        layout, keep = planned.layout, self.taps.keep if self.taps.is_taking else None
        if self.recordings is not None:
            return self.recordings(decoder, layout, self.cache, self.taps.layers, keep)
        with self._lengths_step(planned):
            return decoder(layout, self.cache, keep, self.taps.layers)

    def _lengths_step(self, planned: PlannedForward) -> AbstractContextManager[None]:
        return nullcontext() if planned.seen_lengths is None else self.rotary.step(planned.seen_lengths)
