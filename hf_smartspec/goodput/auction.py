"""The default length policy: all rows' draft nodes bid for places in the forward."""

import math
from collections import defaultdict
from collections.abc import Hashable, Sequence
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from ..drafts.forest import Forest
from ..drafts.price import LevelPrice
from ..drafts.tree import DraftTree
from .cost import UNKNOWN, CostModel
from .draft_cost import DraftCost
from .estimates.decayed import DecayedRate
from .estimates.trust import Trust
from .levels import LevelAuction
from .node_prices import least_node_seconds, level_prices, node_seconds
from .plan import Before, Plan, Won, known_continuation
from .policy import LengthPolicy, StepOutcome, StepRows, StepSeconds
from .probes import Probes
from .stage import Stage
from .stage_record import StageRecord, size_class
from .trials import TrialTime
from .winners import mark_winners
from .worth import Paces

_SPEEDUP_DECAY = 0.98  # decay per step of the tokens that the speed-up is the ratio of
_SPEEDUP_STRENGTH = 10.0  # weight of the prior that there is no speed-up, in tokens
_BASELINE_INTERVAL = 200  # steps with speculation in a row before one without: the cost of plain steps stays known
_TRIAL_STEPS = 8  # drafts before the first judgement on whether drafting pays
# Steps in a row that the auction is not called for, whose own time counts in the steps of a small model: after one in
# which no source was asked (with seven, wrong prices were mended too late), and where a source is asked that finds
# nothing.
_MOST_RESTS, _MOST_EMPTY = 5, 7
# The same in both cases, once the price of steps without drafts has been learnt from so many of about as many rows.
_MOST_SETTLED, _ENOUGH_PLAIN = 15, 16
_UNPROMISING = 0.3  # tokens: another source is tried beside drafts that promise less


class Prediction(NamedTuple):
    """Expected result of the step whose drafts were selected last."""

    tokens: float  # over all rows, accepted nodes and one more each
    seconds: float  # of the forward and the work around it, without drafting
    draft_seconds: float


