"""The default length policy: all rows' draft nodes bid for places in the forward."""

from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from ..drafts.forest import Forest, ranks_in_rows
from ..drafts.price import LevelPrice
from ..drafts.tree import DraftTree
from .cost import CostModel, DraftCost, DraftTimer, StepSeconds
from .drafter_gain import DrafterGain, Newcomers
from .estimators import AcceptanceEstimator
from .plan import Plan, is_again, known_continuation
from .policy import LengthPolicy, StepRows
from .running import Running, Speedup
from .trust import Trust

_PROBE_SHARE = 0.01  # of the time, for drafts that are not expected to pay
_BASELINE_INTERVAL = 200  # speculating steps after which one does without: what it costs must stay known
_TRIAL_STEPS = 8  # drafts before the first judgement on whether drafting pays
_WIDTHS = (1, 2, 3, 4, 6, 8, 16, 32, 64, 128)  # bounds on the nodes of one row
_NARROW = 4  # up to here every bound is tried
_DEEPEST = 32  # levels of an autoregressive draft that are considered
_USUAL = 4  # nodes of a row, for what a further one costs
_MANY = np.array([8, 16, 32, 64])  # likewise, where it may be cheaper the more there are
_LITTLE = 0.3  # tokens that a draft may promise at most where a second source is tried beside it
_LEAST_RATE = 0.1  # of levels that come true
_EPSILON = 1e-9  # by which a child's bid is less than its parent's at equal probability


_Winners = tuple[np.ndarray, float, float]  # indices of nodes, with the step's expected tokens and seconds


