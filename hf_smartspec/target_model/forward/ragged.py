"""Common parts of forwards over ragged rows: rows, layouts, and long feeds in pieces."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedConfig

from ...cpu.attention import has_attention
from ...device import StagingBuffer, fetch_together
from ..attention.varlen import serves, spans_of
from ..cache.slot_cache import SlotCache
from ..compat import shared_value
from ..layout.row_groups import arrange, call_columns, head_size, padded_context
from ..layout.rows import CacheRow, RowInput
from ..layout.shared_prefix import set_shared_reads, shared_reads_of
from ..layout.step_layout import Rounding, StepLayout, build_layout, send

_LEAST_CHUNK = 16  # tokens of a piece of a long prompt, unless less is asked for
_MASK_SIZE = 2**26  # entries of the attention mask of a piece of a long prompt


@dataclass(eq=False)
class PlannedForward:
    """
    A packed forward before it is run.

    Args:
        rows (list of `RowInput`): Rows in the order of their tokens.
        layout (`StepLayout`): Layout of these tokens.
        first_lines (dict): The first line of every row in the logits.
        num_lines (`int`): Number of lines of the logits, M.
        seen_lengths (`np.ndarray` of shape `[N]`, *optional*): Length of the text for every token, where the model's
            rotary embeddings depend on it.
        features (`torch.Tensor` of shape `[N, D]`, *optional*): Features of the tokens, for forwards that take them.
        hidden (`torch.Tensor` of shape `[M, D]`, *optional*): Outputs of a forward that takes features: one for each
            line of the logits, for use as features of further nodes.
    """

    rows: list[RowInput]
    layout: StepLayout
    first_lines: dict[CacheRow, int]
    num_lines: int
    seen_lengths: np.ndarray | None = None
    features: torch.Tensor | None = None
    hidden: torch.Tensor | None = None

    def settle(self) -> None:
        """Count the feed of every row as committed."""
        for item in self.rows:
            item.row.length += len(item.feed)
            item.row.num_nodes = len(item.tree.tokens)


@dataclass(eq=False)
class ForwardSeries:
    """
    A series of forwards with work in between; the host waits for the device only after all of them are launched.

    Args:
        planned (list of `PlannedForward`): The forwards in order, laid out and sent.
        tensors (list of `torch.Tensor`): Further inputs, on the device.
        function (`Callable`): Computes the results from `planned`, `tensors`, and a function that runs one forward.
            Results are float32, or integers below 2**31. It may change the layouts.
        what (`Callable`): Returns a key of all else that determines what `function` does; None where there is no such
            key.
    """

    planned: list[PlannedForward]
    tensors: list[torch.Tensor]
    function: Callable[
        [list[PlannedForward], list[torch.Tensor], Callable[[PlannedForward], torch.Tensor]], list[torch.Tensor]
    ]
    what: Callable[[], Hashable]

    def run(self, run: Callable[[PlannedForward], torch.Tensor]) -> list[torch.Tensor]:
        return self.function(self.planned, self.tensors, run)


class RaggedForward(ABC):
    """
    A forward over ragged rows, draft trees included, at the cost of exactly their tokens. Keys and values lie in a
    `SlotCache`. Subclasses define the computation (`_run`).

    Args:
        config (`PreTrainedConfig`): Config of the decoder: its heads, and their size.
        device (`torch.device`), dtype (`torch.dtype`): Device and dtype of attention.
        num_rows, capacity (`int`): Rows and tokens per row to make room for; both grow on demand.
        prefill_chunk (`int`): Longer feeds are run in pieces of this many tokens a row.
    """

    plans_by_trees = False  # whether a forward cannot be planned before the tree is known

    def __init__(
        self,
        config: PreTrainedConfig,
        device: torch.device,
        dtype: torch.dtype,
        num_rows: int = 1,
        capacity: int = 256,
        prefill_chunk: int = 512,
    ):
        self.cache = SlotCache(num_rows, capacity)
        self.hidden: torch.Tensor | None = None  # `PlannedForward.hidden` of the latest forward
        self.staging = StagingBuffer()
        self.prefill_chunk = prefill_chunk
        heads = shared_value(config, "num_attention_heads") or 1
        self._groups = max(heads // (shared_value(config, "num_key_value_heads") or heads), 1)
        self._call = call_columns(config, device.type)
        is_capped = shared_value(config, "attn_logit_softcapping") is not None  # not supported by flash attention
        self._takes_spans = serves(device, dtype, head_size(config)) and not is_capped
        self._window = shared_value(config, "sliding_window")
        self._may_use_few_token_attention = device.type == "cpu" and not head_size(config) % 16
        self._dtype = dtype

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Device to which tokens are sent."""

    @abstractmethod
    def _run(self, planned: PlannedForward) -> Any:
        """Return what `run` returns, of a forward whose layout is set in the cache."""

    def add(self, num_tokens: int | None = None) -> CacheRow:
        """Add a row, with room for `num_tokens`; it grows on demand."""
        return self.cache.add(num_tokens)

    def remove(self, row: CacheRow) -> None:
        self.cache.remove(row)

    def compact(self, rows: Sequence[CacheRow]) -> None:
        self.cache.compact(rows)

    def cut(self, row: CacheRow, length: int) -> None:
        """Cut a row to its first `length` tokens, which include those that it shares with others."""
        assert length >= row.prefix_len, "shared tokens lie in another row"
        row.length, row.num_nodes = length, 0

    def reuse(self, row: CacheRow, other: CacheRow, length: int) -> None:
        """Begin a row with the first `length` tokens of another."""
        self.cache.reserve([row], [length])
        self.cache.copy(other, row, length)
        row.length, row.num_nodes = length, 0

    def padded_context(self, rows: Sequence[CacheRow]) -> int:
        """Return the columns that attention reads in a step of one token per row; see `row_groups.padded_context`."""
        if self._takes_spans or self._uses_few_token_attention:  # both read only the rows' own columns, in one call
            set_shared_reads(rows)
            return sum([row.own for row in rows]) + sum([length for _, length in shared_reads_of(rows)])
        return padded_context(rows, self._call)

    @property
    def _uses_few_token_attention(self) -> bool:
        """Return whether compiled attention reads rows that have few tokens."""
        return self._may_use_few_token_attention and has_attention(self._dtype)

    def commit(self, rows: Sequence[CacheRow], paths: Sequence[Sequence[int]]) -> None:
        self.cache.commit(rows, paths)

    def forward(self, inputs: Sequence[RowInput]) -> tuple[Any, list[int]]:
        """
        Feed every row its committed tokens and draft nodes; the rows then hold their feed as committed.

        Returns:
            Logits of shape `[M, vocab_size]` in the model's dtype, or `Picks` of as many lines, where these are enough
            for all rows (`RowInput.best_only`) and are found faster; and for each row the index of its first line in
            them: the line of its last fed token (if it fed any), then one line per new node.
        """
        planned = self.plan(self.run_long_feeds(list(inputs)))
        send([planned.layout], self.device, self.staging)
        logits = self.run(planned)
        planned.settle()
        self.hidden = planned.hidden
        return logits, [planned.first_lines[item.row] for item in inputs]

    def plan(self, inputs: list[RowInput]) -> PlannedForward:
        """Lay out a forward, on the host. Rows with too little room for it move."""
        return self._planned(*self._laid_out(inputs))

    def _laid_out(self, inputs: list[RowInput], rounding: Rounding | None = None) -> tuple[list[RowInput], StepLayout]:
        """Return the rows in the order of their tokens, and the layout of these."""
        needs = [item.row.length + len(item.feed) + len(item.tree.tokens) for item in inputs]
        self.cache.reserve([item.row for item in inputs], needs)
        set_shared_reads([item.row for item in inputs])
        groups = arrange(inputs, self._call)
        layout = build_layout(groups, rounding)
        if self._takes_spans:
            layout.spans = spans_of(layout, self.device, self._window)
        return [item for group in groups for item in group], layout

    def _planned(self, rows: list[RowInput], layout: StepLayout) -> PlannedForward:
        first_lines, kept, num_lines = _kept(rows)
        layout.kept = None if kept is None else torch.tensor(kept)
        layout.best_only = all([item.best_only for item in rows])
        return PlannedForward(rows, layout, first_lines, num_lines)

    def run_long_feeds(self, inputs: list[RowInput]) -> list[RowInput]:
        """Run all but the last piece of long feeds; return the remaining inputs."""
        least = min(self.prefill_chunk, _LEAST_CHUNK)
        long = [item for item in inputs if len(item.feed) > least]
        if not long:
            return inputs
        chunk = self._chunk(long)
        while any([len(item.feed) > chunk for item in inputs]):
            long = [item for item in inputs if len(item.feed) > chunk]
            pieces = {id(item): item.split(chunk) for item in long}
            planned = self.plan([pieces[id(item)][0] for item in long])
            planned.layout.kept = torch.zeros(1, dtype=torch.long)  # logits of one token, since there must be some
            send([planned.layout], self.device, self.staging)
            self.run(planned)
            planned.settle()
            inputs = [pieces[id(item)][1] if id(item) in pieces else item for item in inputs]
        return inputs

    def _chunk(self, inputs: list[RowInput]) -> int:
        """
        Return the tokens per row and piece of long feeds with which their masks `[rows, chunk * groups, columns]` stay
        small.
        """
        set_shared_reads([item.row for item in inputs])
        columns = 0
        for group in arrange(inputs, self._call):
            num_rows = group[-1].row.slot - group[0].row.slot + 1
            columns += num_rows * max([item.row.own + len(item.feed) for item in group])
        return min(self.prefill_chunk, max(_MASK_SIZE // (columns * self._groups), _LEAST_CHUNK))

    def run_series(self, series: ForwardSeries) -> list[np.ndarray]:
        """Return the results of a series, with one wait for the device."""
        return fetch_together(series.run(self.run))

    def run(self, planned: PlannedForward) -> Any:
        """
        Return the logits `[M, vocab_size]` of a forward whose layout is on the device, or `Picks` where it asks for no
        more.
        """
        self.cache.layout = planned.layout
        logits: Any = self._run(planned)
        return logits[: planned.num_lines] if planned.layout.is_padded else logits


def _kept(rows: Sequence[RowInput]) -> tuple[dict[CacheRow, int], list[int] | None, int]:
    """
    Return the first line of every row in the logits; the tokens whose logits are computed, which are the last one that
    a row is fed, and its nodes (None if these are all tokens); and their number.
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
