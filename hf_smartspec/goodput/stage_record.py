"""Estimates of an auction for each source: the cost of its drafts, and their gain beyond earlier sources' drafts."""

from collections import defaultdict
from collections.abc import Hashable, Sequence
from functools import partial

import numpy as np

from ..drafts.forest import Forest
from .draft_cost import DraftCost, DraftTimer
from .estimates.acceptance import CERTAIN, AcceptanceEstimator
from .estimates.decayed import DecayedMean, DecayedRate, shrunk
from .kernels.level_counts import count_continuations
from .plan import Held
from .policy import StepRows
from .stage import Stage
from .trials import Trials, TrialTime

_EDGES = np.array([0.0, 0.05, 0.15, 0.3, 0.5, 0.75, 1.0, 1.5, 2.2, 3.2, 5.0])  # bins of earlier drafts' promise, tokens
_PRIOR = np.append(1.0, np.exp(-1.5 * _EDGES))  # prior of the novelty share, which falls with the promise
_HALF_LIFE = 300.0  # of an accepted level, in accepted levels of its bin
_STRENGTH = 4.0  # weight of the prior, in levels
_NUM_DEPTHS = 8  # depths after which it is counted whether drafts go on
_NEWEST = 0.1  # least weight of the newest step in the time around drafts,
_NEWEST_PROFIT = 0.03  # and of the newest call in what calls bring: text that can be drafted comes in pieces
_PAUSE = 3.0  # times the usual time of a call: more is a pause of the process
_RESTS = 15  # steps in which levels that did not pay are not weighed again,
_HOLDS = 3  # and those that did, once the acceptance rate
_SETTLED = 0.05  # is in no more doubt: first drafts may fail or succeed by chance, and each one tells a lot
_MOST_LEFT_OUT = 8  # measurements in a row that are skipped since they include prompts
# Tokens of a row since its latest draft that are read in a draft's own time: those of the deepest draft, and one.
_MOST_BEHIND = 33
# The time of reading a row's text is spread over half of the tokens that the row may still generate, since answers end
# earlier and drafts are given up, and over no more than these.
_MOST_AHEAD = 256
_READING = 0.25  # least weight of the newest reading's time


def size_class(num_rows: int) -> int:
    """Return the class of steps of about so many rows: 1, 2 to 3, 4 to 7, 8 to 15, ..."""
    return num_rows.bit_length()


def _no_profits() -> defaultdict[int, DecayedMean]:
    return defaultdict(partial(DecayedMean, _NEWEST_PROFIT))


