"""The default length policy: all rows' draft nodes bid for places in the forward."""

from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ..tree import DraftTree
from .acceptance import Calibrator
from .cost import CostModel, DraftCost, DraftTimer, StepSeconds
from .estimators import AcceptanceEstimator
from .forest import Forest
from .levels import levels_against_rivals
from .running import Drift, Running, Speedup
from .selector import LengthPolicy, StepRows

_PROBE_SHARE = 0.01  # of the time, for drafts that are not expected to pay
_BASELINE_INTERVAL = 200  # speculating steps after which one does without: what it costs must stay known
_HALF_LIFE = 1000.0  # of an observed node, in nodes
_STRENGTH = 30.0  # of a draft's own probability, in observations: calibrated sources are hardly disturbed
_TRIAL_STEPS = 8  # drafts before the first judgement on whether drafting pays
_WIDTHS = (1, 2, 3, 4, 6, 8, 16, 32, 64, 128)  # bounds on the nodes of one row
_NARROW = 4  # up to here every bound is tried
_DEEPEST = 32  # levels of an autoregressive draft that are considered
_USUAL = 4  # nodes of a row, for what a further one costs
_LITTLE = 0.3  # tokens that a draft may promise at most where a second source is tried in its place
_EPSILON = 1e-9  # by which a child's bid is less than its parent's at equal probability


_Winners = tuple[np.ndarray, float, float]  # indices of nodes, with the step's expected tokens and seconds


class Prediction(NamedTuple):
    """What the policy expects of the step that it has selected for."""

    tokens: float  # over all rows, accepted nodes and one more each
    seconds: float  # of the forward and what surrounds it, without drafting
    draft_seconds: float


@dataclass
class _Plan:
    """
    What happened in the current step so far.

    Args:
        rows (`StepRows`, *optional*): The step's.
        plain_seconds, prefill_seconds (`float`): T without drafts and prompts, and what the prompts add to it.
        asked (`np.ndarray` of shape `[rows]`, bool, *optional*): Which rows the source was asked for.
        plain_tokens (`float`): What the step's time would have yielded plainly.
        has_saved (`bool`): Whether the step's share of time for probes has been put aside.
        drafter_levels (`np.ndarray` of shape `[rows]`, int, *optional*): What the second source was asked for.
    """

    rows: StepRows | None = None
    plain_seconds: float = 0.0
    prefill_seconds: float = 0.0
    asked: np.ndarray | None = None
    draft_seconds: float = 0.0
    is_baseline: bool = False
    plain_tokens: float = 0.0
    has_saved: bool = False
    drafter_levels: np.ndarray | None = None
    forest: Forest | None = None


