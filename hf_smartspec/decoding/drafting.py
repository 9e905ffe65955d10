"""Drafting: the sources of a step are asked stage by stage, and the length policy selects what is verified."""

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
_LONGEST = 1.5  # seconds of a step that several namespaces share, by those that it would take without drafts


class StepDrafts(NamedTuple):
    """What one step drafts, and what it verifies of that."""

    policy_rows: StepRows
    rows: list[Request]
    proposed: list[DraftTree]
    trees: list[DraftTree]
    start: StepSeconds  # spent before the step

    def outcome(self, accepted: Sequence[int], tokens: Sequence[np.ndarray], end: StepSeconds) -> StepOutcome:
        """What the policy learns from: accepted nodes and committed tokens of each row, and seconds until the `end`."""
        seconds = StepSeconds(*(after - before for before, after in zip(self.start, end)))
        return StepOutcome(self.policy_rows, self.proposed, self.trees, accepted, seconds, tokens)


class Drafting:
    """
    Gives every row that will have logits behind its whole text a draft tree.

    Args:
        policy (`LengthPolicy`): Says how many nodes are drafted and verified.
        limits (`ModelLimits`): What drafts must not exceed.
        statistics (`GenerationStatistics`): Counts the seconds.
        clock (`Callable`): Seconds.
        ranks (`Ranks`, *optional*): Who holds the model with this process: the first of them drafts for all.
        alarm (`AcceptanceAlarm`, *optional*): Of the model, for all loops that run it.
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
        self.is_traced = False  # whether some row is
        self._unlearnt: Callable[[], None] | None = None  # what came of the latest step, where that is put off
        self._seconds_meanwhile = 0.0  # of learning while a device computed
        # Accepted lengths by source, of those after the first place: a running mean that begins with one token.
        self._lengths: defaultdict[str, DecayedMean] = defaultdict(partial(DecayedMean, _NEWEST, 1.0, 1))

    @property
    def decides(self) -> bool:
        """Whether this process chooses what is drafted."""
        return self.ranks is None or self.ranks.is_first

    def draft(self, feeds: dict[Request, np.ndarray], num_waiting: int = 0) -> StepDrafts:
        """
        The trees of one step, in which `feeds` are the tokens that every row is fed: each stage's drafts join what is
        there, as far as the policy finds that worth its cost; of all, it selects what is verified.
        """
        start = self.seconds()
        rows = [request for request, tokens in feeds.items() if request.num_uncached == len(tokens)]
        with self._timed("seconds_select"):
            step = self._step_rows(rows, feeds, num_waiting)
        if self.ranks is None:
            proposed, selected = self._select(step, rows)
        else:
            proposed, selected = self.ranks.trees(lambda: self._select(step, rows), len(rows))
        drafts = StepDrafts(step, rows, proposed, selected, start)
        if self.is_traced:
            _begin_traces(drafts, self.sources)
        return drafts

    def _select(self, step: StepRows, rows: list[Request]) -> tuple[list[DraftTree], list[DraftTree]]:
        """All that is drafted, and what of it is verified."""
        trees = [_EMPTY] * len(rows)
        for stage in step.stages:
            trees = self._with_stage(step, stage, rows, trees)
        with self._timed("seconds_select"):
            self._count(step, rows, trees)
            proposed = [
                self._within_limits(request, tree) if len(tree.tokens) else tree for request, tree in zip(rows, trees)
            ]
            selected = self.policy.select(step, proposed)
            _check_number(self.policy, "selected", len(selected), "trees", len(rows))
        return proposed, selected

    def _count(self, step: StepRows, rows: list[Request], trees: list[DraftTree]) -> None:
        """Tells the gates of draft models what was drafted, but for rows whose sources wait for their prompts."""
        if not any([request.line.drafter for request in rows]):
            return
        waiting = (step.caps > 0) & ~np.any([stage.caps > 0 for stage in step.stages], axis=0)
        self.sources.count({request: tree for request, tree, waits in zip(rows, trees, waiting.tolist()) if not waits})

    def _with_stage(self, step: StepRows, stage: Stage, rows: list[Request], trees: list[DraftTree]) -> list[DraftTree]:
        """The trees with what one more source drafts."""
        with self._timed("seconds_select"):
            limits = self.policy.max_nodes(step, stage, trees)
            _check_number(self.policy, "gave", len(limits), "limits", len(rows))
            stage.asked = np.maximum(np.minimum(limits, stage.caps), 0).astype(np.int64, copy=False)
            wanted = {request: number for request, number in zip(rows, stage.asked.tolist()) if number > 0}
            price = self.policy.price(step, stage) if wanted else None
        if not wanted:
            return trees
        with self._timed("seconds_draft"):
            before = self.clock()
            running_on, wanted = _apart(wanted, stage.position)
            proposals = running_on | self.sources.propose(stage.position, wanted, price)
            stage.seconds = self.clock() - before
        with self._timed("seconds_select"):
            stage.proposed = [proposals.get(request, _EMPTY) for request in rows]
            drafted = self.policy.calibrated(step, stage, stage.proposed)
            _check_number(self.policy, "calibrated", len(drafted), "trees", len(rows))
            return join(trees, drafted, step.caps) if any([len(tree.tokens) for tree in trees]) else drafted

    def observe(
        self, drafts: StepDrafts, accepted: Sequence[int], tokens: Sequence[np.ndarray], may_wait: bool = False
    ) -> None:
        """
        What came of a step: accepted nodes and committed tokens of each row. `may_wait`: a device will be busy with the
        next forward, and what is learnt of this one can be put off until then (`learn_meanwhile`).
        """
        if not self.decides:
            return
        self._catch_up()  # first things first
        learn = partial(self._learn, drafts.rows, drafts.outcome(accepted, tokens, self.seconds()))
        if may_wait and self.policy.learns_late:
            self._unlearnt = learn
        else:
            learn()

    def learn(self) -> None:
        """What was put off is learnt, if anything was."""
        if self._unlearnt is not None:
            with self._timed("seconds_observe"):
                self._catch_up()

    def learn_meanwhile(self) -> None:
        """
        `learn`, while a device computes: the host would have waited for so long, or for as long as it had to. Either
        way this is what the forward takes until its results are there, and counts as the forward's (`seconds`).
        """
        before = self.statistics.seconds_observe
        self.learn()
        self._seconds_meanwhile += self.statistics.seconds_observe - before

    def _catch_up(self) -> None:
        unlearnt, self._unlearnt = self._unlearnt, None  # once, also where that fails
        if unlearnt is not None:
            unlearnt()

    def _learn(self, rows: Sequence[Request], outcome: StepOutcome) -> None:
        """
        How far the drafts of later stages came true, whether they were verified or not; whether those of learned
        sources ever do; and for the policy, what came of its decisions.
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
        """Seconds spent so far, in all steps. Of a forward: from its beginning until nothing is left but to wait."""
        counts = self.statistics
        forward = counts.seconds_forward + self._seconds_meanwhile
        return StepSeconds(counts.seconds_draft, forward, counts.seconds_select + counts.seconds_verify)

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
        )
        if len({request.call.namespace for request in feeds}) > 1:
            step.caps = self._shared_caps(step)
        step.stages = self._stages(rows, step.caps, feeds) or step.stages
        return step

    def _shared_caps(self, step: StepRows) -> np.ndarray:
        """
        The most nodes of each row of a step that several namespaces share, `[rows]` int64: drafts that pay for one make
        steps no longer than `_LONGEST` for the others.
        """
        cost = getattr(self.policy, "cost", None)
        if cost is None or not step.caps.any():
            return step.caps
        num = np.arange(1, step.caps.max() + 1)  # of each row
        seconds = cost.seconds(*step.forward_size(num * len(step), 1 + num))
        most = np.count_nonzero(seconds <= _LONGEST * cost.seconds(*step.forward_size()))
        return np.minimum(step.caps, max(int(most), 1))

    def _stages(self, rows: Sequence[Request], caps: np.ndarray, feeds: dict[Request, np.ndarray]) -> list[Stage]:
        """Every kind of source with its rows, the first ones of all rows first."""
        costs = rows[0].line.costs if rows else ()
        if all([request.line.costs is costs and not request.dropped for request in rows]):
            return [
                Stage(
                    cost, _own_caps(cost, rows, caps, feeds), position, self._threshold(rows[0], position, cost.source)
                )
                for position, cost in enumerate(costs)
            ]
        kinds: dict[tuple[int, DraftCost], list[int]] = {}
        for index, request in enumerate(rows):
            for position, cost in enumerate(request.line.costs):
                if position not in request.dropped:
                    kinds.setdefault((position, cost), []).append(index)
        stages = []
        for (position, cost), members in sorted(kinds.items(), key=lambda item: item[0][0]):
            own = known = _own_caps(cost, rows, caps, feeds)
            if len(members) < len(rows):
                own = np.zeros_like(caps)
                own[members] = known[members]
            stages.append(Stage(cost, own, position, self._threshold(rows[members[0]], position, cost.source)))
        return stages

    def _threshold(self, request: Request, position: int, name: str) -> float:
        if not position:
            return np.inf
        given = getattr(request.call.source, "threshold", None)
        return self._lengths[name].mean if given is None else given

    def _within_limits(self, request: Request, tree: DraftTree) -> DraftTree:
        if not request.call.forward.trees:
            tree = tree.best_chain()
        left = request.num_remaining
        if left is not None and len(tree) >= left:
            tree = tree.keep(tree.depths < left)
        # Learned position embeddings end somewhere, and plain decoding may stop just before.
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
    """Caps of a source: 0 for rows that run their prompts, if it drafts from what the target has left of these."""
    if not cost.follows_target:
        return caps
    return np.where([_reads_prompt(request, feeds[request]) for request in rows], 0, caps)


