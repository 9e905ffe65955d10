"""SmartSpec's policies as published (Liu et al., 2024), for comparison with the auction."""

from abc import abstractmethod
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from ...drafts.tree import DraftTree
from ..cost import CostModel
from ..draft_cost import DraftTimer
from ..estimates.acceptance import AcceptanceEstimator
from ..policy import StepOutcome, StepRows
from ..stage import Stage
from .length import expected_length, expected_tree_length, tree_size
from .policies import ShapedDrafts

_MOST_TREES = 4096  # that `TreeGoodput` chooses from


class StepPlan(NamedTuple):
    """Result of SmartSpec's algorithm 2."""

    num_requests: int  # requests that run: the first ones of the queue
    num_nodes: int  # nodes that are drafted and verified for each of them, at most
    goodput: float  # expected tokens per second


class SmartSpecPolicy(ShapedDrafts):
    """
    Base of the policies that set lengths by acceptance rates (algorithms 1 and 2): a cost model that measured steps
    correct, and moving averages of acceptance.
    """

    chooses_batches = True

    def __init__(self, cost: CostModel, draft: CostModel | None = None):
        self.cost, self.draft = cost, draft
        self.acceptance = AcceptanceEstimator()
        self.timers: defaultdict[str, DraftTimer] = defaultdict(DraftTimer)  # by name of the source

    @abstractmethod
    def best(self, rows: StepRows) -> tuple[Sequence[tuple[int, ...]], float]:
        """Return the shapes of the rows' drafts that maximise goodput, and the goodput, in tokens per second."""

    def shapes(self, rows: StepRows) -> Sequence[tuple[int, ...]]:
        return self.best(rows)[0] if len(rows) else []

    def num_to_run(self, queue: StepRows, least: int, has_slots: Callable[[int, int], bool]) -> int:
        return self.plan(queue, least, has_slots).num_requests

    def plan(self, rows: StepRows, least: int = 1, has_slots: Callable[[int, int], bool] | None = None) -> StepPlan:
        """
        Return the batch and length of the highest goodput (algorithm 2). Candidate batches are the prefixes of the
        queue, each with its best length.

        Args:
            rows (`StepRows`): The whole queue, in order.
            least (`int`): Number of rows that run in any case.
            has_slots (`Callable`, *optional*): Returns whether the KV cache has room for a number of requests with
                drafts of a number of nodes; candidates without room are left out.

        Returns:
            `StepPlan`, of no requests if none has room.
        """
        best = StepPlan(0, 0, -1.0)
        for num_requests in range(max(least, 1), len(rows) + 1):
            shapes, goodput = self.best(rows.first(num_requests))
            num_nodes = max(map(tree_size, set(shapes)))
            if (has_slots is None or has_slots(num_requests, num_nodes)) and goodput > best.goodput:
                best = StepPlan(num_requests, num_nodes, goodput)
        return best

    def _draft_seconds(
        self, rows: StepRows, forwards: Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]
    ) -> np.ndarray | float:
        """
        Return T_draft (Eq. 5): the time of the draft model's forwards, one for each level, or for other sources, of one
        call. Rows may have sources of their own, which draft one after the other.

        Args:
            forwards (`Callable`): Returns the tokens that each level's forward runs (N_batched), and those that it
                reads (N_context), for the rows of a mask: `np.ndarray` of shape `[..., levels]` each.

        Returns:
            `np.ndarray` of shape `[...]`: By the draft model's profile if there is one, else by earlier drafts.
        """
        seconds: np.ndarray | float = 0.0
        for stage in _first_sources(rows):
            runs, context = forwards(stage.caps[: len(rows)] > 0)
            if self.draft is not None and stage.cost.is_autoregressive:
                seconds = seconds + np.where(runs > 0, self.draft.seconds(context, runs), 0.0).sum(axis=-1)
                continue
            per_call, per_row = self.timers[stage.name].seconds(stage.cost)
            if not stage.cost.is_autoregressive:
                runs = runs[..., :1]
            seconds = seconds + per_call * (runs > 0).sum(axis=-1) + per_row * runs.sum(axis=-1)
        return seconds

    def observe(self, outcome: StepOutcome) -> None:
        context, size, width = outcome.forward_size
        if size:
            self.cost.observe(context, size, outcome.seconds.forward + outcome.seconds.other, width)
        for stage in _first_sources(outcome.rows):
            self._learn_draft_time(outcome.rows, stage)
        self.acceptance.update(outcome.rows.request_ids, *self._judged(outcome))

    def _learn_draft_time(self, rows: StepRows, stage: Stage) -> None:
        asked, timer = stage.asked > 0, self.timers[stage.name]
        if not (stage.cost.is_autoregressive and asked.any()):
            timer.observe(float(asked.any()), float(asked.sum()), stage.seconds)
            return
        # The first forward runs a token of each row, and each further one the nodes of the level above.
        most = max(int(tree.depths.max(initial=1)) for tree in stage.proposed)
        levels = np.arange(most)
        runs = np.zeros((len(asked), most), np.int64)
        for row, tree in enumerate(stage.proposed):
            inner = tree.depths[tree.depths < tree.depths.max(initial=0)]
            runs[row] = np.bincount(inner, minlength=most)[:most]
        runs[asked, 0] = 1
        timer.observe(most, int(runs.sum()), stage.seconds)
        if self.draft is None:
            return
        context = (runs * (rows.context_lens[:, None] + levels)).sum(axis=0)
        expected = self.draft.seconds(context, runs.sum(axis=0))
        for level, seconds in enumerate(expected * (stage.seconds / expected.sum())):
            self.draft.observe(int(context[level]), int(runs[:, level].sum()), float(seconds), 1)

    def _judged(self, outcome: StepOutcome) -> tuple[np.ndarray, np.ndarray]:
        """Return the tokens of each row that were judged at each depth, and those accepted: `[rows, depths]`."""
        accepted = np.asarray(outcome.accepted, np.int64)
        depths = np.array([tree.depths.max(initial=0) for tree in outcome.verified], np.int64)
        levels = np.arange(1, int(depths.max(initial=0)) + 1)
        return levels <= np.minimum(accepted + 1, depths)[:, None], levels <= accepted[:, None]

    def forget(self, request_id: Hashable) -> None:
        self.acceptance.forget(request_id)


