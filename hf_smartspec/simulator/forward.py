"""A simulated target, whose forwards take virtual time and whose answers are known."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ..goodput.cost import CostModel
from ..target_model.cache.slot_cache import SlotCache
from ..target_model.layout.row_groups import TYPICAL_CALL, arrange, padded_context
from ..target_model.layout.rows import CacheRow, RowInput
from .clock import EventClock


class ForwardSize(NamedTuple):
    """Size of a forward, which its cost depends on: arguments of `CostModel.seconds`."""

    context: int
    batched: int
    width: float  # mean over the parts of the forward, weighted by their context

    @classmethod
    def of(cls, inputs: Sequence[RowInput], call: int = TYPICAL_CALL) -> "ForwardSize":
        """
        Return the size of a forward as `PackedForward` would run it: every part is padded to its longest context and
        its widest row, and every part after the first costs one more call of attention, worth `call` columns.
        """
        groups = arrange(inputs, call)
        context = pairs = call * (len(groups) - 1)
        for group in groups:
            num_rows = group[-1].row.slot - group[0].row.slot + 1
            size = num_rows * max([item.row.length for item in group])
            context, pairs = context + size, pairs + size * max([item.num_tokens for item in group])
        return cls(context, sum([item.num_tokens for item in inputs]), pairs / context if context else 1.0)


class SimulatedForward:
    """
    A `ModelForward` without a model: advances a clock by the forward's cost, and picks the tokens of known texts. Rows
    lie in a `SlotCache` without layers. The "logits" are the picked tokens themselves.

    Args:
        cost (`CostModel`): Cost of the target.
        clock (`EventClock`): The clock that every forward advances.
        end_id (`int`): The token after the end of every text.
        call (`int`): Cost of one more call of the target's attention, in columns of a row.
    """

    trees = True
    rotary = None  # texts of any length are reused: no embedding depends on it
    shares_prefixes = False  # reused prefixes are copied
    taps = None  # there are no hidden states
    new_cache = SlotCache

    def __init__(self, cost: CostModel, clock: EventClock, end_id: int, call: int = TYPICAL_CALL):
        self.cost, self.clock, self.end_id, self.call = cost, clock, end_id, call
        self.cache = SlotCache(1, 1)
        self.num_batched = 0
        self._texts: dict[CacheRow, list[int]] = {}

    def set_text(self, row: CacheRow, text: np.ndarray) -> None:
        """Set the full text of a row's request, prompt and response, int64 `[length]`."""
        self._texts[row] = [*text.tolist(), self.end_id]

    def add(self) -> CacheRow:
        return self.cache.add()

    def remove(self, row: CacheRow) -> None:
        self._texts.pop(row, None)
        self.cache.remove(row)

    def compact(self, rows: Sequence[CacheRow]) -> None:
        self.cache.compact(rows)

    def cut(self, row: CacheRow, length: int) -> None:
        row.length, row.num_nodes = length, 0

    def commit(self, rows: Sequence[CacheRow], paths: Sequence[Sequence[int]]) -> None:
        for row, path in zip(rows, paths):
            row.length, row.num_nodes = row.length + len(path), 0

    def forward(self, inputs: Sequence[RowInput]) -> tuple[Any, list[int]]:
        """
        Run one forward: advance the clock and the rows.

        Returns:
            The target's tokens (list of `int`) after every row's feed and after every node, and for each row the index
            of its first one. After nodes that are not accepted stands any token, which is never read.
        """
        size = ForwardSize.of(inputs, self.call)
        self.clock.advance(float(self.cost.seconds(*size)))
        self.num_batched += size.batched
        picks: list[int] = []
        offsets = []
        for item in inputs:
            row, tree = item.row, item.tree
            row.length, row.num_nodes = row.length + len(item.feed), len(tree.tokens)
            offsets.append(len(picks))
            line = self._texts[row][row.length : row.length + len(tree.tokens) + 1]
            line += [self.end_id] * (len(tree.tokens) + 1 - len(line))
            picks += line if tree.is_chain else [line[depth] for depth in (0, *tree.depths.tolist())]
        return picks, offsets

    def padded_context(self, rows: Sequence[CacheRow]) -> int:
        return padded_context(rows, self.call)

    def argmax(self, logits: Any) -> list[int]:
        return logits

    def top(self, logits: Any, count: int, num_lines: int, with_argmax: bool) -> None:
        """Return None: there are no logits to take the top from."""