class Prediction(NamedTuple):
    """What the policy expects of the step that it has selected for."""

    tokens: float  # over all rows, accepted nodes and one more each
    seconds: float  # of the forward and what surrounds it, without drafting
    draft_seconds: float


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

    Path probabilities are products of the drafts' own probabilities, corrected by what came true of them (`Trust`).

    Drafting is chosen too. An autoregressive drafter, which costs by the level, gets each row's depth beforehand, by
    the same auction over expected acceptance (SmartSpec, algorithm 2 with Eq. 5); one that heeds prices (`level_price`)
    is told what a further level must be worth, and ends drafts by its own confidence in them (algorithm 3, whose
    threshold is then where drafting breaks even). A second, costlier source is asked where it gains more tokens than it
    costs (`DrafterGain`). Any other source is asked for all that it may propose, unless its call costs more than it
    brings; if it heeds prices, for all whose paths are worth verifying: the less nodes cost, the more of them. Rows and
    sources that do not pay are tried again within 1 % of the time.

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
        self.trust = Trust() if calibrates else None
        self.acceptance = AcceptanceEstimator()
        self.timers: defaultdict[DraftCost, DraftTimer] = defaultdict(DraftTimer)
        self.prediction = Prediction(0.0, 0.0, 0.0)
        self._plan = Plan()
        self._drafter_gain, self._newcomers = DrafterGain(), Newcomers()
        self.speedup = Speedup()
        self._benefits: defaultdict[DraftCost, Running] = defaultdict(Running)
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
        limits = np.zeros_like(caps)
        for part in rows.by_draft():
            limits += self._limits(part, np.maximum(part.caps, 0))
        self._plan.asked = limits > 0
        return limits

    def _limits(self, rows: StepRows, caps: np.ndarray) -> np.ndarray:
        """`max_nodes` of rows whose sources are of one kind."""
        if not caps.any():
            return caps
        if not rows.draft.is_autoregressive:
            return caps if self._pays(rows, caps > 0) else np.zeros_like(caps)
        best = self._best_levels(rows)
        levels = self._with_probes(rows, best)
        limits = np.minimum(levels * rows.draft.width, caps)
        # One that heeds prices sees better than averages do how deep the draft should be.
        return np.where(best > 0, caps, limits) if rows.draft.heeds_prices else limits

    def _begin(self, rows: StepRows) -> None:
        plain = float(self.cost.seconds(*rows.without_prefill().forward_size()))
        prefill = float(self.cost.seconds(*rows.forward_size())) - plain if rows.num_prefill_tokens else 0.0
        self._plan = Plan(rows, plain, prefill)

    def _best_levels(self, rows: StepRows) -> np.ndarray:
        """The depth of each row's draft that leaves most tokens, `[rows]` int64; all 0 if none pays."""
        width = rows.draft.width
        gains = self._gains(rows.request_ids, rows.caps, width)
        depths = np.arange(1, gains.shape[1] + 1)
        row, depth = np.divmod(np.argsort(-gains, axis=None, kind="stable"), len(depths))
        is_in = (depth < depths[:, None]) & (gains[row, depth] > 0)  # [depth of the deepest draft, nodes]
        num = np.cumsum(is_in, axis=1)
        tokens = len(rows) + np.cumsum(is_in * gains[row, depth], axis=1)
        per_call, per_row = self.timers[rows.draft].seconds(rows.draft)
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
        price = self._draft_seconds(rows.draft, probed) - self._draft_seconds(rows.draft, levels)
        return probed if self._affords(price) else levels

    def drafter_nodes(self, rows: StepRows, trees: Sequence[DraftTree]) -> np.ndarray:
        drafter, plan = rows.drafter, self._plan
        assert drafter is not None, "asked for where there is one only"
        caps = rows.caps if rows.has_drafter is None else np.where(rows.has_drafter, rows.caps, 0)
        if plan.is_baseline or not caps.any():
            return np.zeros(len(rows), np.int64)
        price, node = self._price(rows), self._node_price(rows)
        per_call, per_row = self.timers[drafter].seconds(drafter)
        forest = Forest(trees)
        bids = np.maximum(forest.along_paths(self._probs(rows, forest)) - node, 0.0)
        plan.first, plan.promises = forest, np.bincount(forest.row, bids, minlength=len(rows))
        gains, levels = self._drafter_gain.expected(rows.request_ids, plan.promises)
        left = np.where(caps > 0, gains - levels * (node + price * per_row), 0.0)
        asked = left > 0
        if left[asked].sum() - price * per_call * levels[asked].max(initial=0.0) <= self.margin * len(rows):
            asked[:] = False
        idle = ~asked & (caps > 0) & (plan.promises < _LITTLE)
        deeper = max(levels[idle].max(initial=0.0) - levels[asked].max(initial=0.0), 0.0)
        if idle.any() and self._affords(per_call * deeper + per_row * levels[idle].sum()):
            asked |= idle
        plan.asked_again = asked
        return np.where(asked, np.minimum(caps, drafter.num_nodes), 0)

    def level_price(self, draft: DraftCost) -> LevelPrice | None:
        rows = self._plan.rows
        if rows is None or not len(rows) or not draft.heeds_prices:
            return None
        trust = 1.0 if self.trust is None else self.trust.of_source(draft.source)
        if not draft.is_autoregressive:
            return LevelPrice(0.0, 0.0, self._least_node_price(rows), trust)
        price, (per_call, per_row) = self._price(rows), self.timers[draft].seconds(draft)
        node, rate = self._node_price(rows), max(self.acceptance.rate, _LEAST_RATE)
        # A level that is drafted has to be verified, and yet to come true.
        return LevelPrice(price * per_call / rate, (price * per_row + node) / rate, node, trust)

    def _price(self, rows: StepRows) -> float:
        """What a second yields in this step, in tokens: plain decoding's goodput, times what speculation gained."""
        return self.speedup.ratio * len(rows) / self._plan.plain_seconds

    def _node_price(self, rows: StepRows) -> float:
        """What verifying a node costs, in tokens, where rows have a few each."""
        num, plain = _USUAL * len(rows), self._plan.plain_seconds + self._plan.prefill_seconds
        seconds = float(self.cost.seconds(*rows.forward_size(num, 1 + _USUAL)))
        return self._price(rows) * max(seconds - plain, 0.0) / num

    def _least_node_price(self, rows: StepRows) -> float:
        """
        What verifying a node costs, in tokens, at the number of nodes where that is least. By the profile, corrected as
        a whole: corrections of single sizes may have sizes cost less than smaller ones.
        """
        num, (context, batched, width) = _MANY * len(rows), rows.forward_size()
        plain = self.cost.profiled(context, batched, width)
        more = self.cost.profiled(*rows.forward_size(num, 1 + _MANY)) - plain
        return self._price(rows) * float((more / num).min()) * self.cost.correction(batched)

    def _pays(self, rows: StepRows, levels: np.ndarray) -> bool:
        price, benefit = self._draft_seconds(rows.draft, levels), self._benefits[rows.draft]
        return benefit.num < _TRIAL_STEPS or benefit.mean > price or self._affords(price)

    def _affords(self, price: float) -> bool:
        """Whether the time saved for probes has reached `price`, which it then pays."""
        if not self._plan.has_saved:
            self._probe_seconds += _PROBE_SHARE * self._plan.plain_seconds
            self._plan.has_saved = True
        if self._probe_seconds < price:
            return False
        self._probe_seconds = 0.0
        return True

    def _draft_seconds(self, draft: DraftCost, levels: np.ndarray) -> float:
        per_call, per_row = self.timers[draft].seconds(draft)
        calls, in_calls = draft.calls(levels)
        return per_call * calls + per_row * in_calls

    def _drafted(self, rows: StepRows, forest: Forest) -> Iterator[tuple[DraftCost, np.ndarray, float]]:
        """By source: what it costs, the levels that it has drafted for each row (`[rows]` int), and what that took."""
        plan, parts = self._plan, rows.by_draft()
        for part in parts:
            levels = np.zeros(len(rows), np.int64)
            if part.draft.is_autoregressive:
                np.maximum.at(levels, forest.row, forest.depths)
            elif plan.asked is not None and len(plan.asked) == len(rows):
                levels[plan.asked] = 1
            yield part.draft, np.where(part.caps > 0, levels, 0), rows.draft_seconds.get(part.draft, 0.0)

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
        draft_seconds = sum(self._draft_seconds(draft, levels) for draft, levels, _ in self._drafted(rows, forest))
        if rows.drafter is not None:
            draft_seconds += self._draft_seconds(rows.drafter, self._levels_again(rows))
        self.prediction = Prediction(tokens, seconds + plan.prefill_seconds, draft_seconds)
        plan.plain_tokens = len(rows) * (seconds + draft_seconds) / plain if len(rows) else 0.0
        self._learn_benefits(rows, gains[chosen], forest.row[chosen], seconds - plain)
        self._num_since_baseline = self._num_since_baseline + 1 if len(chosen) else 0
        mask = np.zeros(forest.num_nodes, bool)
        mask[chosen] = True
        return forest.keep(mask)

    def _winners(self, rows: StepRows, forest: Forest, gains: np.ndarray, best: _Winners) -> _Winners:
        """The nodes that leave most tokens; `best`, which speculates not at all, where none leave the margin more."""
        # Strictly less than the parent's, rounding or not; nodes that cannot come true stay out.
        bids = gains * (1 - _EPSILON * forest.depths)
        order = np.argsort(-bids)[: np.count_nonzero(bids > _EPSILON)]
        gains, ranks = gains[order], ranks_in_rows(forest.row[order])
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
        return tokens - self._price(rows) * seconds

    def _least_profit(self, rows: StepRows) -> float:
        """Of a step that speculates: that of plain decoding, and the margin."""
        return (1 - self.speedup.ratio + self.margin) * len(rows)

    def _probs(self, rows: StepRows, forest: Forest) -> np.ndarray:
        """Probabilities that each node comes true if its parent does, `[n]`."""
        return forest.probs if self.trust is None else self.trust.probs(rows, forest)

    def _learn_benefits(self, rows: StepRows, gains: np.ndarray, row: np.ndarray, added: float) -> None:
        """
        Seconds that each source's drafts save: what their tokens take elsewhere, less what verifying adds. `gains` and
        `row` are of the verified nodes; those of rows that a second source has drafted for are left out.
        """
        asked = self._plan.asked
        if asked is None or not asked.any():
            return
        per_token = self._plan.plain_seconds / len(rows) / self.speedup.ratio
        is_first = ~is_again(rows)
        for part in rows.by_draft():
            is_asked = asked & (part.caps > 0)
            if is_asked.any():
                is_own = (is_first & is_asked)[row]
                share = is_own.mean() if len(row) else 0.0
                self._benefits[part.draft].add(float(gains[is_own].sum() * per_token - added * share))

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
            self.speedup.add(len(rows) + sum(accepted), self._plan.plain_tokens)
        forest = self._plan.forest_of(proposed)
        for draft, levels, spent in self._drafted(rows, forest):
            taken = spent if rows.draft_seconds else seconds.draft
            self._newcomers.time(self.timers[draft], draft, rows.request_ids, levels, taken)
        if rows.drafter is not None and rows.again:
            self._learn_drafter(rows, rows.drafter, forest, tokens, seconds.drafter)
        if not forest.num_nodes:
            return
        if tokens is None:
            forest, tokens = Forest(verified), [known_continuation(tree, num) for tree, num in zip(verified, accepted)]
        self._learn_outcomes(rows, forest, tokens)

    def _learn_drafter(
        self, rows: StepRows, drafter: DraftCost, forest: Forest, tokens: Sequence[np.ndarray] | None, seconds: float
    ) -> None:
        """What it took, and what came true with its nodes that would not have without."""
        plan, levels = self._plan, self._levels_again(rows)
        self._newcomers.time(self.timers[drafter], drafter, rows.request_ids, levels, seconds)
        if tokens is None or plan.first is None or plan.asked_again is None or not plan.asked_again.any():
            return
        # A draft that was cut for length reaches less deep than the first one did.
        gains = np.maximum(forest.depths_reached(tokens) - plan.first.depths_reached(tokens), 0)
        asked = np.flatnonzero(plan.asked_again)
        names = [rows.request_ids[row] for row in asked.tolist()]
        self._drafter_gain.update(names, plan.promises[asked], gains[asked], levels[asked])

    def _levels_again(self, rows: StepRows) -> np.ndarray:
        """The levels that the second source has drafted for each row, `[rows]` int64."""
        levels = np.array([tree.depths.max(initial=0) for tree in rows.again] or [0] * len(rows), np.int64)
        asked = self._plan.asked_again
        return levels if asked is None else np.maximum(levels, asked)  # silence took a call, too

    def _learn_outcomes(self, rows: StepRows, forest: Forest, tokens: Sequence[np.ndarray]) -> None:
        nodes, hits = forest.outcomes(tokens)
        row, depth = forest.row[nodes], forest.depths[nodes]
        if self.trust is not None:
            self.trust.learn(rows, forest, nodes, hits)
        tried = np.zeros((len(rows), int(depth.max(initial=1))), bool)
        tried[row, depth - 1] = True
        succeeded = np.zeros_like(tried)
        succeeded[row[hits], depth[hits] - 1] = True
        self.acceptance.update(rows.request_ids, tried, succeeded)

    def forget(self, request_id: Hashable) -> None:
        self.acceptance.forget(request_id)
        self._drafter_gain.forget(request_id)
        self._newcomers.forget(request_id)


def _widths(most: int, num_rows: int) -> np.ndarray:
    """Bounds on the nodes of one row that are worth a look. Where there is one row only, none is needed."""
    few = [width for width in _WIDTHS if width < most] if num_rows > 1 else []
    return np.array([*few, most] if most else [], np.int64)
