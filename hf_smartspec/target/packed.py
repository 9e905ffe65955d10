"""One forward of all rows: tokens packed as one sequence, keys and values in a `SlotCache`."""

import inspect
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import numpy as np
import torch
from transformers import PreTrainedModel

from ..device import to_device
from ..sampling.top import Top, argmax, best_of
from .attention import attention_configs, tree_attention_step
from .compat import shared_value
from .hidden_states import HiddenStateTaps
from .layout import CacheRow, RowInput, StepLayout, arrange, build_layout, padded_context
from .rotary import LengthwiseRotary, seen_lengths
from .row_groups import call_columns
from .slot_cache import SlotCache

if TYPE_CHECKING:
    from .written.decoder import WrittenDecoder

_MASK_SIZE = 2**26  # entries of the attention mask of a piece of a long prompt


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
        self.taps = HiddenStateTaps(model)
        self.prefill_chunk, self._choose = prefill_chunk, choose
        self._configs = attention_configs(model)
        self.rotary = LengthwiseRotary(model)
        config = model.config.get_text_config(decoder=True)
        heads = shared_value(config, "num_attention_heads") or 1
        self._groups = max(heads // (shared_value(config, "num_key_value_heads") or heads), 1)
        self._call = call_columns(config, model.device.type)
        self._selects_logits = "logits_to_keep" in inspect.signature(model.forward).parameters

    def add(self) -> CacheRow:
        return self.cache.add()

    def remove(self, row: CacheRow) -> None:
        self.cache.remove(row)

    def compact(self, rows: Sequence[CacheRow]) -> None:
        self.cache.compact(rows)

    def cut(self, row: CacheRow, length: int) -> None:
        """Takes a row back to its first `length` tokens."""
        row.length, row.num_nodes = length, 0

    def padded_context(self, rows: Sequence[CacheRow]) -> int:
        """The columns that attention reads in a step of one token a row; see `layout.padded_context`."""
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
        groups = arrange(self._run_long_feeds(list(inputs)), self._call)
        order = [item for group in groups for item in group]
        self.cache.reserve(max([item.row.length + len(item.feed) + len(item.tree.tokens) for item in order]))

        keep: list[int] = []
        first_line: dict[int, int] = {}
        offset = num_kept = 0
        keeps_all = all([len(item.feed) < 2 for item in order])
        for item in order:
            num_lines = item.num_nodes + bool(len(item.feed))
            first_line[id(item.row)] = num_kept
            num_kept += num_lines
            offset += item.num_tokens
            if not keeps_all:
                keep += range(offset - num_lines, offset)
        logits = self._run(groups, None if keeps_all else keep)
        self.taps.note(order)
        for item in order:
            item.row.length += len(item.feed)
            item.row.num_nodes = len(item.tree.tokens)
        return logits, [first_line[id(item.row)] for item in inputs]

    def _run_long_feeds(self, inputs: list[RowInput]) -> list[RowInput]:
        chunk = self._chunk(inputs)
        while any([len(item.feed) > chunk for item in inputs]):
            long = [item for item in inputs if len(item.feed) > chunk]
            chunks = [RowInput(item.row, item.feed[:chunk]) for item in long]
            self.cache.reserve(max(item.row.length for item in chunks) + chunk)
            groups = arrange(chunks, self._call)
            self._run(groups, keep=[0])
            self.taps.note([item for group in groups for item in group])
            rest = {}
            for item in long:
                rest[id(item)] = RowInput(item.row, item.feed[chunk:], item.tree, item.first_node)
                item.row.length += chunk
            inputs = [rest.get(id(item), item) for item in inputs]
        return inputs

    def _chunk(self, inputs: list[RowInput]) -> int:
        """Tokens per row and piece of a long feed, so that the mask `[rows, chunk * groups, columns]` stays small."""
        longest = max([item.row.length + len(item.feed) for item in inputs])
        rows = max([item.row.slot for item in inputs]) + 1
        return min(self.prefill_chunk, max(_MASK_SIZE // (rows * longest * self._groups), 16))

    def _run(self, groups: Sequence[Sequence[RowInput]], keep: list[int] | None) -> torch.Tensor:
        device: torch.device = self.model.get_input_embeddings().weight.device  # type: ignore[assignment]
        layout = build_layout(groups, device)
        self.cache.layout = layout
        index = None if keep is None else to_device(np.array(keep), device)
        decoder = None if self._choose is None else self._choose()
        if decoder is not None:
            with self._lengths_step(groups, layout):
                return decoder(layout, self.cache, index, self.taps.keep if self.taps.is_taking else None)
        with tree_attention_step(self._configs, layout), self._lengths_step(groups, layout), self.taps.installed():
            kwargs = {"logits_to_keep": 0 if index is None else index} if self._selects_logits else {}
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
        return logits if index is None or self._selects_logits else logits[index]

    def _lengths_step(self, groups: Sequence[Sequence[RowInput]], layout: StepLayout) -> AbstractContextManager[None]:
        if not self.rotary:
            return nullcontext()
        rows = [item for group in groups for item in group]
        return self.rotary.step(seen_lengths(rows, layout.positions[0].cpu().numpy()))
