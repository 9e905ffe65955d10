"""A target that takes its time and knows what it will say."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ..cache import SlotCache
from ..goodput.cost import CostModel
from ..layout import CacheRow, RowInput, arrange
from .clock import EventClock


class ForwardSize(NamedTuple):
    """What the cost of a forward depends on; see `CostModel.seconds`."""

    context: int
    batched: int
    width: float  # mean over the parts of the forward, weighted by their context

    @classmethod
    def of(cls, inputs: Sequence[RowInput]) -> "ForwardSize":
        """
        As `PackedForward` would run it: every part is padded to its longest context and its widest row; long prompts
        are parts of their own, so that they do not widen the others.
        """
        context = pairs = 0
        for group in arrange(inputs):
            size = len(group) * max([item.row.length for item in group])
            context, pairs = context + size, pairs + size * max([item.num_tokens for item in group])
        return cls(context, sum([item.num_tokens for item in inputs]), pairs / context if context else 1.0)


class SimulatedForward:
    """
    A `ModelForward` without a model: advances a clock by what the forward would cost, and picks the tokens of known
    texts. The rows lie in a `SlotCache` without layers. Its "logits" are the picked tokens themselves.

    Args:
        cost (`CostModel`): Of the target.
        clock (`EventClock`): Is advanced.
        end_id (`int`): The token behind the end of every text.
    """

    trees = True

    def __init__(self, cost: CostModel, clock: EventClock, end_id: int):
        self.cost, self.clock, self.end_id = cost, clock, end_id
        self.cache = SlotCache(1, 1)
        self.num_batched = 0
        self._texts: dict[CacheRow, list[int]] = {}

    def set_text(self, row: CacheRow, text: np.ndarray) -> None:
        """What the row's request will say, from its prompt on, int64 `[length]`."""
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
        Returns:
            The target's tokens (list of `int`) behind every row's feed and behind every node, and for each row the
            index of its first line. Behind nodes that do not come true stands any token: nobody will ask.
        """
        size = ForwardSize.of(inputs)
        self.clock.advance(float(self.cost.seconds(*size)))
        self.num_batched += size.batched
        picks: list[int] = []
        offsets = []
        for item in inputs:
            item.row.length += len(item.feed)
            item.row.num_nodes = len(item.tree)
            text, places = self._texts[item.row], [item.row.length]
            for parent in item.tree.parents.tolist():
                places.append(places[parent + 1] + 1)
            offsets.append(len(picks))
            picks += [text[place] if place < len(text) else self.end_id for place in places]
        return picks, offsets

    def argmax(self, logits: Any) -> list[int]:
        return logits
