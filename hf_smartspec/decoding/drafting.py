"""Drafting: sources propose nodes stage by stage, and the length policy selects the nodes that are verified."""

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from ..candidates.base import label_of
from ..drafts.merge import Draft, first_drafters, join
from ..drafts.tree import DraftTree
from ..goodput.estimates.decayed import DecayedMean
from ..goodput.policy import DraftCost, LengthPolicy, StepOutcome, StepRows, StepSeconds
from ..goodput.stage import Stage
from ..target_model.forward.ranks import Ranks
from .alarm import AcceptanceAlarm
from .call import ModelLimits, Request, padded_context
from .source_guard import GuardedSources
from .statistics import GenerationStatistics, Timed

_EMPTY = DraftTree.empty()
_NEWEST = 0.1  # least weight of the newest draft in the mean of accepted lengths
_LONGEST = 1.5  # largest ratio of the times of a step with and without drafts, if several namespaces share it


class StepDrafts(NamedTuple):
    """Drafts of one step: the proposed trees, and the selected ones, which are verified."""

    policy_rows: StepRows
    rows: list[Request]
    proposed: list[DraftTree]
    trees: list[DraftTree]
    start: StepSeconds  # seconds spent before the step

    def outcome(self, accepted: Sequence[int], tokens: Sequence[np.ndarray], end: StepSeconds) -> StepOutcome:
        """Return the outcome for the policy, from accepted nodes and committed tokens of rows, and the step's end."""
        seconds = StepSeconds(*(after - before for before, after in zip(self.start, end)))
        return StepOutcome(self.policy_rows, self.proposed, self.trees, accepted, seconds, tokens)


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
        self._seconds_selecting = 0.0  # in all steps, for sources that draft in one call
        self._seconds_meanwhile = 0.0  # spent on learning while a device computed
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
        start = self.seconds()
        observed = self.statistics.seconds_observe - self._seconds_meanwhile
        if self._has_learnt:
            self._seconds_learning = observed - self._seconds_observed
        self._seconds_observed = observed
        rows = [request for request, tokens in feeds.items() if request.num_uncached == len(tokens)]
        with self._timed("seconds_select"):
            step = self._step_rows(rows, feeds, num_waiting)
        if self.ranks is None:
            proposed, selected = self._propose_and_select(step, rows)
        else:
            proposed, selected = self.ranks.trees(lambda: self._propose_and_select(step, rows), len(rows))
        drafts = StepDrafts(step, rows, proposed, selected, start)
        if self.is_traced:
            _begin_traces(drafts, self.sources)
        return drafts

    def _propose_and_select(self, step: StepRows, rows: list[Request]) -> tuple[list[DraftTree], list[DraftTree]]:
        """Ask the sources stage by stage, then the policy. Return the proposed trees, and the selected ones."""
        trees = [_EMPTY] * len(rows)
        for stage in step.stages:
            trees = self._with_stage(step, stage, rows, trees)
        with self._timed("seconds_select"):
            before = self.clock()
            self._count(step, rows, trees)
            proposed = [
                self._within_limits(request, tree) if len(tree.tokens) else tree for request, tree in zip(rows, trees)
            ]
            selected = self.policy.select(step, proposed)
            _check_number(self.policy, "selected", len(selected), "trees", len(rows))
            asked = [stage for stage in step.stages if stage.asked.any()]
            if asked:  # without drafts, there is hardly anything to select and to learn
                self._count_as_drafting(asked[0], self.clock() - before, self._seconds_learning)
            self.has_asked = bool(asked)
            self._asked_with_needs = {
                request
                for stage in asked
                for request, number in zip(rows, stage.asked.tolist())
                if number and request.chain.sources[stage.position].needs
            }
            self._has_learnt = self.has_asked and not step.num_prefill_tokens
        return proposed, selected

    def has_asked_with_needs(self, request: Request) -> bool:
        """Return whether a source with needs was asked for the row in the latest step, or may have been."""
        return self._asked_with_needs is None or request in self._asked_with_needs

    def _count_as_drafting(self, stage: Stage, selecting: float, learning: float = 0.0) -> None:
        """
        Count seconds of selecting and learning as the stage's time, and those of selecting no longer as the forward's.
        Where every level is a call, the stage's time is that of levels, so that learning is counted beside it.
        """
        if stage.cost.is_autoregressive:
            stage.overhead = learning
        else:
            stage.seconds += selecting + learning
            self._seconds_selecting += selecting

    def _count(self, step: StepRows, rows: list[Request], trees: list[DraftTree]) -> None:
        """Count drafted nodes for the gates of draft models, except for rows whose sources wait for the prefill."""
        if not any([request.chain.drafter for request in rows]):
            return
        drafted = dict(zip(rows, trees))
        if not any([stage.caps is step.caps for stage in step.stages]):  # else no row waits
            waiting = (step.caps > 0) & ~np.any([stage.caps > 0 for stage in step.stages], axis=0)
            drafted = {request: tree for request, tree, waits in zip(rows, trees, waiting.tolist()) if not waits}
        self.sources.count(drafted)

    def _with_stage(self, step: StepRows, stage: Stage, rows: list[Request], trees: list[DraftTree]) -> list[DraftTree]:
        """Return the trees with the drafts of one more stage."""
        with self._timed("seconds_select"):
            max_nodes = self.policy.max_nodes(step, stage, trees)
            _check_number(self.policy, "gave", len(max_nodes), "limits", len(rows))
            if stage.replaces:
                max_nodes = stage.limits(np.asarray(max_nodes), trees)
            stage.asked = np.maximum(np.minimum(max_nodes, stage.caps), 0).astype(np.int64, copy=False)
            asked = {request: number for request, number in zip(rows, stage.asked.tolist()) if number > 0}
            price = self.policy.price(step, stage) if asked else None
        if not asked:
            return trees
        with self._timed("seconds_draft"):
            before = self.clock()
            self.sources.catch_up(stage.position, asked)
            padding, asked = _split_padding(asked, stage.position)
            proposals = padding | self.sources.propose(stage.position, asked, price)
            stage.seconds = self.clock() - before
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
        counts, selecting = self.statistics, self._seconds_selecting
        forward = counts.seconds_forward + self._seconds_meanwhile
        other = counts.seconds_select - selecting + counts.seconds_verify
        return StepSeconds(counts.seconds_draft + selecting, forward, other)

    def _step_rows(self, rows: Sequence[Request], feeds: dict[Request, np.ndarray], num_waiting: int) -> StepRows:
        sizes = list(map(len, feeds.values()))
        prompts = [(num, request.cache_row.length) for request, num in zip(feeds, sizes) if num > 1]
        caps = np.array([_cap(request) for request in rows], np.int64)
        step = StepRows(
            request_ids=[request.request_id for request in rows],
            context_lens=np.array([request.cache_row.length for request in rows], np.int64),
            caps=caps,
            num_prefill_tokens=sum(sizes) - len(rows),
            prefill_context=sum(num + cached for num, cached in prompts),
            prefill_pairs=sum(num * (num + cached) for num, cached in prompts),
            num_waiting=num_waiting,
            padded_context=padded_context(
                [request for request in rows if len(feeds[request]) == 1] if prompts else rows
            ),
            num_remaining=_remaining(rows),
        )
        if len({request.call.namespace for request in feeds}) > 1:
            step.caps = self._shared_caps(step)
        step.stages = self._stages(rows, step.caps, feeds) or step.stages
        return step

    def _shared_caps(self, step: StepRows) -> np.ndarray:
        """
        Return the caps of rows in a step that several namespaces share, `[rows]` int64, with which drafts of
        one namespace make the step at most `_LONGEST` times as long for the others. Policies without a cost model set
        lengths of their own, which no namespace can raise.
        """
        cost = getattr(self.policy, "cost", None)
        if cost is None or not step.caps.any():
            return step.caps
        num = np.arange(1, step.caps.max() + 1)  # nodes per row
        seconds = cost.seconds(*step.forward_size(num * len(step), 1 + num))
        most = np.count_nonzero(seconds <= _LONGEST * cost.seconds(*step.forward_size()))
        return np.minimum(step.caps, max(int(most), 1))

    def most_running(self, running: Sequence[Request], waiting: Sequence[Request], num_fitting: int) -> float:
        """
        Return how many requests of an engine may run in the next step, by a policy that chooses batches (SmartSpec,
        algorithm 2): all for which there is room (infinity), or fewer.

        Args:
            waiting (sequence of `Request`): The requests that may begin, in the order of arrival.
            num_fitting (`int`): How many of these have room in memory, which includes room for drafts.
        """
        queue, most = [*running, *waiting], len(running) + num_fitting
        if not num_fitting or self.ranks is not None:  # several processes would choose differently
            return math.inf
        lengths = np.array([request.length for request in queue], np.int64)
        caps = np.array([request.call.max_nodes for request in queue], np.int64)
        costs = [request.chain.costs[0] for request in queue]
        stages = [Stage(cost, np.where([own == cost for own in costs], caps, 0)) for cost in dict.fromkeys(costs)]
        rows = StepRows(
            [request.request_id for request in queue], lengths, caps, num_waiting=len(waiting), stages=stages,
            padded_context=int(lengths.sum()),
        )  # fmt: skip
        chosen = self.policy.num_to_run(rows, len(running), lambda number, _: number <= most)
        return math.inf if chosen >= most else max(chosen, len(running), 1)

    def _stages(self, rows: Sequence[Request], caps: np.ndarray, feeds: dict[Request, np.ndarray]) -> list[Stage]:
        """Return a stage for each position and cost of sources, with its rows, in the order of positions."""
        costs = rows[0].chain.costs if rows else ()
        if all([request.chain.costs is costs and not request.dropped for request in rows]):
            return [
                self._stage(cost, _own_caps(cost, rows, caps, feeds), position, rows[0])
                for position, cost in enumerate(costs)
            ]
        kinds: dict[tuple[int, DraftCost], list[int]] = {}
        for index, request in enumerate(rows):
            for position, cost in enumerate(request.chain.costs):
                if position not in request.dropped:
                    kinds.setdefault((position, cost), []).append(index)
        stages = []
        for (position, cost), members in sorted(kinds.items(), key=lambda item: item[0][0]):
            own = known = _own_caps(cost, rows, caps, feeds)
            if len(members) < len(rows):
                own = np.zeros_like(caps)
                own[members] = known[members]
            stages.append(self._stage(cost, own, position, rows[members[0]]))
        return stages

    def _stage(self, cost: DraftCost, caps: np.ndarray, position: int, request: Request) -> Stage:
        """Return a stage; where it is not the first one, with what the request's source sets for its hybrid."""
        if not position:
            return Stage(cost, caps)
        source = request.call.source
        given, replaces = getattr(source, "threshold", None), getattr(source, "replaces", False)
        return Stage(cost, caps, position, self._lengths[cost.source].mean if given is None else given, replaces)

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