class _Chains(SmartSpecPolicy):
    """Base of the policies whose drafts are chains of up to V tokens (`max_length`)."""

    def __init__(self, cost: CostModel, max_length: int = 8, draft: CostModel | None = None):
        super().__init__(cost, draft)
        self.max_length = _checked("max_length", max_length)

    def most_nodes(self, usual: int, most: int) -> int:
        return self.max_length


class StepGoodput(_Chains):
    """
    SmartSpec with the global acceptance rate (algorithms 1 and 2): one length for all rows of a step, which maximises
    goodput. Drafts are chains, and lengths are their depths.

    Args:
        cost (`CostModel`): Cost of the target's forward.
        max_length (`int`): V, the longest draft considered, in tokens.
        draft (`CostModel`, *optional*): Cost of the draft model's forward (Eq. 5). Without it, seconds per level and
            row are learnt from earlier drafts, whatever their context.
    """

    def best(self, rows: StepRows) -> tuple[Sequence[tuple[int, ...]], float]:
        """Return the length of the highest goodput (algorithm 1, whose line 4 is printed with n twice)."""
        lengths = np.arange(min(self.max_length, int(np.max(rows.caps))) + 1)
        levels = np.arange(lengths[-1])
        tokens = len(rows) * expected_length(self.acceptance.rate, lengths)
        seconds = self.cost.seconds(*rows.forward_size(len(rows) * lengths, 1 + lengths))
        is_run = levels < lengths[:, None]

        def forwards(own: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            num = np.count_nonzero(own)
            return num * is_run, (np.dot(own, rows.context_lens) + num * levels) * is_run

        goodput = tokens / (seconds + self._draft_seconds(rows, forwards))
        length = int(goodput.argmax())
        return [(1,) * length] * len(rows), float(goodput[length])


class RequestGoodput(_Chains):
    """
    SmartSpec with every request's own acceptance rate (section 4.4, Eq. 9): lengths k_1 ... k_n that maximise goodput.
    Drafts are chains. Position j of request i is worth alpha_i^j: the best lengths are a prefix of all positions sorted
    by worth.

    Args:
        cost (`CostModel`): Cost of the target's forward.
        max_length (`int`): V, the longest draft considered, in tokens.
        draft (`CostModel`, *optional*): Cost of the draft model's forward (Eq. 5). Without it, seconds per level and
            row are learnt from earlier drafts, whatever their context.
    """

    def best(self, rows: StepRows) -> tuple[Sequence[tuple[int, ...]], float]:
        positions = np.arange(1, self.max_length + 1)
        worth = self.acceptance.rates(rows.request_ids)[:, None] ** positions
        worth[positions > rows.caps[:, None]] = 0.0
        row, depth, tokens = _by_worth(worth)
        is_level = depth[:, None] == np.arange(self.max_length)
        context = np.reshape(rows.context_lens, -1)[row] + depth

        def forwards(own: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            is_run = np.append(np.zeros((1, self.max_length), np.int64), is_level & own[row, None], axis=0)
            return np.cumsum(is_run, axis=0), np.cumsum(is_run * np.append(0, context)[:, None], axis=0)

        goodput = tokens / (_target_seconds(self.cost, rows, depth) + self._draft_seconds(rows, forwards))
        num = int(goodput.argmax())
        lengths = np.bincount(row[:num], minlength=len(rows))
        return [(1,) * length for length in lengths.tolist()], float(goodput[num])


class TreeGoodput(SmartSpecPolicy):
    """
    SmartSpec for trees (algorithm 1, lines 6 to 9): head i proposes its k_i likeliest tokens after every token of the
    head before, the same for all rows of a step, and k_1 ... k_h maximise goodput. For Medusa's heads, EAGLE's, and
    draft models that can be packed.

    Args:
        cost (`CostModel`): Cost of the target's forward.
        num_heads (`int`): h, the depth of the deepest tree considered.
        max_width (`int`): The largest k_i considered.
        draft (`CostModel`, *optional*): Cost of the drafter's forward, if every level is one (Eq. 5). Without it,
            seconds per level and token are learnt from earlier drafts.
    """

    def __init__(self, cost: CostModel, num_heads: int = 3, max_width: int = 3, draft: CostModel | None = None):
        super().__init__(cost, draft)
        self.num_heads, widths = _checked("num_heads", num_heads), range(1, _checked("max_width", max_width) + 1)
        if max_width**num_heads > _MOST_TREES:
            raise ValueError(
                f"`max_width` {max_width} and `num_heads` {num_heads} make over {_MOST_TREES} trees to choose from: "
                "lower one of them."
            )
        self._trees = [tree for depth in range(num_heads + 1) for tree in product(widths, repeat=depth)]
        self._widths = np.array([tree + (0,) * (num_heads - len(tree)) for tree in self._trees], np.int64)
        self._levels = np.cumprod(self._widths, axis=1)  # nodes at each depth

    def best(self, rows: StepRows) -> tuple[Sequence[tuple[int, ...]], float]:
        sizes = self._levels.sum(axis=1)
        # A row with less room gets a part of the tree, from which one token is expected.
        num_whole = (sizes[:, None] <= rows.caps).sum(axis=1)
        gain = expected_tree_length(self.acceptance.by_depth(self.num_heads), self._widths) - 1
        tokens = len(rows) + num_whole * gain
        batched = np.minimum(sizes[:, None], rows.caps).sum(axis=1)
        seconds = self.cost.seconds(*rows.forward_size(batched, 1 + sizes))
        # Each level runs the nodes of the level above, of which the first are the rows' last tokens.
        runs = np.append(np.ones((len(sizes), 1), np.int64), self._levels[:, :-1], axis=1) * (self._levels > 0)

        def forwards(own: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            num = np.count_nonzero(own)
            return num * runs, runs * (np.dot(own, rows.context_lens) + num * np.arange(self.num_heads))

        goodput = tokens / (seconds + self._draft_seconds(rows, forwards))
        number = int(goodput.argmax())
        return [self._trees[number]] * len(rows), float(goodput[number])

    def most_nodes(self, usual: int, most: int) -> int:
        return int(self._levels.sum(axis=1).max())

    def _judged(self, outcome: StepOutcome) -> tuple[np.ndarray, np.ndarray]:
        """
        Return the tokens tried at each depth, and those accepted, `[rows, depths]`. Siblings are tried in turn, the
        likeliest first, up to the accepted one: so the rate is that of Eq. 10, by which each is right independently.
        """
        tried, accepted = np.zeros((2, len(outcome.verified), self.num_heads), np.int64)
        for row, (tree, tokens) in enumerate(zip(outcome.verified, outcome.tokens or [])):
            node = -1
            for depth, token in enumerate(tokens[: self.num_heads].tolist()):
                children = np.flatnonzero(tree.parents == node)
                children = children[np.argsort(-tree.probs[children], kind="stable")]
                hits = np.flatnonzero(tree.tokens[children] == token)
                tried[row, depth] = hits[0] + 1 if len(hits) else len(children)
                if not len(hits):
                    break
                accepted[row, depth], node = 1, int(children[hits[0]])
        return tried, accepted


class ConfidenceGoodput(ShapedDrafts):
    """
    SmartSpec by confidence (appendix, algorithm 3): every request's draft, a chain, grows on after a token whose
    confidence, the probability that the drafter gives it, exceeds T. Of these drafts, the parts that maximise goodput
    are verified, in which the confidences are the probabilities of acceptance.

    The first token of each draft is always proposed. Line 7 as printed proposes P + 1 tokens; here, P is the most.

    Args:
        cost (`CostModel`): Cost of the target's forward.
        threshold (`float`): T, from 0 up to below 1. The paper gives no number.
        max_length (`int`): P, the longest draft, in tokens.
    """

    def __init__(self, cost: CostModel, threshold: float = 0.5, max_length: int = 8):
        if not 0 <= threshold < 1:
            raise ValueError(f"`threshold` must be at least 0 and below 1, got {threshold!r}.")
        self.cost, self.confidence, self.max_length = cost, threshold, _checked("max_length", max_length)

    def shapes(self, rows: StepRows) -> Sequence[tuple[int, ...]]:
        return [(1,) * self.max_length] * len(rows)

    def most_nodes(self, usual: int, most: int) -> int:
        return self.max_length

    def select(self, rows: StepRows, trees: Sequence[DraftTree]) -> list[DraftTree]:
        chains = super().select(rows, trees)
        worth = np.zeros((len(rows), self.max_length))
        for line, chain in zip(worth, chains):
            line[: len(chain)] = chain.path_probs
        row, depth, tokens = _by_worth(worth)
        drafting = sum(stage.seconds for stage in rows.stages)
        goodput = tokens / (_target_seconds(self.cost, rows, depth) + drafting)
        lengths = np.bincount(row[: int(goodput.argmax())], minlength=len(rows))
        return [chain.within((1,) * length) for chain, length in zip(chains, lengths.tolist())]

    def observe(self, outcome: StepOutcome) -> None:
        context, size, width = outcome.forward_size
        if size:
            self.cost.observe(context, size, outcome.seconds.forward + outcome.seconds.other, width)


def _first_sources(rows: StepRows) -> list[Stage]:
    """Return the stages that draft first, each for rows of its own."""
    return [stage for stage in rows.stages if not stage.position]


def _by_worth(worth: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """
    Return the rows and depths of all positions, the most valuable first, `[n]` int64 each, and the tokens of a step
    that verifies the first 0, 1, ..., n of them.
    """
    order = np.argsort(-worth, axis=None, kind="stable")  # of equals, the shallower first
    row, depth = np.divmod(order, max(worth.shape[1], 1))
    return row, depth, len(worth) + np.append(0.0, np.cumsum(worth.ravel()[order]))


def _target_seconds(cost: CostModel, rows: StepRows, depth: np.ndarray) -> Any:
    """Return T_target of steps that verify the first 0, 1, ..., n of these positions, `[n + 1]`."""
    width = 1 + np.append(0, np.maximum.accumulate(depth + 1))
    return cost.seconds(*rows.forward_size(np.arange(len(width)), width))


def _checked(name: str, value: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 0:
        raise ValueError(f"`{name}` must be an integer of at least 0, got {value!r}.")
    return int(value)
