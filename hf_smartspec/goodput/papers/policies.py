"""Su et al.'s length policy and an oracle, for comparison with the auction; what the papers' policies share."""

import math
from abc import abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence

import numpy as np

from ...drafts.forest import Forest
from ...drafts.price import FREE, LevelPrice
from ...drafts.tree import DraftTree
from ..cost import CostModel
from ..estimates.decayed import DecayedMean
from ..policy import LengthPolicy, StepRows
from ..stage import Stage
from .length import PowerLaw, optimal_length, tree_size

_NEWEST = 0.02  # weight of the latest step in an oracle's running speed-up


class ShapedDrafts(LengthPolicy):
    """
    Base of the papers' policies, which set the shape of each row's draft before it is drafted: a chain, whose length is
    its depth, or a full tree. Sources that heed shapes draft it. Others are asked for as many nodes as it has, and what
    is verified of their drafts is the likeliest part of this shape.
    """

    confidence = 0.0  # drafts end after a token of no more

    @abstractmethod
    def shapes(self, rows: StepRows) -> Sequence[tuple[int, ...]]:
        """Return the children of every node at each depth, for each row: (1, 1, 1) is a chain of three tokens."""

    def max_nodes(self, rows: StepRows, stage: Stage, trees: Sequence[DraftTree]) -> np.ndarray:
        shapes = self._of(rows)
        sizes = {shape: tree_size(shape) for shape in set(shapes)}
        return stage.limits(np.array([sizes[shape] for shape in shapes], np.int64), trees)

    def price(self, rows: StepRows, stage: Stage) -> LevelPrice | None:
        """Return price 0 and the longest shape; rows with fewer nodes get a part of it."""
        return FREE._replace(widths=max(self._of(rows), key=len, default=()), confidence=self.confidence)

    def select(self, rows: StepRows, trees: Sequence[DraftTree]) -> list[DraftTree]:
        return [tree.within(shape) for tree, shape in zip(trees, self._of(rows))]

    def _of(self, rows: StepRows) -> Sequence[tuple[int, ...]]:
        """Return the step's shapes, which are set once: sources draft in several stages, steps in several threads."""
        if rows.shapes is None or rows.shapes[0] is not self:
            rows.shapes = self, self.shapes(rows)
        return rows.shapes[1]


class BatchLookupTable(ShapedDrafts):
    """
    Policy that looks up the optimal length of every batch size (Su et al., section 4). Drafts are chains of s tokens.
    Between two profiled sizes, the smaller of their two lengths is used; beyond the smallest or largest size, that
    size's length.

    Args:
        lengths (mapping of `int` to `int`): Draft tokens per row by batch size, profiled at powers of two.
    """

    def __init__(self, lengths: Mapping[int, int]):
        if not lengths or min(lengths) < 1 or min(lengths.values()) < 0:
            raise ValueError(f"`lengths` must map batch sizes of at least 1 to lengths of at least 0, got {lengths!r}.")
        self.lengths = {size: int(lengths[size]) for size in sorted(lengths)}
        self._sizes = list(self.lengths)

    @classmethod
    def profiled(
        cls, seconds_per_token: Callable[[int, int], float], max_batch_size: int = 32, max_length: int = 8
    ) -> "BatchLookupTable":
        """
        Profile every power of two up to `max_batch_size` with every length up to `max_length` (a grid search, as in the
        paper).

        Args:
            seconds_per_token (`Callable`): Measures seconds per token for a batch size and a length.
        """
        table = {}
        for size in _powers_of_two(max_batch_size):
            table[size] = int(np.argmin([seconds_per_token(size, length) for length in range(max_length + 1)]))
        return cls(table)

    @classmethod
    def modelled(
        cls, cost: CostModel, law: PowerLaw, mean_context: float, max_batch_size: int = 32, max_length: int = 8
    ) -> "BatchLookupTable":
        """
        Compute the table by the paper's model: t_L(b, s) = alpha_b * s + beta, a line fitted to the cost model, and
        l(s) = c * s^gamma.
        """
        table = {}
        for size in _powers_of_two(max_batch_size):
            lengths = np.arange(max_length + 1)
            seconds = cost.seconds(size * mean_context, size * (lengths + 1), lengths + 1)
            per_node, per_step = np.polyfit(lengths, seconds, 1) if max_length else (0.0, float(seconds[0]))
            best = optimal_length(law, max(float(per_node), 0.0), max(float(per_step), 1e-12))
            table[size] = min(round(best), max_length)
        return cls(table)

    def length(self, batch_size: int) -> int:
        """Return the length for any batch size."""
        place = int(np.searchsorted(self._sizes, batch_size))
        if place < len(self._sizes) and self._sizes[place] == batch_size:
            return self.lengths[batch_size]
        return min(self.lengths[size] for size in self._sizes[max(place - 1, 0) : place + 1])

    def shapes(self, rows: StepRows) -> Sequence[tuple[int, ...]]:
        return [(1,) * self.length(len(rows))] * len(rows)

    def most_nodes(self, usual: int, most: int) -> int:
        return max(self.lengths.values())


