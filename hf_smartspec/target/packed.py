"""One forward of all rows: tokens packed as one sequence, keys and values in a `SlotCache`."""

import inspect
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from transformers import PreTrainedModel

from ..device import Wire
from ..sampling.top import Top, argmax, best_of
from .attention import attention_configs, tree_attention_step
from .compat import shared_value
from .graphs import recordings_for
from .graphs.padding import MOST_TOKENS, ROUNDING, pad
from .hidden_states import HiddenStateTaps
from .layout import StepLayout, build_layout, send
from .rotary import LengthwiseRotary, seen_lengths
from .row_groups import arrange, call_columns, head_size, padded_context
from .rows import CacheRow, RowInput
from .slot_cache import SlotCache
from .varlen import serves, spans_of

if TYPE_CHECKING:
    from .written.decoder import WrittenDecoder

_LEAST_CHUNK = 16  # tokens of a piece of a long prompt, unless less is asked for
_MASK_SIZE = 2**26  # entries of the attention mask of a piece of a long prompt


@dataclass(eq=False)
class PlannedForward:
    """
    A packed forward before it is run.

    Args:
        rows (list of `RowInput`): In the order of their tokens.
        layout (`StepLayout`): Of these tokens.
        first_lines (dict): The first line of every row in the logits.
        num_lines (`int`): M, of the logits.
        seen_lengths (`np.ndarray` of shape `[N]`, *optional*): Of the text, for every token, where the model's rotary
            embeddings depend on it.
    """

    rows: list[RowInput]
    layout: StepLayout
    first_lines: dict[CacheRow, int]
    num_lines: int
    seen_lengths: np.ndarray | None

    def settle(self) -> None:
        """The rows hold their feed as committed."""
        for item in self.rows:
            item.row.length += len(item.feed)
            item.row.num_nodes = len(item.tree.tokens)


