"""Drafting: sources propose nodes stage by stage, and the length policy selects the nodes that are verified."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from ..drafts.merge import join
from ..drafts.price import LevelPrice
from ..drafts.tree import DraftTree
from ..goodput.estimates.decayed import DecayedMean
from ..goodput.policy import LengthPolicy, StepOutcome, StepRows, StepSeconds
from ..goodput.stage import Stage
from ..target_model.forward.ranks import Ranks
from .alarm import AcceptanceAlarm
from .call import ModelLimits, Request
from .policy_rows import most_nodes, policy_rows
from .source_guard import GuardedSources, fitting
from .statistics import GenerationStatistics, Timed
from .step_drafts import StepDrafts

_EMPTY = DraftTree.empty()
_NEWEST = 0.1  # least weight of the newest draft in the mean of accepted lengths


class _Proposals(NamedTuple):
    """The drafts of a position's sources by row, and the seconds that they took."""

    trees: dict[Request, DraftTree]
    seconds: float

    @property
    def are_empty(self) -> bool:
        """Return whether nothing was found for any row that still runs."""
        return not any([len(tree.tokens) for row, tree in self.trees.items() if row.stopped_at is None])

    def within(self, limits: dict[Request, int]) -> dict[Request, DraftTree]:
        """Return the drafts of some rows, of at most so many nodes."""
        return {row: fitting(self.trees[row], limit) for row, limit in limits.items() if row in self.trees}


