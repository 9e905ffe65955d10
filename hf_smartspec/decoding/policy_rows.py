"""A step's rows and sources, and an engine's queue, as the length policy gets them."""

import math
from collections.abc import Mapping, Sequence

import numpy as np

from ..goodput.draft_cost import DraftCost
from ..goodput.estimates.decayed import DecayedMean
from ..goodput.policy import LengthPolicy, StepRows
from ..goodput.stage import Stage
from .call import Request, padded_context

_FAR = 2**31  # tokens left of a row without a bound
_LONGEST = 1.5  # largest ratio of the times of a step with and without drafts, if several namespaces share it


def policy_rows(
    rows: Sequence[Request],
    feeds: Mapping[Request, np.ndarray],
    num_waiting: int,
    policy: LengthPolicy,
    lengths: Mapping[str, DecayedMean],
) -> StepRows:
    """
    Return what the policy decides a step by.

    Args:
        rows (sequence of `Request`): Rows that get a draft.
        feeds (mapping of `Request` to `np.ndarray`): The tokens that each row of the step is fed.
        lengths (mapping of `str` to `DecayedMean`): Accepted lengths by source, for sources after the first one.
    """
    sizes = list(map(len, feeds.values()))
    prompts = [(num, request.cache_row.length) for request, num in zip(feeds, sizes) if num > 1]
    caps = np.array([most_nodes(request) for request in rows], np.int64)
    left = [request.num_remaining for request in rows]
    num_left = np.array([_FAR if number is None else number for number in left], np.int64)
    is_one_call = len(rows) > 1 and all([request.call is rows[0].call for request in rows])
    step = StepRows(
        request_ids=[request.request_id for request in rows],
        context_lens=np.array([request.cache_row.length for request in rows], np.int64),
        caps=caps,
        num_prefill_tokens=sum(sizes) - len(rows),
        prefill_context=sum(num + cached for num, cached in prompts),
        prefill_pairs=sum(num * (num + cached) for num, cached in prompts),
        num_waiting=num_waiting,
        padded_context=padded_context([request for request in rows if len(feeds[request]) == 1] if prompts else rows),
        num_remaining=num_left if is_one_call and None not in left else None,
        num_left=num_left,
    )
    if len({request.call.namespace for request in feeds}) > 1:
        step.caps = _shared_caps(policy, step)
    step.stages = _stages(rows, step.caps, feeds, lengths) or step.stages
    return step


def most_running(
    policy: LengthPolicy, running: Sequence[Request], waiting: Sequence[Request], num_fitting: int
) -> float:
    """
    Return how many requests of an engine may run in the next step, by a policy that chooses batches (SmartSpec,
    algorithm 2): all for which there is room (infinity), or fewer.

    Args:
        waiting (sequence of `Request`): The requests that may begin, in the order of arrival.
        num_fitting (`int`): How many of these have room in memory, which includes room for drafts.
    """
    if not num_fitting:
        return math.inf
    queue, most = [*running, *waiting], len(running) + num_fitting
    lengths = np.array([request.length for request in queue], np.int64)
    caps = np.array([request.call.max_nodes for request in queue], np.int64)
    costs = [request.chain.costs[0] for request in queue]
    stages = [Stage(cost, np.where([own == cost for own in costs], caps, 0)) for cost in dict.fromkeys(costs)]
    rows = StepRows(
        [request.request_id for request in queue], lengths, caps, num_waiting=len(waiting), stages=stages,
        padded_context=int(lengths.sum()),
    )  # fmt: skip
    chosen = policy.num_to_run(rows, len(running), lambda number, _: number <= most)
    return math.inf if chosen >= most else max(chosen, len(running), 1)


def _shared_caps(policy: LengthPolicy, step: StepRows) -> np.ndarray:
    """
    Return the caps of rows in a step that several namespaces share, `[rows]` int64, with which drafts of
    one namespace make the step at most `_LONGEST` times as long for the others. Policies without a cost model set
    lengths of their own, which no namespace can raise.
    """
    cost = getattr(policy, "cost", None)
    if cost is None or not step.caps.any():
        return step.caps
    num = np.arange(1, step.caps.max() + 1)  # nodes per row
    seconds = cost.seconds(*step.forward_size(num * len(step), 1 + num))
    most = np.count_nonzero(seconds <= _LONGEST * cost.seconds(*step.forward_size()))
    return np.minimum(step.caps, max(int(most), 1))


def _stages(
    rows: Sequence[Request],
    caps: np.ndarray,
    feeds: Mapping[Request, np.ndarray],
    lengths: Mapping[str, DecayedMean],
) -> list[Stage]:
    """Return a stage for each position and cost of sources, with its rows, in the order of positions."""
    costs = rows[0].chain.costs if rows else ()
    if all([request.chain.costs is costs and not request.dropped for request in rows]):
        return [
            _stage(cost, _own_caps(cost, rows, caps, feeds), position, rows[0], lengths)
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
        stages.append(_stage(cost, own, position, rows[members[0]], lengths))
    return stages


def _stage(
    cost: DraftCost, caps: np.ndarray, position: int, request: Request, lengths: Mapping[str, DecayedMean]
) -> Stage:
    """Return a stage; where it is not the first one, with what the request's source sets for its hybrid."""
    if not position:
        return Stage(cost, caps)
    source = request.call.source
    given, replaces = getattr(source, "threshold", None), getattr(source, "replaces", False)
    return Stage(cost, caps, position, lengths[cost.source].mean if given is None else given, replaces)


def _own_caps(
    cost: DraftCost, rows: Sequence[Request], caps: np.ndarray, feeds: Mapping[Request, np.ndarray]
) -> np.ndarray:
    """Return a stage's caps, `[rows]`; 0 during prefill for sources that need the target's hidden states or cache."""
    if not cost.follows_target or all([request.tokens for request in rows]):
        return caps
    return np.where([_is_prefilling(request, feeds[request]) for request in rows], 0, caps)


def _is_prefilling(request: Request, feed: np.ndarray) -> bool:
    """Return whether the row is still in prefill, so that the target has no states of its earlier tokens."""
    return not request.tokens and (len(feed) > 1 or not request.cache_row.length)


def most_nodes(request: Request) -> int:
    """Return the largest number of nodes of a row's draft in the next step."""
    # The last token needs no draft: every step yields the target's own pick.
    if not request.is_drafting:
        return 0
    left = request.num_remaining
    return request.call.cap(left) if left != 1 else 0