def _reads_prompt(request: Request, feed: np.ndarray) -> bool:
    """Whether the target has not left anything of what stands before the row's newest token."""
    return not request.tokens and (len(feed) > 1 or not request.cache_row.length)


def _cap(request: Request) -> int:
    # The last token needs no draft: the target's own pick comes free.
    if not request.is_drafting:
        return 0
    left = request.num_remaining
    return request.call.most_nodes(left) if left != 1 else 0


def _apart(wanted: dict[Request, int], position: int) -> tuple[dict[Request, DraftTree], dict[Request, int]]:
    """The drafts of rows that run on, on padding, which need no source; and the rows that do."""
    padding = {
        request: limit
        for request, limit in wanted.items()
        if request.stopped_at is not None and request.call.batch.is_padding(request)
    }
    if not padding:
        return {}, wanted
    drafts = {request: DraftTree.chain([request.call.batch.pad_token_id] * limit) for request, limit in padding.items()}
    return {} if position else drafts, {request: limit for request, limit in wanted.items() if request not in padding}


def _check_number(policy: LengthPolicy, verb: str, number: int, noun: str, expected: int) -> None:
    if number != expected:
        raise ValueError(f"{type(policy).__name__} {verb} {number} {noun} for {expected} rows.")


def _begin_traces(step: StepDrafts, sources: GuardedSources) -> None:
    """Of the rows that are traced, before their sources are told what came of their drafts."""
    for index, (request, drafted, verified) in enumerate(zip(step.rows, step.proposed, step.trees)):
        if request.trace is None:
            continue
        nodes = list(range(len(drafted))) if verified is drafted else Draft.of(drafted).nodes_of(verified)
        if -1 in nodes:  # a policy has verified what nobody had proposed
            drafted, nodes = verified, list(range(len(verified)))
        proposals = [(stage.position, stage.proposed[index]) for stage in step.policy_rows.stages]
        labels = first_drafters(
            drafted,
            [(Draft.of(tree), partial(sources.drafted_by, request, place)) for place, tree in proposals if len(tree)],
        )
        request.trace.begin(drafted, nodes, [label or label_of(request.line.sources[0]) for label in labels])