class StageRecord:
    """
    Estimates for one source. `acceptance` (of its own drafts, verified or not) is learnt for sources that are asked by
    level only.
    """

    def __init__(self) -> None:
        self.timer, self.acceptance, self.novelty = DraftTimer(), AcceptanceEstimator(), Novelty()
        # Seconds saved by a call less those of drafting and verifying, by `size_class`; of sources that draft at once.
        self.profits = _no_profits()
        # Seconds that a step with drafts takes besides levels and the forward, by the same classes: a new class begins
        # with those of the latest one, and the first with 0, since the first steps take long.
        self._overheads: dict[int, DecayedMean] = {}
        self._latest_overhead = 0.0
        self._continuations = Continuations()
        self.trials, self.trial_time = Trials(), TrialTime()
        self.pays = False  # whether levels paid in the latest step, for sources that are asked by level
        self._held: Held | None = None
        self._newcomers = Newcomers()
        self._number = 0

    def renew(self, number: int) -> None:
        """Reset the estimates if the source's weights have changed for a `number`-th time that is new."""
        if number != self._number:
            self._number = number
            self.acceptance.decay_counts()
            self.profits = _no_profits()
            self.let_go()
            self._continuations = Continuations()
            self.trials.reset()

    def seconds(self, cost: DraftCost, levels: np.ndarray) -> float:
        """Return the seconds to draft so many levels (`[rows]` int), to select their nodes, and to learn from these."""
        return self._seconds_of_levels(cost, levels) + (self.overhead(len(levels)) if levels.any() else 0.0)

    def add_profit(self, cost: DraftCost, num_rows: int, saved: float, spent: float) -> None:
        """Learn the seconds that a call in a step of so many rows has saved, and those that it took."""
        usual = self._seconds_of_levels(cost, np.ones(num_rows, np.int64))
        self.profits[size_class(num_rows)].add(saved - min(spent, _PAUSE * usual))

    def overhead(self, num_rows: int) -> float:
        """Return the seconds that a step of `num_rows` rows with drafts takes besides levels and the forward."""
        known = self._overheads.get(size_class(num_rows))
        return self._latest_overhead if known is None else known.mean

    def _seconds_of_levels(self, cost: DraftCost, levels: np.ndarray) -> float:
        per_call, per_row = self.timer.seconds(cost)
        calls, in_calls = cost.calls(levels)
        return per_call * calls + per_row * in_calls

    def reading(self, rows: StepRows) -> np.ndarray:
        """
        Return the seconds in which the drafter would read the text of each row that it has not drafted for lately, for
        each of the tokens by which the row is to earn them, `[rows]` float64.
        """
        ahead = np.full(len(rows), _MOST_AHEAD) if rows.num_left is None else np.minimum(rows.num_left / 2, _MOST_AHEAD)
        return self._newcomers.per_token.mean * self._newcomers.unread(rows) / np.maximum(ahead, 1)

    def gains(
        self, request_ids: Sequence[Hashable], promises: np.ndarray, num_levels: int, in_doubt: bool = False
    ) -> np.ndarray:
        """
        Return the expected tokens of each level of a draft that are not in the trees of earlier stages, whose promise
        is given (`[rows]`, in tokens); `[rows, num_levels]` float64. `in_doubt` takes the optimistic estimate.
        """
        known = self.acceptance
        rates = known.of_requests(request_ids, num_levels)
        if in_doubt:
            rates = np.minimum(rates * (1 + known.doubt / known.rate), CERTAIN)
        rates[:, 1:] *= self._continuations.rates(len(rates), num_levels - 1, in_doubt)
        acceptance = np.cumprod(rates, axis=1)
        return acceptance * self.novelty.share(promises)[:, None]

    def hold(self, request_ids: Sequence[Hashable], levels: np.ndarray) -> Held:
        """Keep the best levels of these rows for the next steps: for many if none pays, as only drafts change that."""
        num_steps = _RESTS
        if levels.any():
            num_steps = _HOLDS if self.acceptance.doubt <= _SETTLED else 0
        held = self._held = Held(request_ids, levels, num_steps)
        return held

    def let_go(self) -> None:
        """Weigh levels in the next step."""
        self._held = None

    def held(self, request_ids: Sequence[Hashable]) -> Held | None:
        """Return what holds for these rows in the next step."""
        held = self._held
        return held if held is not None and held.num_steps and held.request_ids == request_ids else None

    def count_unweighed(self) -> None:
        """Count a step by what holds."""
        if self._held is not None:
            self._held.num_steps -= 1

    def rests(self, request_ids: Sequence[Hashable]) -> bool:
        """Return whether no level paid for the same rows in one of the latest steps, since when none was drafted."""
        held = self.held(request_ids)
        return held is not None and not held.levels.any()

    def for_trial(self, rows: StepRows, idle: np.ndarray) -> np.ndarray:
        """
        Return which of the idle rows (bool `[rows]`) a trial asks: those whose prompts the drafter has read; in every
        other trial, or where there are none, the shortest of the others.
        """
        known = np.array([name in self._newcomers.known for name in rows.request_ids]) & idle
        others = idle & ~known
        if not others.any() or (known.any() and self.trials.num % 2):
            return known
        return np.arange(len(idle)) == np.where(others, rows.context_lens, np.inf).argmin()

    def learn_time(self, stage: Stage, rows: StepRows) -> float:
        """Learn the time of a stage that was asked; return the seconds in which it read what it had not drafted for."""
        expected = self._seconds_of_levels(stage.cost, stage.levels)
        if stage.overhead and expected:
            self._learn_overhead(len(rows), stage.overhead, expected)
        has_read = self._newcomers.time(self.timer, stage.cost, rows, stage.levels, stage.seconds)
        return max(stage.seconds - expected, 0.0) if has_read and expected else 0.0

    def _learn_overhead(self, num_rows: int, seconds: float, levels_seconds: float) -> None:
        known = self.overhead(num_rows)
        overhead = self._overheads.setdefault(size_class(num_rows), DecayedMean(_NEWEST, known, 1 / _NEWEST))
        overhead.add(min(seconds, max(levels_seconds, _PAUSE * known)))
        self._latest_overhead = overhead.mean

    def learn_levels(
        self, request_ids: Sequence[Hashable], stage: Stage, forest: Forest, nodes: np.ndarray, hits: np.ndarray
    ) -> None:
        """
        Learn from nodes whose parents were right: `nodes` are their indices `[m]`, `hits` whether they were right, bool
        `[m]`. An empty draft counts as a level that was rejected.
        """
        if self._held is not None and not self._held.levels.any():
            self.let_go()  # a draft has shown something
        row, depth = forest.row[nodes], forest.depths[nodes]
        tried = np.zeros((len(request_ids), int(depth.max(initial=1))), bool)
        tried[:, 0] = (stage.asked > 0) & (forest.sizes == 0)
        tried[row, depth - 1] = True
        succeeded = np.zeros_like(tried)
        succeeded[row[hits], depth[hits] - 1] = True
        self.acceptance.update(request_ids, tried, succeeded)
        if stage.cost.heeds_prices:
            self._continuations.update(len(request_ids), forest, nodes[hits], forest.sizes < stage.asked)

    def forget(self, request_id: Hashable) -> None:
        """Delete the state of a request that has ended. Unknown ids are ignored."""
        self.acceptance.forget(request_id)
        self._newcomers.forget(request_id)