def _own_caps(
    cost: DraftCost, rows: Sequence[Request], caps: np.ndarray, feeds: dict[Request, np.ndarray]
) -> np.ndarray:
    """Return a stage's caps, `[rows]`; 0 during prefill for sources that need the target's hidden states or cache."""
    if not cost.follows_target or all([request.tokens for request in rows]):
        return caps
    return np.where([_is_prefilling(request, feeds[request]) for request in rows], 0, caps)


def _is_prefilling(request: Request, feed: np.ndarray) -> bool:
    """Return whether the row is still in prefill, so that the target has no states of its earlier tokens."""
    return not request.tokens and (len(feed) > 1 or not request.cache_row.length)


def _remaining(rows: Sequence[Request]) -> np.ndarray | None:
    """Return how many tokens each of several rows of one call generates at most; None for rows of several calls."""
    if len(rows) < 2 or any([request.call is not rows[0].call for request in rows]):
        return None
    numbers = [request.num_remaining for request in rows]
    return None if None in numbers else np.array(numbers, np.int64)


def _cap(request: Request) -> int:
    # The last token needs no draft: every step yields the target's own pick.
    if not request.is_drafting:
        return 0
    left = request.num_remaining
    return request.call.cap(left) if left != 1 else 0


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


def _begin_traces(step: StepDrafts, sources: GuardedSources) -> None:
    """Begin the step in the traces of its rows, before their sources observe its outcome."""
    for index, (request, drafted, verified) in enumerate(zip(step.rows, step.proposed, step.trees)):
        if request.trace is None:
            continue
        nodes = list(range(len(drafted))) if verified is drafted else Draft.of(drafted).nodes_of(verified)
        if -1 in nodes:  # the policy has selected nodes that were not proposed
            drafted, nodes = verified, list(range(len(verified)))
        proposals = [(stage.position, stage.proposed[index]) for stage in step.policy_rows.stages]
        labels = first_drafters(
            drafted,
            [(Draft.of(tree), partial(sources.drafted_by, request, place)) for place, tree in proposals if len(tree)],
        )
        request.trace.begin(drafted, nodes, [label or label_of(request.chain.sources[0]) for label in labels])
