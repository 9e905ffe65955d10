"""A target that takes its time and knows what it will say."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

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
        parts = [
            (len(group) * max(item.row.length for item in group), max(item.num_tokens for item in group))
            for group in arrange(inputs)
        ]
        context = sum(size for size, _ in parts)
        width = sum(size * width for size, width in parts) / context if context else 1.0
        return cls(context, sum(item.num_tokens for item in inputs), width)


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
        self._texts: dict[CacheRow, np.ndarray] = {}

    def set_text(self, row: CacheRow, text: np.ndarray) -> None:
        """What the row's request will say, from its prompt on, int64 `[length]`."""
        self._texts[row] = np.append(text, self.end_id)

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

    def forward(self, inputs: Sequence[RowInput]) -> tuple[torch.Tensor, list[int]]:
        """
        Returns:
            The target's token behind every row's feed and behind every node, int64 `[M]`, and for each row the index
            of its first line. Behind nodes that do not come true stands any token: nobody will ask.
        """
        size = ForwardSize.of(inputs)
        self.clock.advance(float(self.cost.seconds(*size)))
        self.num_batched += size.batched
        picks, offsets, num = [], [], 0
        for item in inputs:
            item.row.length += len(item.feed)
            item.row.num_nodes = len(item.tree)
            text = self._texts[item.row]
            positions = item.row.length + np.append(0, item.tree.depths) if len(item.tree) else [item.row.length]
            picks.append(text[np.minimum(positions, len(text) - 1)])
            offsets.append(num)
            num += len(picks[-1])
        return torch.from_numpy(np.concatenate(picks)), offsets

    def argmax(self, logits: torch.Tensor) -> list[int]:
        return logits.tolist()