class Novelty:
    """
    Share of a source's right tokens that the drafts of earlier stages do not hold: running means by the promise of
    these drafts. Where there are no earlier drafts, all tokens are new.
    """

    def __init__(self) -> None:
        self._new = DecayedRate(tries=np.zeros(len(_PRIOR)), hits=np.zeros(len(_PRIOR)))  # among accepted tokens

    def share(self, promises: np.ndarray) -> np.ndarray:
        """Return the share of new tokens, `[rows]` float64 in [0, 1], for promises `[rows]`, in tokens."""
        true, new = self._new.tries, self._new.hits
        general = shrunk(new[1:].sum(), true[1:] @ _PRIOR[1:], 1.0, _STRENGTH)
        prior = np.minimum(general * _PRIOR, 1.0)
        prior[0] = 1.0
        return shrunk(new, true, prior, _STRENGTH)[np.searchsorted(_EDGES, promises)]

    def update(self, promises: np.ndarray, before: np.ndarray, reached: np.ndarray) -> None:
        """
        Learn from one step's drafts.

        Args:
            promises (`np.ndarray` of shape `[rows]`): Promise of the earlier stages' drafts, in tokens.
            before, reached (`np.ndarray` of shape `[rows]`, int): Depths up to which these drafts, and the source's,
                were right.
        """
        bins = np.searchsorted(_EDGES, promises)
        true, new = (np.bincount(bins, values, len(_PRIOR)) for values in (reached, np.maximum(reached - before, 0)))
        self._new.add(true, new, 0.5 ** (true / _HALF_LIFE))