class Drafting:
    """
    Drafts a tree for every row that will have logits after its whole text.

    Args:
        policy (`LengthPolicy`): Decides how many nodes are drafted and verified.
        limits (`ModelLimits`): Bounds on drafts.
        statistics (`GenerationStatistics`): Counts the seconds.
        clock (`Callable`): Clock, in seconds.
        ranks (`Ranks`, *optional*): The processes that hold the model together; the first one drafts for all.
        alarm (`AcceptanceAlarm`, *optional*): The model's alarm, shared by all loops that run it.
    """

    def __init__(
        self,
        policy: LengthPolicy,
        limits: ModelLimits,
        statistics: GenerationStatistics,
        clock: Callable[[], float],
        ranks: Ranks | None = None,
        alarm: AcceptanceAlarm | None = None,
    ):
        self.policy, self.limits, self.statistics, self.clock = policy, limits, statistics, clock
        self.ranks, self.alarm = ranks, alarm or AcceptanceAlarm()
        self.sources = GuardedSources(limits.vocab_size)
        self.is_traced = False  # whether some row is traced
        self._unlearnt: Callable[[], None] | None = None  # learns from the latest step, if that was put off
        # Whether some source was asked in the latest step; always True in processes that do not draft.
        self.has_asked = True
        # Rows of the latest step that a source with needs was asked for; None in processes that do not draft.
        self._asked_with_needs: set[Request] | None = None
        # Seconds to pass a step's outcome on to sources and policy: of the latest step with drafts and without prompts,
        # and of all steps.
        self._seconds_learning = self._seconds_observed = 0.0
        self._has_learnt = False  # whether the latest step had drafts and no prompts
        self._seconds_assigned = 0.0  # of selecting, in earlier steps and, as some stage's time, in this one
        self._seconds_meanwhile = 0.0  # spent on learning while a device computed
        self._first_price: LevelPrice | None = None  # of the first stage when the policy was called last
        # Accepted lengths by source, for sources after the first one: a running mean that begins with one token.
        self._lengths: defaultdict[str, DecayedMean] = defaultdict(partial(DecayedMean, _NEWEST, 1.0, 1))

    @property
    def decides(self) -> bool:
        """True in the process that drafts."""
        return self.ranks is None or self.ranks.is_first

    def draft(self, feeds: dict[Request, np.ndarray], num_waiting: int = 0) -> StepDrafts:
        """
        Draft the trees of one step, in which every row is fed the tokens in `feeds`: stage by stage, drafts are merged
        into the trees where the policy finds them worth their cost. Of all nodes, it selects those to verify.
        """
        rows = [request for request, tokens in feeds.items() if request.num_uncached == len(tokens)]
        start, asks_first = self.seconds(), False
        if self._may_rest(rows, feeds):
            names = [request.request_id for request in rows]
            if self.policy.rests(names):
                return self._without_drafts(rows, start)
            asks_first = self.policy.asks_first(names)
        observed = self.statistics.seconds_observe - self._seconds_meanwhile
        if self._has_learnt:
            self._seconds_learning = observed - self._seconds_observed
        self._seconds_observed = observed
        first = self._ask_first(rows) if asks_first else None
        if first is not None and first.are_empty:
            return self._without_drafts(rows, start, has_asked=True)
        self._seconds_assigned = self.statistics.seconds_select
        with self._timed("seconds_select"):
            step = policy_rows(rows, feeds, num_waiting, self.policy, self._lengths)
        if self.ranks is None:
            proposed, selected = self._propose_and_select(step, rows, first)
        else:
            proposed, selected = self.ranks.trees(lambda: self._propose_and_select(step, rows, first), len(rows))
        drafts = StepDrafts(step, rows, proposed, selected, start)
        if self.is_traced:
            drafts.begin_traces(self.sources)
        return drafts

    def _may_rest(self, rows: list[Request], feeds: dict[Request, np.ndarray]) -> bool:
        """Return whether the policy need not decide about a step; with several processes, it always does."""
        has_prompts = len(rows) < len(feeds) or any([len(tokens) > 1 for tokens in feeds.values()])
        return not (self.ranks is not None or self.is_traced or has_prompts)

    def _without_drafts(self, rows: list[Request], start: StepSeconds, has_asked: bool = False) -> StepDrafts:
        trees = [_EMPTY] * len(rows)
        self.sources.count(dict(zip(rows, trees)))
        self.has_asked, self._asked_with_needs, self._has_learnt = has_asked, set(), False
        return StepDrafts(None, rows, trees, trees, start)

    def _ask_first(self, rows: list[Request]) -> _Proposals | None:
        """
        Return what the first source proposes; None where the policy is called before it: for sources that draft by
        level, such as a later one where the first has failed, for those that need hidden states or scores, and for rows
        with different sources. Drafts are cut later to what namespaces that share the step may have.
        """
        if not rows:
            return None
        cost = rows[0].chain.costs[0]
        if cost.is_autoregressive or cost.follows_target:
            return None
        if any([row.dropped or row.chain.costs[0] is not cost or row.chain.sources[0].needs for row in rows]):
            return None
        asked = {row: number for row in rows if (number := most_nodes(row)) > 0}
        return self._proposals(0, asked, self._first_price) if asked else None

    def _propose_and_select(
        self, step: StepRows, rows: list[Request], first: _Proposals | None
    ) -> tuple[list[DraftTree], list[DraftTree]]:
        """
        Ask the sources stage by stage, then the policy; not the first one if it has proposed already. Return the
        proposed trees, and the selected ones.
        """
        trees = [_EMPTY] * len(rows)
        for stage in step.stages:
            trees = self._with_stage(step, stage, rows, trees, first if stage is step.stages[0] else None)
        with self._timed("seconds_select"):
            self._count(step, rows, trees)
            proposed = [
                self._within_limits(request, tree) if len(tree.tokens) else tree for request, tree in zip(rows, trees)
            ]
            selected = self.policy.select(step, proposed)
            _check_number(self.policy, "selected", len(selected), "trees", len(rows))
            asked = [stage for stage in step.stages if stage.asked.any()]
            self.has_asked = bool(asked)
            self._asked_with_needs = {
                request
                for stage in asked
                for request, number in zip(rows, stage.asked.tolist())
                if number and request.chain.sources[stage.position].needs
            }
            self._has_learnt = self.has_asked and not step.num_prefill_tokens
        if asked:  # the first stage takes all that most steps without drafts go without
            left = self.statistics.seconds_select - self._seconds_assigned
            self._count_as_drafting(asked[0], left, self._seconds_learning)
        return proposed, selected

    def has_asked_with_needs(self, request: Request) -> bool:
        """Return whether a source with needs was asked for the row in the latest step, or may have been."""
        return self._asked_with_needs is None or request in self._asked_with_needs

    def _count_as_drafting(self, stage: Stage, selecting: float, learning: float = 0.0) -> None:
        """
        Count seconds of selecting and learning as the stage's time. Where every level is a call, the stage's time is
        that of levels, so that both are counted beside it.
        """
        self._seconds_assigned += selecting
        if stage.cost.is_autoregressive:
            stage.overhead += selecting + learning
        else:
            stage.seconds += selecting + learning

    def _count(self, step: StepRows, rows: list[Request], trees: list[DraftTree]) -> None:
        """Count drafted nodes for the gates of draft models, except for rows whose sources wait for the prefill."""
        if not any([request.chain.drafter for request in rows]):
            return
        drafted = dict(zip(rows, trees))
        if not any([stage.caps is step.caps for stage in step.stages]):  # else no row waits
            waiting = (step.caps > 0) & ~np.any([stage.caps > 0 for stage in step.stages], axis=0)
            drafted = {request: tree for request, tree, waits in zip(rows, trees, waiting.tolist()) if not waits}
        self.sources.count(drafted)

    def _with_stage(
        self,
        step: StepRows,
        stage: Stage,
        rows: list[Request],
        trees: list[DraftTree],
        known: _Proposals | None,
    ) -> list[DraftTree]:
        """Return the trees with the drafts of one more stage, which may be known."""
        with self._timed("seconds_select"):
            before = self.clock()
            max_nodes = self.policy.max_nodes(step, stage, trees)
            _check_number(self.policy, "gave", len(max_nodes), "limits", len(rows))
            if stage.replaces:
                max_nodes = stage.limits(np.asarray(max_nodes), trees)
            stage.asked = np.maximum(np.minimum(max_nodes, stage.caps), 0).astype(np.int64, copy=False)
            asked = {request: number for request, number in zip(rows, stage.asked.tolist()) if number > 0}
            price = self.policy.price(step, stage) if asked else None
            if asked:
                self._count_as_drafting(stage, self.clock() - before)
        if stage is step.stages[0]:
            self._first_price = price
        if not asked:
            return trees
        found = self._proposals(stage.position, asked, price) if known is None else known
        proposals = found.trees if known is None else known.within(asked)
        stage.seconds += found.seconds
        with self._timed("seconds_select"):
            before = self.clock()
            stage.proposed = [proposals.get(request, _EMPTY) for request in rows]
            drafted = self.policy.calibrated(step, stage, stage.proposed)
            _check_number(self.policy, "calibrated", len(drafted), "trees", len(rows))
            if stage.replaces:
                joined = [own if num else tree for tree, own, num in zip(trees, drafted, stage.asked.tolist())]
            else:
                joined = join(trees, drafted, step.caps) if any([len(tree.tokens) for tree in trees]) else drafted
            self._count_as_drafting(stage, self.clock() - before)
        return joined

    def _proposals(self, position: int, asked: dict[Request, int], price: LevelPrice | None) -> _Proposals:
        """Return the drafts of the sources at a position of the rows' chains, and how long they took."""
        with self._timed("seconds_draft"):
            before = self.clock()
            self.sources.catch_up(position, asked)
            padding, others = _split_padding(asked, position)
            trees = padding | self.sources.propose(position, others, price)
            return _Proposals(trees, self.clock() - before)

    def observe(
        self, drafts: StepDrafts, accepted: Sequence[int], tokens: Sequence[np.ndarray], may_wait: bool = False
    ) -> None:
        """
        Learn from the outcome of a step.

        Args:
            accepted (sequence of `int`): Number of accepted nodes of each row.
            tokens (sequence of `np.ndarray`): Committed tokens of each row.
            may_wait (`bool`): Whether learning can be put off until the device runs the next forward
                (`learn_meanwhile`).
        """
        if not self.decides:
            return
        self._catch_up()  # the step before
        if drafts.policy_rows is None:
            self.policy.rested(len(drafts.rows), drafts.seconds(self.seconds()))
            return
        learn = partial(self._learn, drafts.rows, drafts.outcome(accepted, tokens, self.seconds()))
        if may_wait and self.policy.learns_late:
            self._unlearnt = learn
        else:
            learn()

    def learn(self) -> None:
        """Learn from the latest step, if that was put off."""
        if self._unlearnt is not None:
            with self._timed("seconds_observe"):
                self._catch_up()

    def learn_meanwhile(self) -> None:
        """
        Call `learn` while a device computes. The time counts as the forward's (`seconds`), since the host would wait
        for the forward's results in any case.
        """
        before = self.statistics.seconds_observe
        self.learn()
        self._seconds_meanwhile += self.statistics.seconds_observe - before

    def _catch_up(self) -> None:
        unlearnt, self._unlearnt = self._unlearnt, None  # once, also if it fails
        if unlearnt is not None:
            unlearnt()

    def _learn(self, rows: Sequence[Request], outcome: StepOutcome) -> None:
        """
        Update the accepted lengths of later stages, by all their drafts, verified or not; the alarm about learned
        sources; and the policy.
        """
        tokens = outcome.tokens or []
        for stage in outcome.rows.stages:
            if stage.cost.is_learned and self.alarm.watches(stage.name):
                judged = [index for index, request in enumerate(rows) if request.call.is_judged]
                self.alarm.observe(
                    stage.name, [stage.proposed[index] for index in judged], [tokens[index] for index in judged]
                )
            if stage.position:
                for tree, line in zip(stage.proposed, tokens):
                    if len(tree):
                        self._lengths[stage.name].add(len(tree.path_along(line)))
        self.policy.observe(outcome)

    def seconds(self) -> StepSeconds:
        """Return the seconds spent in all steps; of forwards, until the host does nothing but wait for them."""
        counts = self.statistics
        forward = counts.seconds_forward + self._seconds_meanwhile
        return StepSeconds(counts.seconds_draft + counts.seconds_select, forward, counts.seconds_verify)

    def _within_limits(self, request: Request, tree: DraftTree) -> DraftTree:
        if not request.call.forward.trees:
            tree = tree.best_chain()
        left = request.num_remaining
        if left is not None and len(tree) >= left:
            tree = tree.keep(tree.depths < left)
        # Learned position embeddings have a last position, which plain decoding need not reach.
        room = len(tree) if self.limits.num_positions is None else self.limits.num_positions - request.length
        if 0 <= room < len(tree):
            tree = tree.keep(tree.depths <= room)
        row = request.cache_row
        depth = None if row.renewal is None else row.room(request.length)
        return tree if depth is None else tree.keep(tree.depths <= depth)

    def _timed(self, name: str) -> Timed:
        return Timed(self.statistics, name, self.clock)


def _split_padding(asked: dict[Request, int], position: int) -> tuple[dict[Request, DraftTree], dict[Request, int]]:
    """Split rows: finished ones, which keep running on padding, get drafts of padding, the others go to the source."""
    padding = {
        request: limit
        for request, limit in asked.items()
        if request.stopped_at is not None and request.call.batch.is_padding(request)
    }
    if not padding:
        return {}, asked
    drafts = {request: DraftTree.chain([request.call.batch.pad_token_id] * limit) for request, limit in padding.items()}
    return {} if position else drafts, {request: limit for request, limit in asked.items() if request not in padding}


def _check_number(policy: LengthPolicy, verb: str, number: int, noun: str, expected: int) -> None:
    if number != expected:
        raise ValueError(f"{type(policy).__name__} {verb} {number} {noun} for {expected} rows.")