class GoodputAuction(LengthPolicy):
    """
    One auction per step (design, section 3.2): the nodes of all rows are sorted by path probability a_n, and the best
    prefix is verified. Since a_n never grows along a path, every prefix is a forest; since T depends on totals, the
    best prefix is the best of all forests. T also depends a little on the widest row: there is one auction for each
    bound on the width, and the best of their winners wins.

    The best is what leaves most tokens, B + sum of a_n, when its time is paid for: at the goodput of plain decoding in
    this step, times what speculation has gained over it lately. With one price at all steps, goodput over all of them
    is highest (Dinkelbach's theorem on ratios); the highest goodput of every single step would draft too little where
    drafts are good, and too much where they are poor. Prompts in the forward are not for speculation to pay.

    Path probabilities are products of the drafts' own probabilities, corrected by a `Calibrator` and, where acceptance
    changes, by how its predictions have fared lately.

    Drafting is chosen too. An autoregressive drafter, which costs by the level, gets each row's depth beforehand, by
    the same auction over expected acceptance (SmartSpec, algorithm 2 with Eq. 5). Any other source is asked for all
    that it may propose, unless its call costs more than it brings. Rows and sources that do not pay are tried again
    within 1 % of the time.

    Args:
        cost (`CostModel`): Of the target's forward. It is corrected by what steps really took.
        margin (`float`): Speculation must promise at least this much more goodput than plain decoding.
        calibrates (`bool`): Whether drafts' probabilities are corrected.

    Attributes:
        prediction (`Prediction`): For the latest selection.
    """

    def __init__(self, cost: CostModel, margin: float = 0.01, calibrates: bool = True):
        if not np.isfinite(margin) or margin < 0:
            raise ValueError(f"`margin` must be a number of at least 0, got {margin!r}.")
        self.cost, self.margin = cost, margin
        self.calibrator = Calibrator(_HALF_LIFE, _STRENGTH) if calibrates else None
        self.acceptance, self.timer, self.drafter_timer = AcceptanceEstimator(), DraftTimer(), DraftTimer()
        self.prediction = Prediction(0.0, 0.0, 0.0)
        self._plan = _Plan()
        self._drifts: defaultdict[str, Drift] = defaultdict(Drift)  # by source
        self._speedup = Speedup()
        self._benefit = Running()
        self._probe_seconds = 0.0  # saved for the next probe
        self._num_since_baseline = 0

    # 1. Before drafting

    def max_nodes(self, rows: StepRows) -> np.ndarray:
        self._begin(rows)
        caps = np.maximum(rows.caps, 0)
        if not caps.any():
            return caps
        if self._num_since_baseline >= _BASELINE_INTERVAL:
            self._plan.is_baseline = True
            return np.zeros_like(caps)
        if rows.draft.is_autoregressive:
            levels = self._with_probes(rows, self._best_levels(rows))
            limits = np.minimum(levels * rows.draft.width, caps)
        else:
            levels = (caps > 0).astype(np.int64)
            limits = caps if self._pays(rows, levels) else np.zeros_like(caps)
        if limits.any():
            self._plan.asked, self._plan.draft_seconds = limits > 0, self._draft_seconds(rows, levels)
        return limits

    def _begin(self, rows: StepRows) -> None:
        plain = float(self.cost.seconds(*rows.without_prefill().forward_size()))
        prefill = float(self.cost.seconds(*rows.forward_size())) - plain if rows.num_prefill_tokens else 0.0
        self._plan = _Plan(rows, plain, prefill)

    def _best_levels(self, rows: StepRows) -> np.ndarray:
        """The depth of each row's draft that leaves most tokens, `[rows]` int64; all 0 if none pays."""
        width = rows.draft.width
        gains = self._gains(rows.request_ids, rows.caps, width)
        depths = np.arange(1, gains.shape[1] + 1)
        row, depth = np.divmod(np.argsort(-gains, axis=None, kind="stable"), len(depths))
        is_in = (depth < depths[:, None]) & (gains[row, depth] > 0)  # [depth of the deepest draft, nodes]
        num = np.cumsum(is_in, axis=1)
        tokens = len(rows) + np.cumsum(is_in * gains[row, depth], axis=1)
        per_call, per_row = self.timer.seconds(rows.draft)
        target = np.take_along_axis(self._seconds(rows, len(row) * width, depths * width), num * width, axis=1)
        profit = self._profit(rows, tokens, target + per_call * depths[:, None] + per_row * num)
        level, last = np.divmod(int(profit.argmax()), len(row))
        if profit[level, last] <= self._least_profit(rows):
            return np.zeros(len(rows), np.int64)
        chosen = is_in[level] & (np.arange(len(row)) <= last)
        return np.bincount(row[chosen], minlength=len(rows))

    def _gains(self, request_ids: Sequence[Hashable], caps: np.ndarray, width: int) -> np.ndarray:
        """How likely each level of an autoregressive draft comes true, `[rows, depths]` float64; 0 beyond the caps."""
        most = np.minimum(-(-caps // width), _DEEPEST)
        gains = np.cumprod(self.acceptance.of_requests(request_ids, int(most.max())), axis=1)
        gains[np.arange(gains.shape[1]) >= most[:, None]] = 0.0
        return gains

    def _with_probes(self, rows: StepRows, levels: np.ndarray) -> np.ndarray:
        """Rows without a draft get one level now and then: what is drafted teaches, verified or not."""
        idle = (levels == 0) & (rows.caps > 0)
        if not idle.any():
            return levels
        probed = np.where(idle, 1, levels)
        price = self._draft_seconds(rows, probed) - self._draft_seconds(rows, levels)
        return probed if self._affords(price) else levels

    def drafter_nodes(self, rows: StepRows, trees: Sequence[DraftTree]) -> np.ndarray:
        drafter = rows.drafter
        assert drafter is not None, "asked for where there is one only"
        if self._plan.is_baseline or not rows.caps.any():
            return np.zeros(len(rows), np.int64)
        num, plain = len(rows), self._plan.plain_seconds
        price = self._speedup.ratio * num / plain  # tokens per second
        per_call, per_row = self.drafter_timer.seconds(drafter)
        usual = self._seconds(rows, _USUAL * num, np.array([_USUAL]))[0, -1]
        node = price * max(float(usual) - plain, 0.0) / (_USUAL * num)  # what verifying one costs, in tokens
        forest = Forest(trees)
        bids = np.maximum(forest.along_paths(self._probs(rows, forest)) - node, 0.0)
        rivals = np.bincount(forest.row, bids, minlength=num)
        levels = levels_against_rivals(
            self._gains(rows.request_ids, np.minimum(rows.caps, drafter.num_nodes), drafter.width),
            rivals,
            node * drafter.width + price * per_row,
            price * per_call,
            self.margin * num,
        )
        idle = (levels == 0) & (rows.caps > 0) & (rivals < _LITTLE)
        lost = rivals[idle].sum() / price + per_row * np.count_nonzero(idle) + per_call * (not levels.any())
        if idle.any() and self._affords(lost):
            levels[idle] = 1
        calls, in_calls = drafter.calls(levels)
        self._plan.draft_seconds += per_call * calls + per_row * in_calls
        self._plan.drafter_levels = levels
        return np.minimum(levels * drafter.width, rows.caps)

    def _pays(self, rows: StepRows, levels: np.ndarray) -> bool:
        price = self._draft_seconds(rows, levels)
        return self._benefit.num < _TRIAL_STEPS or self._benefit.mean > price or self._affords(price)

    def _affords(self, price: float) -> bool:
        """Whether the time saved for probes has reached `price`, which it then pays."""
        if not self._plan.has_saved:
            self._probe_seconds += _PROBE_SHARE * self._plan.plain_seconds
            self._plan.has_saved = True
        if self._probe_seconds < price:
            return False
        self._probe_seconds = 0.0
        return True

    def _draft_seconds(self, rows: StepRows, levels: np.ndarray) -> float:
        per_call, per_row = self.timer.seconds(rows.draft)
        calls, in_calls = rows.draft.calls(levels)
        return per_call * calls + per_row * in_calls

    def _seconds(self, rows: StepRows, most: int, widths: np.ndarray) -> np.ndarray:
        """
        T with 0 to `most` draft nodes, of which at most so many in one row, `[widths, most + 1]` float64; without what
        the prompts in the step add, whatever is drafted.
        """
        num = np.arange(most + 1)
        width = 1 + np.minimum(num, widths[:, None])
        seconds = self.cost.seconds(*rows.forward_size(num, width))
        return seconds - self._plan.prefill_seconds

    # 2. After drafting

    def select(self, rows: StepRows, trees: Sequence[DraftTree]) -> list[DraftTree]:
        forest = Forest(trees)
        if (forest.sizes > rows.caps).any():
            forest = Forest([tree.most_likely(int(cap)) for tree, cap in zip(trees, rows.caps)])
        if self._plan.rows is not rows:
            self._begin(rows)
        plan, plain = self._plan, self._plan.plain_seconds
        plan.forest = forest
        gains = forest.along_paths(self._probs(rows, forest))
        chosen, tokens, seconds = np.zeros(0, np.int64), float(len(rows)), plain
        if forest.num_nodes and not plan.is_baseline:
            chosen, tokens, seconds = self._winners(rows, forest, gains, (chosen, tokens, seconds))
        self.prediction = Prediction(tokens, seconds + plan.prefill_seconds, plan.draft_seconds)
        plan.plain_tokens = len(rows) * (seconds + plan.draft_seconds) / plain if len(rows) else 0.0
        is_own = np.ones(len(chosen), bool) if rows.is_redrafted is None else ~rows.is_redrafted[forest.row[chosen]]
        added = (seconds - plain) * float(is_own.mean()) if len(chosen) else 0.0
        self._learn_benefit(rows, float(gains[chosen[is_own]].sum()), added)
        self._num_since_baseline = self._num_since_baseline + 1 if len(chosen) else 0
        mask = np.zeros(forest.num_nodes, bool)
        mask[chosen] = True
        return forest.keep(mask)

    def _winners(self, rows: StepRows, forest: Forest, gains: np.ndarray, best: _Winners) -> _Winners:
        """The nodes that leave most tokens; `best`, which speculates not at all, where none leave the margin more."""
        # Strictly less than the parent's, rounding or not; nodes that cannot come true stay out.
        bids = gains * (1 - _EPSILON * forest.depths)
        order = np.argsort(-bids)[: np.count_nonzero(bids > _EPSILON)]
        gains, ranks = gains[order], _ranks(forest.row[order])
        widths = _widths(int(ranks.max(initial=-1)) + 1, len(rows))
        best_profit, highest = self._least_profit(rows), -np.inf
        for width, seconds in zip(widths.tolist(), self._seconds(rows, len(order), widths)):
            is_in = ranks < width
            tokens = len(rows) + np.cumsum(gains[is_in])
            profit = self._profit(rows, tokens, seconds[1 : len(tokens) + 1])
            last = int(profit.argmax())
            if profit[last] > best_profit:
                best_profit = profit[last]
                best = order[is_in][: last + 1], float(tokens[last]), float(seconds[last + 1])
            if profit[last] < highest and width > _NARROW:
                break  # wider rows cost ever more
            highest = max(highest, float(profit[last]))
        return best

    def _profit(self, rows: StepRows, tokens: np.ndarray, seconds: np.ndarray) -> np.ndarray:
        """Tokens, less what their time would yield at other steps."""
        return tokens - self._speedup.ratio * len(rows) / self._plan.plain_seconds * seconds

    def _least_profit(self, rows: StepRows) -> float:
        """Of a step that speculates: that of plain decoding, and the margin."""
        return (1 - self._speedup.ratio + self.margin) * len(rows)

    def _probs(self, rows: StepRows, forest: Forest) -> np.ndarray:
        """Probabilities that each node comes true if its parent does, `[n]`."""
        if self.calibrator is None or not forest.num_nodes:
            return forest.probs
        probs = np.empty(forest.num_nodes)
        for source, nodes in rows.by_source(forest.row):
            lengths = forest.match_lengths[nodes]
            calibrated = self.calibrator.calibrate(source, forest.probs[nodes], forest.depths[nodes], lengths)
            probs[nodes] = calibrated * self._drifts[source].ratio
        return np.minimum(probs, 1.0)

    def _learn_benefit(self, rows: StepRows, gained: float, added: float) -> None:
        """Seconds that the first source's drafts save: what its tokens take elsewhere, less what verifying adds."""
        if self._plan.asked is not None:
            per_token = self._plan.plain_seconds / max(len(rows), 1) / self._speedup.ratio
            self._benefit.add(gained * per_token - added)

    # 3. After verification

    def observe(
        self,
        rows: StepRows,
        proposed: Sequence[DraftTree],
        verified: Sequence[DraftTree],
        accepted: Sequence[int],
        seconds: StepSeconds,
        tokens: Sequence[np.ndarray] | None = None,
    ) -> None:
        sizes = [len(tree) for tree in verified]
        context, batched, width = rows.forward_size(sum(sizes), 1 + max(sizes, default=0))
        if batched:
            self.cost.observe(context, batched, seconds.forward + seconds.other, width)
        if len(rows) and not self._plan.is_baseline:
            self._speedup.add(len(rows) + sum(accepted), self._plan.plain_tokens)
        forest = self._forest_of(proposed)
        levels = np.zeros(len(rows), np.int64)
        if rows.draft.is_autoregressive:
            np.maximum.at(levels, forest.row, forest.depths)
        elif self._plan.asked is not None and len(self._plan.asked) == len(rows):
            levels[self._plan.asked] = 1
        self.timer.observe(*rows.draft.calls(levels), seconds.draft)
        if rows.drafter is not None and rows.is_redrafted is not None:
            self._learn_drafter(rows, rows.drafter, rows.is_redrafted, forest, seconds.drafter)
        if not forest.num_nodes:
            return
        if tokens is None:
            forest, tokens = Forest(verified), [_known(tree, num) for tree, num in zip(verified, accepted)]
        self._learn_outcomes(rows, forest, tokens)

    def _learn_drafter(
        self, rows: StepRows, drafter: DraftCost, is_redrafted: np.ndarray, forest: Forest, seconds: float
    ) -> None:
        """What it took, and that nothing came where it has none to propose."""
        levels = np.zeros(len(rows), np.int64)
        np.maximum.at(levels, forest.row, forest.depths)
        levels[~is_redrafted] = 0
        asked = self._plan.drafter_levels
        if asked is not None and asked.any() and not levels.any():
            levels = asked
            tried = (asked > 0)[:, None]
            self.acceptance.update(rows.request_ids, tried, np.zeros_like(tried))
        self.drafter_timer.observe(*drafter.calls(levels), seconds)

    def _forest_of(self, trees: Sequence[DraftTree]) -> Forest:
        """The forest that `select` has made of these trees, or a new one."""
        known = self._plan.forest
        if known is not None and len(known.trees) == len(trees) and all(map(_is, known.trees, trees)):
            return known
        return Forest(trees)

    def _learn_outcomes(self, rows: StepRows, forest: Forest, tokens: Sequence[np.ndarray]) -> None:
        nodes, hits = forest.outcomes(tokens)
        row, depth = forest.row[nodes], forest.depths[nodes]
        if self.calibrator is not None and len(nodes):
            probs, lengths = forest.probs[nodes], forest.match_lengths[nodes]
            for source, part in rows.by_source(row):
                expected = self.calibrator.calibrate(source, probs[part], depth[part], lengths[part]).sum()
                self._drifts[source].add(expected, hits[part].sum())
                self.calibrator.update(source, probs[part], depth[part], lengths[part], hits[part])
        tried = np.zeros((len(rows), int(depth.max(initial=1))), bool)
        tried[row, depth - 1] = True if rows.is_redrafted is None else rows.is_redrafted[row]
        succeeded = np.zeros_like(tried)
        succeeded[row[hits], depth[hits] - 1] = True
        succeeded &= tried
        self.acceptance.update(rows.request_ids, tried, succeeded)

    def forget(self, request_id: Hashable) -> None:
        self.acceptance.forget(request_id)


def _ranks(row: np.ndarray) -> np.ndarray:
    """How many earlier entries hold the same row, `[n]` int64."""
    by_row = np.argsort(row.astype(np.uint16), kind="stable")  # 16 bits: sorted by radix
    counts = np.bincount(row)
    ranks = np.empty(len(row), np.int64)
    ranks[by_row] = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
    return ranks


def _widths(most: int, num_rows: int) -> np.ndarray:
    """Bounds on the nodes of one row that are worth a look. Where there is one row only, none is needed."""
    few = [width for width in _WIDTHS if width < most] if num_rows > 1 else []
    return np.array([*few, most] if most else [], np.int64)


def _is(tree: DraftTree, other: DraftTree) -> bool:
    return tree is other


def _known(tree: DraftTree, num_accepted: int) -> np.ndarray:
    """What a verified chain and the number of accepted nodes tell of the continuation; of other trees, nothing."""
    if not tree.is_chain:
        return np.zeros(0, np.int64)
    return np.append(tree.tokens[:num_accepted], -1)[: len(tree)]