class PackedForward:
    """
    Runs a causal language model over ragged rows, draft trees included, at the cost of exactly their tokens.

    Args:
        model (`PreTrainedModel`): A model that follows transformers' attention interface.
        num_rows, capacity (`int`): Rows and tokens per row to make room for; both grow on demand.
        prefill_chunk (`int`): Longer feeds are run in pieces of this many tokens a row, which bounds the memory of
            attention masks and activations.
        choose (`Callable`, *optional*): Says before every forward which written-out decoder computes it; the model's
            own forward, where it gives None. The model's own forward always, where not given.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        num_rows: int = 1,
        capacity: int = 256,
        prefill_chunk: int = 512,
        choose: "Callable[[], WrittenDecoder | None] | None" = None,
    ):
        self.model = model
        self.trees = True
        self.cache = SlotCache(num_rows, capacity)
        self.wire = Wire()
        self.taps = HiddenStateTaps(model)
        self.prefill_chunk, self._choose = prefill_chunk, choose
        self._configs = attention_configs(model)
        self.rotary = LengthwiseRotary(model)
        config = model.config.get_text_config(decoder=True)
        heads = shared_value(config, "num_attention_heads") or 1
        self._groups = max(heads // (shared_value(config, "num_key_value_heads") or heads), 1)
        self._call = call_columns(config, model.device.type)
        is_own = choose is None or bool(self.rotary)  # whose lengths the host sees to
        self.recordings = None if is_own else recordings_for(self.device)
        is_capped = shared_value(config, "attn_logit_softcapping") is not None  # which flash attention does not know
        self._takes_spans = serves(self.device, model.dtype, head_size(config)) and not is_capped
        self._selects_logits = "logits_to_keep" in inspect.signature(model.forward).parameters

    def add(self, num_tokens: int | None = None) -> CacheRow:
        """A new row, with room for so many tokens; it grows on demand."""
        return self.cache.add(num_tokens)

    def remove(self, row: CacheRow) -> None:
        self.cache.remove(row)

    def compact(self, rows: Sequence[CacheRow]) -> None:
        self.cache.compact(rows)

    def cut(self, row: CacheRow, length: int) -> None:
        """Takes a row back to its first `length` tokens."""
        row.length, row.num_nodes = length, 0

    def padded_context(self, rows: Sequence[CacheRow]) -> int:
        """The columns that attention reads in a step of one token a row; see `row_groups.padded_context`."""
        if self._takes_spans:  # flash attention reads each row's own, in one call
            return sum(row.length for row in rows)
        return padded_context(rows, self._call)

    def argmax(self, logits: torch.Tensor) -> list[int]:
        return argmax(logits)

    def top(self, logits: torch.Tensor, count: int, num_lines: int, with_argmax: bool) -> Top | None:
        return best_of(logits, count, num_lines, with_argmax)

    def commit(self, rows: Sequence[CacheRow], paths: Sequence[Sequence[int]]) -> None:
        self.cache.commit(rows, paths)

    def forward(self, inputs: Sequence[RowInput]) -> tuple[torch.Tensor, list[int]]:
        """
        Feeds every row its committed tokens and draft nodes; the rows then hold their feed as committed.

        Returns:
            Logits of shape `[M, vocab_size]` in the model's dtype, and for each row the index of its first line in
            them: the line of its last fed token (if it fed any), then one line per new node.
        """
        planned = self.plan(self.run_long_feeds(list(inputs)))
        send([planned.layout], self.device, self.wire)
        logits = self.run(planned)
        planned.settle()
        return logits, [planned.first_lines[item.row] for item in inputs]

    @property
    def device(self) -> torch.device:
        """Where tokens go first."""
        return self.model.get_input_embeddings().weight.device  # type: ignore[return-value]

    def plan(self, inputs: list[RowInput]) -> PlannedForward:
        """Lays out a forward, on the host. Rows that have too little room for it move."""
        needs = [item.row.length + len(item.feed) + len(item.tree.tokens) for item in inputs]
        self.cache.reserve([item.row for item in inputs], needs)
        groups = arrange(inputs, self._call)
        rows = [item for group in groups for item in group]
        may_be_recorded = self.recordings is not None and self.recordings.may_serve
        is_padded = may_be_recorded and sum([item.num_tokens for item in rows]) <= MOST_TOKENS
        layout = build_layout(groups, ROUNDING if is_padded else None)
        if self._takes_spans:
            layout.spans = spans_of(layout)
        first_lines, kept, num_lines = _kept(rows)
        layout.kept = None if kept is None else torch.tensor(kept)
        seen = seen_lengths(rows, layout.positions[0].numpy()) if self.rotary else None
        if is_padded:
            pad(layout)
        return PlannedForward(rows, layout, first_lines, num_lines, seen)

    def run_long_feeds(self, inputs: list[RowInput]) -> list[RowInput]:
        """Runs all but the last piece of long feeds; returns what is left."""
        if max([len(item.feed) for item in inputs]) <= min(self.prefill_chunk, _LEAST_CHUNK):
            return inputs
        chunk = self._chunk(inputs)
        while any([len(item.feed) > chunk for item in inputs]):
            long = [item for item in inputs if len(item.feed) > chunk]
            chunks = [RowInput(item.row, item.feed[:chunk]) for item in long]
            planned = self.plan(chunks)
            planned.layout.kept = torch.zeros(1, dtype=torch.long)  # logits of one token, since there must be some
            send([planned.layout], self.device, self.wire)
            self.run(planned)
            planned.settle()
            rest = {}
            for item in long:
                rest[id(item)] = RowInput(item.row, item.feed[chunk:], item.tree, item.first_node)
            inputs = [rest.get(id(item), item) for item in inputs]
        return inputs

    def _chunk(self, inputs: list[RowInput]) -> int:
        """Tokens per row and piece of a long feed, so that the mask `[rows, chunk * groups, columns]` stays small."""
        sizes: dict[int, list[int]] = {}  # of each slab: rows, and columns of the longest
        for item in inputs:
            size = sizes.setdefault(item.row.origin, [0, 0])
            size[:] = max(size[0], item.row.slot + 1), max(size[1], item.row.length + len(item.feed))
        columns = sum([rows * longest for rows, longest in sizes.values()])
        return min(self.prefill_chunk, max(_MASK_SIZE // (columns * self._groups), _LEAST_CHUNK))

    def run(self, planned: PlannedForward) -> torch.Tensor:
        """The logits `[M, vocab_size]` of a forward whose layout is where the model is."""
        logits = self._run(planned)
        self.taps.note(planned.rows)
        return logits[: planned.num_lines] if planned.layout.is_padded else logits

    def _run(self, planned: PlannedForward) -> torch.Tensor:
        layout = self.cache.layout = planned.layout
        decoder = None if self._choose is None else self._choose()
        if decoder is None and self.recordings is not None:
            self.recordings.may_serve = False
        if decoder is not None:
            return self._run_written(decoder, planned)
        with tree_attention_step(self._configs, layout), self._lengths_step(planned), self.taps.installed():
            kwargs = {"logits_to_keep": 0 if layout.kept is None else layout.kept} if self._selects_logits else {}
            # A 4-D mask makes models skip the building of their own; tree attention reads the layout instead.
            output = self.model(
                input_ids=layout.tokens,
                position_ids=layout.positions,
                attention_mask=layout.tokens.new_zeros(1, 1, 1, 1),
                past_key_values=self.cache,
                use_cache=True,
                return_dict=True,
                **kwargs,
            )
        logits = output.logits[0]
        return logits if layout.kept is None or self._selects_logits else logits[layout.kept]

    def _run_written(self, decoder: "WrittenDecoder", planned: PlannedForward) -> torch.Tensor:
        layout, keep = planned.layout, self.taps.keep if self.taps.is_taking else None
        if self.recordings is not None:
            return self.recordings(decoder, layout, self.cache, self.taps.layers, keep)
        with self._lengths_step(planned):
            return decoder(layout, self.cache, keep)

    def _lengths_step(self, planned: PlannedForward) -> AbstractContextManager[None]:
        return nullcontext() if planned.seen_lengths is None else self.rotary.step(planned.seen_lengths)


def _kept(rows: Sequence[RowInput]) -> tuple[dict[CacheRow, int], list[int] | None, int]:
    """
    The first line of every row in the logits, and the tokens whose logits these are: the last that a row is fed, and
    its nodes, None if these are all, and how many there are.
    """
    first_lines: dict[CacheRow, int] = {}
    kept: list[int] = []
    keeps_all = all([len(item.feed) < 2 for item in rows])
    end = num_kept = 0
    for item in rows:
        num_lines = item.num_nodes + bool(len(item.feed))
        first_lines[item.row] = num_kept
        num_kept += num_lines
        end += item.num_tokens
        if not keeps_all:
            kept += range(end - num_lines, end)
    return first_lines, None if keeps_all else kept, num_kept