class RandomLength(ShapedDrafts):
    """
    Policy that draws the length of every row's draft, a chain, at random (SmartSpec, Figure 14: "random all").

    Args:
        max_length (`int`): The longest draft, in tokens; all lengths up to it are equally likely.
        seed (`int`): Seed of the lengths.
    """

    def __init__(self, max_length: int = 8, seed: int = 0):
        if max_length < 0:
            raise ValueError(f"`max_length` must be at least 0, got {max_length!r}.")
        self.max_length, self._rng = max_length, np.random.default_rng(seed)

    def shapes(self, rows: StepRows) -> Sequence[tuple[int, ...]]:
        return [(1,) * length for length in self._rng.integers(0, self.max_length + 1, len(rows)).tolist()]

    def most_nodes(self, usual: int, most: int) -> int:
        return self.max_length


def _powers_of_two(largest: int) -> list[int]:
    if largest < 1:
        raise ValueError(f"`max_batch_size` must be at least 1, got {largest}.")
    return [2**exponent for exponent in range(largest.bit_length())]


class Oracle(LengthPolicy):
    """
    Policy that verifies only nodes that will be accepted, and of these as many as pay. For simulations, where the
    continuation is known.

    Args:
        cost (`CostModel`): Cost of the target's forward.
        continuation (`Callable`): Returns the next tokens (`np.ndarray` of shape `[m]`) of a request.
    """

    def __init__(self, cost: CostModel, continuation: Callable[[Hashable], np.ndarray]):
        self.cost, self.continuation = cost, continuation
        self._gain = DecayedMean(_NEWEST, 1.0, math.inf)  # running goodput relative to plain decoding's

    def max_nodes(self, rows: StepRows, stage: Stage, trees: Sequence[DraftTree]) -> np.ndarray:
        return stage.caps

    def most_nodes(self, usual: int, most: int) -> int:
        return most

    def price(self, rows: StepRows, stage: Stage) -> LevelPrice | None:
        """Return price 0: sources propose all they can, since nodes that would be rejected are not verified."""
        cost = stage.cost
        return None if cost.is_autoregressive or not cost.heeds_prices else FREE

    def select(self, rows: StepRows, trees: Sequence[DraftTree]) -> list[DraftTree]:
        forest = Forest(trees)
        nodes, hits = forest.outcomes([self.continuation(name) for name in rows.request_ids])
        accepted = nodes[hits]
        accepted = accepted[np.argsort(forest.depths[accepted], kind="stable")]  # parents first
        width = 1 + np.append(0, forest.depths[accepted])
        seconds = self.cost.seconds(*rows.without_prefill().forward_size(np.arange(len(width)), width))
        chosen = np.zeros(forest.num_nodes, bool)
        chosen[accepted[: self.num_paying(len(rows), seconds)]] = True
        return forest.keep(chosen)

    def num_paying(self, num_rows: int, seconds: np.ndarray) -> int:
        """
        Return how many further tokens pay, if the step takes `seconds[n]` with n of them, without its prompts. The
        price of time is the recent goodput: at the step's own goodput, steps with much to gain would draft too little,
        and others too much.
        """
        if not num_rows:
            return 0
        tokens, plain = num_rows + np.arange(len(seconds)), num_rows / seconds[0]
        best = int(np.argmax(tokens - self._gain.mean * plain * seconds))
        self._gain.add(float(tokens[best] / seconds[best] / plain))
        return best