class Continuations:
    """
    Share of drafts that go on after a right level, by depth: in steps of about as many rows, shrunk towards that in all
    steps. Drafts of sources that heed prices go on where they are likely to be right; how often the levels that they
    then draft are right says nothing about the others.
    """

    def __init__(self) -> None:
        self._all = self._new()
        self._by_size: defaultdict[int, DecayedRate] = defaultdict(self._new)

    @staticmethod
    def _new() -> DecayedRate:
        return DecayedRate(1.0, _STRENGTH, np.zeros(_NUM_DEPTHS), np.zeros(_NUM_DEPTHS))

    def rates(self, num_rows: int, num_levels: int, in_doubt: bool = False) -> np.ndarray:
        """
        Return the shares of drafts that go on after the first to the `num_levels`-th level, `[num_levels]` float64;
        `in_doubt`, one standard deviation higher.
        """
        own = self._by_size[size_class(num_rows)]
        rates = shrunk(own.hits, own.tries, self._all.rate, _STRENGTH)
        if in_doubt:
            rates = np.minimum(rates + np.sqrt(rates * (1 - rates) / (own.tries + _STRENGTH)), 1.0)
        return rates[np.minimum(np.arange(num_levels), _NUM_DEPTHS - 1)]

    def update(self, num_rows: int, forest: Forest, right: np.ndarray, may_grow: np.ndarray) -> None:
        """
        Learn from one step's drafts.

        Args:
            right (`np.ndarray` of shape `[m]`, int): Indices of the nodes that were right.
            may_grow (`np.ndarray` of shape `[rows]`, bool): Drafts of fewer nodes than they may have.
        """
        tries, hits = np.zeros((2, _NUM_DEPTHS), np.int64)
        count_continuations(right, forest.row, forest.parents, forest.depths, may_grow, tries, hits)
        for counts in (self._all, self._by_size[size_class(num_rows)]):
            counts.add(tries, hits, 0.5 ** (tries / _HALF_LIFE))


class Newcomers:
    """
    Filter of timings: an autoregressive drafter reads a request's prompt before its first draft, and before a later one
    what was decoded without drafts. That is not the cost of a draft. Such steps are skipped, unless they took less than
    a draft is taken to cost; those with prompts are not where there are hardly any others.
    """

    def __init__(self) -> None:
        self.known: dict[Hashable, int] = {}  # length of each request's text at its latest draft
        self.per_token = DecayedMean(_READING)  # seconds of reading
        self._num_left_out = 0

    def unread(self, rows: StepRows) -> np.ndarray:
        """Return the tokens that a draft for each row would read first, `[rows]` int64; a few are a part of drafts."""
        behind = rows.context_lens - np.array([self.known.get(name, 0) for name in rows.request_ids], np.int64)
        return np.where(behind > _MOST_BEHIND, behind, 0)

    def time(self, timer: DraftTimer, draft: DraftCost, rows: StepRows, levels: np.ndarray, seconds: float) -> bool:
        """
        Pass the time of drafts with so many levels (`[rows]` int; 0: not asked for) to the timer, or skip it. Return
        whether texts were read.
        """
        asked: dict[Hashable, int] = {}
        if draft.is_autoregressive:
            named = zip(rows.request_ids, rows.context_lens.tolist(), levels.tolist())
            asked = {name: length for name, length, level in named if level}
        are_known = self.known.keys() >= asked.keys()
        is_behind = any([length - self.known.get(name, length) > _MOST_BEHIND for name, length in asked.items()])
        num_read = int(self.unread(rows)[levels > 0].sum()) if draft.is_autoregressive else 0
        self.known |= asked
        (per_call, per_row), (calls, in_calls) = timer.seconds(draft), draft.calls(levels)
        expected = per_call * calls + per_row * in_calls
        if num_read and expected:  # no token takes longer than a level; more is a pause of the process, or compiling
            self.per_token.add(min(max(seconds - expected, 0.0) / num_read, per_call + per_row))
        is_cheaper = seconds < expected  # than a draft was taken to be, though it has read
        if is_cheaper or (not is_behind and (are_known or self._num_left_out == _MOST_LEFT_OUT)):
            self._num_left_out = 0
            timer.observe(calls, in_calls, seconds)
        else:
            self._num_left_out += not are_known
        return is_behind or not are_known

    def forget(self, request_id: Hashable) -> None:
        """Delete a request that has ended. Unknown ids are ignored."""
        self.known.pop(request_id, None)
