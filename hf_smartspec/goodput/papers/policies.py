"""The papers' length policies, for comparison with the auction."""

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from ...drafts.forest import Forest
from ...drafts.price import FREE, LevelPrice
from ...drafts.tree import DraftTree
from ..cost import CostModel
from ..draft_cost import DraftTimer
from ..estimates.acceptance import AcceptanceEstimator
from ..estimates.decayed import DecayedMean
from ..policy import LengthPolicy, StepOutcome, StepRows
from ..stage import Stage
from .length import PowerLaw, expected_length, optimal_length

_NEWEST = 0.02  # weight of the latest step in an oracle's running speed-up


class _Lengths(LengthPolicy):
    """Base of policies that set lengths before drafting; merged drafts of several stages are cut to them."""

    def select(self, rows: StepRows, trees: Sequence[DraftTree]) -> list[DraftTree]:
        asked = np.max([stage.asked for stage in rows.stages], axis=0)
        return [tree.most_likely(number) for tree, number in zip(trees, asked.tolist())]


class BatchLookupTable(_Lengths):
    """
    Policy that looks up the optimal length of every batch size (Su et al., section 4). Between two profiled sizes, the
    smaller of their two lengths is used; beyond the smallest or largest size, that size's length.

    Args:
        lengths (mapping of `int` to `int`): Draft nodes per row by batch size, profiled at powers of two.
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

    def max_nodes(self, rows: StepRows, stage: Stage, trees: Sequence[DraftTree]) -> np.ndarray:
        return stage.limits(self.length(len(rows)), trees)


def _powers_of_two(largest: int) -> list[int]:
    if largest < 1:
        raise ValueError(f"`max_batch_size` must be at least 1, got {largest}.")
    return [2**exponent for exponent in range(largest.bit_length())]


class StepPlan(NamedTuple):
    """Result of SmartSpec's algorithm 2."""

    num_requests: int  # requests that run: the first ones of the queue
    num_nodes: int  # nodes that are drafted and verified for each of them
    goodput: float  # expected tokens per second


class _SmartSpec(_Lengths):
    """Base of both granularities: a cost model that measured steps correct, and moving averages of acceptance."""

    def __init__(self, cost: CostModel, max_length: int = 8):
        if max_length < 0:
            raise ValueError(f"`max_length` must be at least 0, got {max_length}.")
        self.cost, self.max_length = cost, max_length
        self.acceptance, self.timer = AcceptanceEstimator(), DraftTimer()

    def _draft_seconds(self, rows: StepRows, lengths: np.ndarray) -> float:
        cost = rows.stages[0].cost
        per_call, per_row = self.timer.seconds(cost)
        calls, in_calls = cost.calls(lengths)
        return per_call * calls + per_row * in_calls

    def observe(self, outcome: StepOutcome) -> None:
        context, size, width = outcome.forward_size
        if size:
            self.cost.observe(context, size, outcome.seconds.forward + outcome.seconds.other, width)
        first, accepted = outcome.rows.stages[0], np.asarray(outcome.accepted, np.int64)
        drafted = np.array([tree.depths.max(initial=0) for tree in first.proposed], np.int64)
        self.timer.observe(*first.cost.calls(drafted), first.seconds)
        depths = np.array([tree.depths.max(initial=0) for tree in outcome.verified], np.int64)
        levels = np.arange(1, int(depths.max(initial=0)) + 1)
        succeeded = levels <= accepted[:, None]
        tried = levels <= np.minimum(accepted + 1, depths)[:, None]
        self.acceptance.update(outcome.rows.request_ids, tried, succeeded)

    def forget(self, request_id: Hashable) -> None:
        self.acceptance.forget(request_id)


class StepGoodput(_SmartSpec):
    """
    SmartSpec with the global acceptance rate (algorithms 1 and 2): one length for all rows of a step, which maximises
    goodput.

    Args:
        cost (`CostModel`): Cost of the target's forward.
        max_length (`int`): V, the longest draft considered.
    """

    def max_nodes(self, rows: StepRows, stage: Stage, trees: Sequence[DraftTree]) -> np.ndarray:
        if not len(rows):
            return np.zeros(0, np.int64)
        return stage.limits(self.plan(rows, least=len(rows)).num_nodes, trees)

    def plan(self, rows: StepRows, least: int = 1, has_slots: Callable[[int, int], bool] | None = None) -> StepPlan:
        """
        Return the batch and length of the highest goodput (algorithm 2). Candidate batches are the prefixes of the
        queue, each with its best length.

        Args:
            rows (`StepRows`): The whole queue, in order.
            least (`int`): Number of rows that run in any case.
            has_slots (`Callable`, *optional*): Returns whether the KV cache has room for a number of requests with
                drafts of a length; candidates without room are left out.

        Returns:
            `StepPlan`, of no requests if none has room.
        """
        best = StepPlan(0, 0, -1.0)
        for num_requests in range(max(least, 1), len(rows) + 1):
            lengths, goodput = self._goodput(rows, num_requests)
            length = int(lengths[goodput.argmax()])
            if has_slots is not None and not has_slots(num_requests, length):
                continue
            if goodput.max() > best.goodput:
                best = StepPlan(num_requests, length, float(goodput.max()))
        return best

    def _goodput(self, rows: StepRows, num_requests: int) -> tuple[np.ndarray, np.ndarray]:
        """Return lengths and their goodput (algorithm 1). (As printed, its line 4 has the number of requests twice.)"""
        lengths = np.arange(min(self.max_length, int(np.max(rows.caps[:num_requests]))) + 1)
        tokens = num_requests * expected_length(self.acceptance.rate, lengths)
        seconds = self.cost.seconds(*rows.first(num_requests).forward_size(num_requests * lengths, 1 + lengths))
        draft = [self._draft_seconds(rows, np.full(num_requests, length)) for length in lengths]
        return lengths, tokens / (seconds + draft)


class RequestGoodput(_SmartSpec):
    """
    SmartSpec with every request's own acceptance rate (section 4.4, Eq. 9): lengths k_1 ... k_n that maximise goodput.
    Position j of request i is worth alpha_i^j: the best lengths are a prefix of all positions sorted by worth.

    Args:
        cost (`CostModel`): Cost of the target's forward.
        max_length (`int`): V, the longest draft considered.
    """

    def max_nodes(self, rows: StepRows, stage: Stage, trees: Sequence[DraftTree]) -> np.ndarray:
        if not len(rows):
            return np.zeros(0, np.int64)
        positions = np.arange(1, self.max_length + 1)
        worth = self.acceptance.rates(rows.request_ids)[:, None] ** positions
        worth[positions > rows.caps[:, None]] = 0.0
        order = np.argsort(-worth, axis=None, kind="stable")
        tokens = len(rows) + np.append(0.0, np.cumsum(worth.ravel()[order]))
        row, depth = np.divmod(order, self.max_length or 1)
        cost = rows.stages[0].cost
        per_call, per_row = self.timer.seconds(cost)
        num = np.arange(len(tokens))
        calls, in_calls = np.append(0, np.maximum.accumulate(depth + 1)), num
        if not cost.is_autoregressive:
            calls, in_calls = np.minimum(num, 1), np.append(0, np.cumsum(depth == 0))
        width = 1 + np.append(0, np.maximum.accumulate(depth + 1))
        target = self.cost.seconds(*rows.forward_size(num, width))
        goodput = tokens / (target + per_call * calls + per_row * in_calls)
        best = np.bincount(row[: int(goodput.argmax())], minlength=len(rows)) if len(row) else np.zeros_like(rows.caps)
        return stage.limits(best, trees)


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