class GoodputAuction(LengthPolicy):
    """
    One auction per step (docs/design.md, "The auction"): the nodes of all rows are sorted by path probability a_n, and
    the best prefix is verified. Since a_n never grows along a path, every prefix is a forest; since T depends on
    totals, the best prefix is the best of all forests. T also depends a little on the widest row: there is one auction
    for each bound on the width, and the best of their winners wins.

    The best prefix maximises B + sum of a_n - lambda * T(S), where the price of time lambda = speed-up * B / T_plain
    is the goodput of plain decoding in this step times the recent gain of speculation over it. With one price in all
    steps, goodput over all of them is highest (Dinkelbach's theorem on ratios); the highest goodput of every single
    step would draft too little where drafts are good, and too much where they are poor. The time that prompts add to
    the forward is left out, since speculation does not change it.

    Where all rows are waited for together (`StepRows.num_remaining`), tokens of rows with many to go are worth more.

    Path probabilities are products of the drafts' own probabilities, corrected by their observed acceptance (`Trust`).

    The policy also decides about drafting, stage by stage: a source is asked where its nodes, beyond those already
    drafted, bring more than they cost (`StageRecord`), by the same auction over the expected gains of each level
    (SmartSpec, algorithm 2 with Eq. 5); of rows that are waited for together, where the last one then ends sooner. An
    autoregressive drafter gets each row's depth; one that heeds prices (`price`) gets the least worth of a further
    level, and ends drafts by its own confidence (algorithm 3, whose threshold is then where drafting breaks even). A
    first source that drafts all levels in one call is asked for as many nodes as it may propose, or for none if its
    calls cost more than they bring; if it heeds prices, for those nodes whose paths are worth verifying. `select` cuts
    its draft. Rows and sources that do not pay are tried again within 1 % of the time, and where trials go on failing,
    within 0.5 % (`Trials`).

    Args:
        cost (`CostModel`): Cost of the target's forward, corrected by measured steps.
        margin (`float`): Share by which the goodput of speculation must exceed that of plain decoding.
        calibrates (`bool`): Whether drafts' probabilities are corrected.

    Attributes:
        prediction (`Prediction`): Expected result of the latest selection.
        speedup (`float`): Tokens of the latest steps of about as many rows as the current one has by those of plain
            decoding in the same time, at least 1.
    """

    learns_late = True

    def __init__(self, cost: CostModel, margin: float = 0.01, calibrates: bool = True):
        if not np.isfinite(margin) or margin < 0:
            raise ValueError(f"`margin` must be a number of at least 0, got {margin!r}.")
        self.cost, self.margin = cost, margin
        self.trust = Trust() if calibrates else None
        self.records: defaultdict[DraftCost, StageRecord] = defaultdict(StageRecord)
        self.prediction = Prediction(0.0, 0.0, 0.0)
        # Plans of the latest two steps: the earlier may be observed later.
        self._plan = self._earlier_plan = Plan(StepRows((), np.zeros(0, np.int64), np.zeros(0, np.int64)))
        self.speedup = 1.0
        # By `size_class`: what speculation gains with one row says nothing about a large batch.
        self._speedups: defaultdict[int, DecayedRate] = defaultdict(
            partial(DecayedRate, tries=_SPEEDUP_STRENGTH, hits=_SPEEDUP_STRENGTH)
        )
        self._paces = Paces(cost)
        self._level_auction = LevelAuction(cost, self.records, margin)
        self._probes = Probes(cost, self.records)
        self._size_trials = TrialTime()
        self._num_since_baseline = 0
        # Rows of the latest step that was decided, if no source was asked in it, or if calls of its first one pay.
        self._resting: Sequence[Hashable] | None = None
        self._paying: Sequence[Hashable] | None = None
        self._num_rests = 0  # steps since that one
        self._num_plain: defaultdict[int, int] = defaultdict(int)  # steps without drafts that were measured, by class
        self._size = 1  # tokens of the latest step, drafts included

    # 1. Before each stage drafts

    def rests(self, request_ids: Sequence[Hashable]) -> bool:
        return self._resting == request_ids and self._may_skip(request_ids, _MOST_RESTS)

    def asks_first(self, request_ids: Sequence[Hashable]) -> bool:
        return self._paying == request_ids and self._may_skip(request_ids, _MOST_EMPTY) and self._pays(len(request_ids))

    def _may_skip(self, request_ids: Sequence[Hashable], most_at_first: int) -> bool:
        """Return whether the auction need not be called for a step of the latest decision's rows."""
        is_settled = self._num_plain[size_class(len(request_ids))] >= _ENOUGH_PLAIN
        if self._num_rests >= (_MOST_SETTLED if is_settled else most_at_first):
            return False
        if any([self.records[stage.cost].trial_time.is_due for stage in self._plan.rows.stages]):
            return False
        return all([record.rests(request_ids) for record in self._records_by_level()])

    def _pays(self, num_rows: int) -> bool:
        """Return whether calls of the latest decision's first source pay, with those that found nothing since."""
        return self.records[self._plan.rows.stages[0].cost].profits[size_class(num_rows)].mean > 0

    def rested(self, num_rows: int, seconds: StepSeconds) -> None:
        self._num_rests += 1
        for record in self._records_by_level():
            record.count_unweighed()
        plan = self._plan
        self._save_time(plan)
        plain_tokens = num_rows * (1 + seconds.draft / plan.plain_seconds)
        self._speedups[size_class(num_rows)].add(plain_tokens, num_rows, _SPEEDUP_DECAY)
        if self._paying is not None:
            cost = plan.rows.stages[0].cost
            self.records[cost].add_profit(cost, num_rows, 0.0, seconds.draft)

    def _records_by_level(self) -> list[StageRecord]:
        """Return the records of the latest step's sources that are asked by level."""
        return [self.records[stage.cost] for stage in self._plan.rows.stages if stage.is_by_level]

    def _save_time(self, plan: Plan) -> None:
        for stage in plan.rows.stages:  # each has its own, as a source with cheap trials would take all
            self.records[stage.cost].trial_time.save(plan, 1 / len(plan.rows.stages))
        self._size_trials.save(plan)

    def max_nodes(self, rows: StepRows, stage: Stage, trees: Sequence[DraftTree]) -> np.ndarray:
        if self._plan.rows is not rows:
            self._begin(rows)
        plan, caps = self._plan, np.maximum(stage.caps, 0)
        if plan.is_baseline:
            self.records[stage.cost].let_go()  # the step corrects what levels were weighed by
        if plan.is_baseline or not caps.any():
            return np.zeros_like(caps)
        before = plan.before[stage] = self._before(rows, trees)
        if stage.is_by_level:
            return self._levels(stage, caps, before)
        return caps if self._calls_source(stage, caps) else np.zeros_like(caps)

    def _begin(self, rows: StepRows) -> None:
        plain = float(self.cost.seconds(*rows.without_prefill().forward_size()))
        prefill = float(self.cost.seconds(*rows.forward_size())) - plain if rows.num_prefill_tokens else 0.0
        self.speedup = max(self._speedups[size_class(len(rows))].rate, 1.0)
        price = self.speedup * len(rows) / plain if len(rows) else 0.0
        self._earlier_plan, self._plan = self._plan, Plan(rows, plain, prefill, price)
        self._num_rests = 0
        for stage in rows.stages:
            self.records[stage.cost].trial_time.due = math.inf
        self._plan.is_baseline = self._needs_baseline(rows)

    def _needs_baseline(self, rows: StepRows) -> bool:
        """Return whether this step must run without speculation, since the cost of such steps is not known well."""
        if not self._num_since_baseline or not np.any(rows.caps > 0):
            return False
        is_unknown = self.cost.doubt(rows.num_batched, self._size) > UNKNOWN
        return is_unknown or self._num_since_baseline >= _BASELINE_INTERVAL

    def _before(self, rows: StepRows, trees: Sequence[DraftTree]) -> Before:
        forest = self._plan.forest_of(trees)
        if not forest.num_nodes:
            return Before(forest, np.zeros(0), np.zeros(len(rows)))
        profits = np.maximum(forest.along_paths(forest.probs) - self._node_price(rows), 0.0)
        return Before(forest, profits, np.bincount(forest.row, profits, minlength=len(rows)))

    def _levels(self, stage: Stage, caps: np.ndarray, before: Before) -> np.ndarray:
        """Return `max_nodes` of a source that is asked by level: as many levels as pay, and probes."""
        best = self._level_auction.weigh(self._plan, stage, caps, before)
        levels = self._probes.add_levels(self._plan, stage, best, (caps > 0) & (before.promises < _UNPROMISING))
        if not levels.any():
            return levels
        if not stage.cost.is_autoregressive:
            return np.where(levels > 0, caps, 0)
        planned = np.minimum(levels * stage.cost.width, caps)
        if self._plan.rows.end_together:  # what goes deeper than planned puts rows ahead that wait for others
            return planned
        # A source that heeds prices ends each draft by its own probabilities, which are better than averages.
        return np.where((best > 0) & stage.cost.heeds_prices, caps, planned)

    def _calls_source(self, stage: Stage, caps: np.ndarray) -> bool:
        """Return whether to ask a source that drafts all levels in one call."""
        record = self.records[stage.cost]
        size = size_class(len(caps))
        profit = record.profits[size]
        if profit.num < _TRIAL_STEPS or profit.mean > 0:
            record.trials.reset(size)
            self._plan.pays = profit.num >= _TRIAL_STEPS
            return True
        return self._probes.may_call(self._plan, stage, caps)

    def most_nodes(self, usual: int, most: int) -> int:
        return most

    def price(self, rows: StepRows, stage: Stage) -> LevelPrice | None:
        cost = stage.cost
        if not len(rows) or not cost.heeds_prices:
            return None
        if self._plan.rows is not rows:
            self._begin(rows)
        trust = 1.0 if self.trust is None else self.trust.of_source(stage.name)
        if not cost.is_autoregressive:
            return LevelPrice(0.0, 0.0, self._plan.price * least_node_seconds(self.cost, rows), trust)
        record = self.records[cost]
        held = self._plan.held.get(stage)
        if held is not None and held.price is not None:
            return held.price
        deeper = level_prices(self.cost, rows, self._plan.price, record.timer.seconds(cost), record.acceptance.rate)
        price = LevelPrice(*deeper[0], self._node_price(rows), trust, deeper)
        if held is not None:
            held.price = price
        return price

    def _node_price(self, rows: StepRows) -> float:
        """Return the cost of verifying a further node, in tokens."""
        return self._plan.price * node_seconds(self.cost, rows, self._plan.plain_seconds + self._plan.prefill_seconds)

    def calibrated(self, rows: StepRows, stage: Stage, trees: Sequence[DraftTree]) -> list[DraftTree]:
        forest = self._plan.drafted[stage] = Forest(trees)
        if self.trust is None or not forest.num_nodes:
            return list(trees)
        self._plan.forest = forest.with_probs(self.trust.probs(stage.name, forest, rows.request_ids))
        return list(self._plan.forest.trees)

    # 2. After drafting

    def select(self, rows: StepRows, trees: Sequence[DraftTree]) -> list[DraftTree]:
        if self._plan.rows is not rows:
            self._begin(rows)
        plan, plain = self._plan, self._plan.plain_seconds
        forest = plan.forest_of(trees)
        if forest.num_nodes and (forest.sizes > rows.caps).any():
            forest = plan.forest_of([tree.most_likely(int(cap)) for tree, cap in zip(trees, rows.caps)])
        mask = np.zeros(forest.num_nodes, bool)
        best = won = Won(0, float(len(rows)), plain)
        if forest.num_nodes and not plan.is_baseline:
            best, won = self._winners(rows, forest, mask)
        if won is not best:
            plan.break_even = best.seconds + (won.tokens - best.tokens) / plan.price
        tokens = won.tokens
        if won.num_nodes and np.ndim(plan.worth):  # those of `won` are weighed
            tokens = len(rows) + float(forest.along_paths(forest.probs)[mask].sum())
        asked = [stage for stage in plan.before if stage.asked.any()]
        draft_seconds = sum([self.records[stage.cost].seconds(stage.cost, stage.levels) for stage in asked])
        self.prediction = Prediction(tokens, won.seconds + plan.prefill_seconds, draft_seconds)
        plan.plain_tokens = len(rows) * (won.seconds + draft_seconds) / plain if len(rows) else 0.0
        plan.shares, plan.added_seconds = self._shares(rows, trees, asked), won.seconds - plain
        self._num_since_baseline = self._num_since_baseline + 1 if won.num_nodes else 0
        self._size = rows.num_batched + won.num_nodes
        is_idle = not (won.num_nodes or asked or plan.is_baseline or rows.num_prefill_tokens)
        may_all_draft = rows.caps.all() and all([stage.caps.any() for stage in rows.stages])
        self._resting = rows.request_ids if is_idle and len(rows) and may_all_draft else None
        others_may_rest = all([stage.is_by_level for stage in rows.stages[1:]])
        self._paying = rows.request_ids if plan.pays and others_may_rest else None
        return forest.keep(mask)

    def _winners(self, rows: StepRows, forest: Forest, mask: np.ndarray) -> tuple[Won, Won]:
        """Mark the nodes to verify; return the result of the best ones by the expected costs, and of those marked."""
        plan = self._plan
        gains = forest.along_paths(forest.probs)
        plan.worth = self._paces.worth(plan, np.bincount(forest.row, gains, minlength=len(rows)))
        gains *= np.broadcast_to(plan.worth, len(rows))[forest.row]
        least = (1 - self.speedup + self.margin) * len(rows)  # plain decoding's profit, and the margin
        may_try = self._size_trials.seconds > 0
        best, won = mark_winners(self.cost, plan, forest, gains, least, may_try, mask)
        if won is not best:
            self._size_trials.seconds = 0.0
        return best, won

    def _shares(self, rows: StepRows, trees: Sequence[DraftTree], asked: Sequence[Stage]) -> dict[Stage, float]:
        """Return the shares in the drafts' benefit of the stages that were asked, by the promise that each added."""
        if len(asked) < 2:
            return dict.fromkeys(asked, 1.0)
        promises = [self._plan.before[stage].promises for stage in asked] + [self._before(rows, trees).promises]
        more = [float(np.maximum(after - before, 0.0).sum()) for before, after in pairwise(promises)]
        return {stage: share / max(sum(more), 1e-9) for stage, share in zip(asked, more)}

    # 3. After verification

    def observe(self, outcome: StepOutcome) -> None:
        rows, seconds, tokens = outcome.rows, outcome.seconds, outcome.tokens
        context, batched, width = outcome.forward_size
        if batched:
            self.cost.observe(context, batched, seconds.forward + seconds.other, width)
        plan = self._earlier_plan if self._earlier_plan.rows is rows else self._plan
        if len(rows):
            self._save_time(plan)
            if batched == len(rows):
                self._num_plain[size_class(len(rows))] += 1
        if plan.break_even is not None:
            spent = seconds.forward + seconds.other - plan.prefill_seconds
            self._size_trials.charge(plan, max(spent - plan.break_even, 0.0))
        if len(rows) and not plan.is_baseline:
            worth = plan.worth if plan.rows is rows else 1.0
            accepted = float(np.sum(worth * np.asarray(outcome.accepted))) if any(outcome.accepted) else 0.0
            size = size_class(len(rows))
            speedup = self._speedups[size]
            saved = accepted * plan.plain_seconds / (max(speedup.rate, 1.0) * len(rows)) - plan.added_seconds
            if plan.break_even is None:
                for stage, share in plan.shares.items():
                    if not stage.is_by_level:
                        self.records[stage.cost].add_profit(stage.cost, len(rows), saved * share, stage.seconds)
            speedup.add(plan.plain_tokens, len(rows) + accepted, _SPEEDUP_DECAY)
        if rows.num_remaining is not None:
            self._paces.learn(rows, outcome.accepted)
        for stage in rows.stages:
            if stage.asked.any():
                record = self.records[stage.cost]
                reading = record.learn_time(stage, rows)
                if stage is plan.probing:  # beyond the time of its draft
                    record.trial_time.charge(plan, record.trials.factor * reading)
        if tokens is None:
            tokens = [known_continuation(tree, num) for tree, num in zip(outcome.verified, outcome.accepted)]
            self._learn_outcomes(plan, rows, rows.stages[0], Forest(outcome.verified), tokens)
            return
        for stage, forest in plan.drafted.items():
            self._learn_outcomes(plan, rows, stage, forest, tokens)

    def _learn_outcomes(
        self, plan: Plan, rows: StepRows, stage: Stage, forest: Forest, tokens: Sequence[np.ndarray]
    ) -> None:
        """Learn which of a stage's nodes were right, and how many of these the drafts before it did not hold."""
        nodes, hits = forest.outcomes(tokens)
        if self.trust is not None:
            self.trust.learn(stage.name, forest, nodes, hits, rows.request_ids)
        if stage.is_by_level:
            record, before = self.records[stage.cost], plan.before.get(stage)
            record.learn_levels(rows.request_ids, stage, forest, nodes, hits)
            if stage.position and before is not None:
                reached = [item.depths_reached(tokens) for item in (before.forest, forest)]
                record.novelty.update(before.promises, *reached)

    def renew(self, source: str, number: int) -> None:
        for cost, record in self.records.items():
            if cost.source == source:
                record.renew(number)

    def forget(self, request_id: Hashable) -> None:
        if self.trust is not None:
            self.trust.forget(request_id)
        for record in self.records.values():
            record.forget(request_id)
        self._paces.forget(request_id)
