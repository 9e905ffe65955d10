"""Reports on speculation: its costs, its results, and those of other lengths in hindsight."""

from collections import Counter, deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..drafts.forest import Forest
from ..drafts.price import LevelPrice
from ..drafts.tree import DraftTree
from .cost import CostModel
from .policy import LengthPolicy, StepOutcome, StepRows, StepSeconds
from .stage import Stage

_FIXED = (0, 1, 2, 3, 5, 8, 16)  # lengths tried in hindsight
_EVERY = 8  # steps from one that is evaluated in hindsight to the next; twice as many where most need no decision
_RECENT = 2000  # steps over which predictions are compared


@dataclass
class SpeculationReport:
    """
    Results of speculation over many steps.

    Args:
        seconds (`dict`): Seconds of all steps by kind of work: "draft" (and selecting), "prefill" (the prompts' share
            of forwards), "verify" (the rest of forwards) and "other" (verification, commit).
        drafted, accepted (`int`): Verified draft nodes, and accepted ones.
        nodes_per_row (`dict`): Number of rows by their number of verified nodes.
        acceptance (`dict`): By source, for every depth: number of tried levels, and the share of accepted ones.
        break_even (`float`, *optional*): Mean probability above which verifying one more node has paid.
        tokens_error, seconds_error (`float`, *optional*): Median relative errors of the policy's predictions of steps.
        goodput (`float`): Tokens per second of the steps that are evaluated in hindsight.
        hindsight (`dict`): Goodput that each fixed number of nodes would have had in these steps, by the cost model.
            Draft nodes whose outcome is unknown count as wrong.
        extras (`dict`): Further entries that are printed.
    """

    seconds: dict[str, float]
    drafted: int
    accepted: int
    nodes_per_row: dict[int, int]
    acceptance: dict[str, list[tuple[int, float]]]
    break_even: float | None
    tokens_error: float | None
    seconds_error: float | None
    goodput: float
    hindsight: dict[int, float]
    extras: dict[str, Any] = field(default_factory=dict)

    @property
    def in_vain(self) -> int:
        """Number of verified draft nodes that were rejected."""
        return self.drafted - self.accepted

    @property
    def best_fixed(self) -> int | None:
        """The fixed number of nodes with the highest goodput in hindsight, 0 for none; None without data."""
        return max(self.hindsight, key=self.hindsight.__getitem__, default=None)

    def __str__(self) -> str:
        total = max(sum(self.seconds.values()), 1e-9)
        shares = ", ".join(f"{name} {value:.2f} s ({value / total:.0%})" for name, value in self.seconds.items())
        lines = [f"Time: {shares}", f"Draft nodes: {self.drafted} verified, {self.in_vain} of them in vain"]
        for name, value in self.extras.items():
            lines.append(f"{name}: {value}")
        for source, levels in self.acceptance.items():
            rates = " ".join(f"{rate:.2f}" for num, rate in levels[:8] if num)
            lines.append(f"Acceptance by depth, {source}: {rates}")
        if self.break_even is not None:
            lines.append(f"A node has paid from a probability of {self.break_even:.2f} on")
        rows = sum(self.nodes_per_row.values())
        if rows:
            none = self.nodes_per_row.get(0, 0) / rows
            mean = sum(size * count for size, count in self.nodes_per_row.items()) / rows
            lines.append(f"Chosen: {mean:.1f} nodes a row on average, none for {none:.0%} of the rows")
        if self.hindsight:
            ratios = {size: value / max(self.goodput, 1e-9) for size, value in self.hindsight.items()}
            others = ", ".join(f"{size}: {ratio:.2f}" for size, ratio in ratios.items())
            lines.append(f"In hindsight, goodput of fixed numbers of nodes against what was reached: {others}")
        if self.tokens_error is not None and self.seconds_error is not None:
            errors = f"{self.tokens_error:.1%} of tokens, {self.seconds_error:.1%} of seconds"
            lines.append(f"Predictions of a step, median error: {errors}")
        return "\n".join(lines)


class LoggedPolicy(LengthPolicy):
    """
    Wrapper that passes all calls on to a policy and counts the results of its decisions.

    Args:
        policy (`LengthPolicy`): The policy that decides.
        cost (`CostModel`, *optional*): Predicts the cost of other decisions; without it there is no hindsight.
    """

    def __init__(self, policy: LengthPolicy, cost: CostModel | None = None):
        self.policy, self.cost = policy, cost
        self._seconds = dict.fromkeys(("draft", "prefill", "verify", "other"), 0.0)
        self._drafted = self._accepted = self._num_steps = self._next_look = 0
        self._nodes: Counter[int] = Counter()
        self._levels: dict[str, np.ndarray] = {}  # [2, depths], tried and succeeded
        self._break_even: deque[float] = deque(maxlen=_RECENT)
        self._predictions: deque[tuple[StepRows, Any]] = deque(maxlen=2)  # the earlier one may be observed later
        self._errors: deque[tuple[float, float]] = deque(maxlen=_RECENT)
        self._real = np.zeros(2)  # tokens and seconds of the steps evaluated in hindsight
        self._fixed = np.zeros((len(_FIXED), 2))  # the same for every fixed length

    @property
    def learns_late(self) -> bool:  # type: ignore[override]
        return self.policy.learns_late

    @property
    def chooses_batches(self) -> bool:  # type: ignore[override]
        return self.policy.chooses_batches

    def num_to_run(self, queue: StepRows, least: int, has_slots: Callable[[int, int], bool]) -> int:
        return self.policy.num_to_run(queue, least, has_slots)

    def rests(self, request_ids: Sequence[Hashable]) -> bool:
        return not self._must_look and self.policy.rests(request_ids)

    def asks_first(self, request_ids: Sequence[Hashable]) -> bool:
        return not self._must_look and self.policy.asks_first(request_ids)

    @property
    def _must_look(self) -> bool:
        """Return whether the policy must be called, since no step was evaluated in hindsight for long."""
        return self._num_steps >= self._next_look + _EVERY

    def rested(self, num_rows: int, seconds: StepSeconds) -> None:
        self._num_steps += 1
        self._nodes[0] += num_rows
        for name, value in zip(("draft", "verify", "other"), seconds):
            self._seconds[name] += value
        self.policy.rested(num_rows, seconds)

    def max_nodes(self, rows: StepRows, stage: Stage, trees: Sequence[DraftTree]) -> np.ndarray | list[int]:
        return self.policy.max_nodes(rows, stage, trees)

    def most_nodes(self, usual: int, most: int) -> int:
        return self.policy.most_nodes(usual, most)

    def price(self, rows: StepRows, stage: Stage) -> LevelPrice | None:
        return self.policy.price(rows, stage)

    def calibrated(self, rows: StepRows, stage: Stage, trees: Sequence[DraftTree]) -> list[DraftTree]:
        return self.policy.calibrated(rows, stage, trees)

    def select(self, rows: StepRows, trees: Sequence[DraftTree]) -> list[DraftTree]:
        selected = self.policy.select(rows, trees)
        self._predictions.append((rows, getattr(self.policy, "prediction", None)))
        return selected

    def renew(self, source: str, number: int) -> None:
        self.policy.renew(source, number)

    def forget(self, request_id: Hashable) -> None:
        self.policy.forget(request_id)

    def observe(self, outcome: StepOutcome) -> None:
        rows, seconds, sizes = outcome.rows, outcome.seconds, outcome.sizes
        num_nodes = sum(sizes)
        self._nodes.update(sizes)
        self._drafted += num_nodes
        self._accepted += sum(outcome.accepted)
        prefill = seconds.forward * rows.num_prefill_tokens / max(rows.num_batched + num_nodes, 1)
        for name, value in zip(self._seconds, (seconds.draft, prefill, seconds.forward - prefill, seconds.other)):
            self._seconds[name] += value
        self._compare_prediction(outcome)
        tokens, is_due = outcome.tokens, self._num_steps >= self._next_look
        if tokens is not None and is_due and len(rows) and not rows.num_prefill_tokens:
            self._look_back(outcome, tokens)
            self._next_look = self._num_steps + _EVERY
        self._num_steps += 1
        self.policy.observe(outcome)

    def _compare_prediction(self, outcome: StepOutcome) -> None:
        rows, seconds = outcome.rows, outcome.seconds
        prediction = next((known for step, known in self._predictions if step is rows), None)
        if prediction is not None and len(rows) and prediction.seconds > 0:
            spent = max(seconds.forward + seconds.other, 1e-9)
            self._errors.append((abs(prediction.tokens / outcome.num_tokens - 1), abs(prediction.seconds / spent - 1)))

    def _look_back(self, outcome: StepOutcome, tokens: Sequence[np.ndarray]) -> None:
        rows, seconds, sizes = outcome.rows, outcome.seconds, outcome.sizes
        forest = Forest(outcome.proposed)
        nodes, hits = forest.outcomes(tokens)
        true_nodes = nodes[hits]
        for stage in rows.stages:
            self._count_levels(stage, tokens)
        if self.cost is None:
            return
        draft = seconds.draft
        real = np.array([outcome.num_tokens, draft + seconds.forward + seconds.other])
        self._real += real
        # The cost model's error in this step is taken to be the same for every choice.
        factor = (real[1] - draft) / self._forward_seconds(rows, sizes, self.cost.seconds)
        ranks = forest.ranks()[true_nodes]
        for index, length in enumerate(_FIXED):
            gained = np.count_nonzero(ranks < length)
            shorter = [min(len(tree), length) for tree in outcome.proposed]
            forward = factor * self._forward_seconds(rows, shorter, self.cost.seconds)
            self._fixed[index] += len(rows) + gained, forward + (draft if length else 0.0)
        # One node more, by the profile alone: with the corrections of this size and the next, which are learnt apart,
        # the larger forward may take less time by noise.
        here, larger = (
            self._forward_seconds(rows, [size + more for size in sizes], self.cost.profiled) for more in (0, 1)
        )
        price = (real[1] - draft) * (larger / here - 1)
        self._break_even.append(price / len(rows) * real[0] / max(real[1], 1e-9))

    @staticmethod
    def _forward_seconds(rows: StepRows, sizes: Sequence[int], seconds: Callable[..., Any]) -> float:
        return float(seconds(*rows.forward_size(sum(sizes), 1 + max(sizes, default=0))))

    def _count_levels(self, stage: Stage, tokens: Sequence[np.ndarray]) -> None:
        forest = Forest(stage.proposed)
        nodes, hits = forest.outcomes(tokens)
        if not len(nodes):
            return
        true_nodes = nodes[hits]
        row, depth = forest.row[nodes], forest.depths[nodes]
        counts = np.zeros((2, int(depth.max())))
        num = counts.shape[1] + 1
        counts[0] = np.bincount(np.unique(row * num + depth) % num, minlength=num)[1:]
        counts[1] = np.bincount(forest.depths[true_nodes], minlength=num)[1:]
        known = self._levels.get(stage.name, np.zeros((2, 0)))
        longest = max(known.shape[1], counts.shape[1])
        known, counts = (np.pad(item, ((0, 0), (0, longest - item.shape[1]))) for item in (known, counts))
        self._levels[stage.name] = known + counts

    def report(self, **extras: Any) -> SpeculationReport:
        """Return the results so far, with `extras`."""
        errors = np.median(np.array(self._errors), axis=0).tolist() if self._errors else [None, None]
        tokens, seconds = self._real
        return SpeculationReport(
            seconds=dict(self._seconds),
            drafted=self._drafted,
            accepted=self._accepted,
            nodes_per_row=dict(sorted(self._nodes.items())),
            acceptance={
                source: [(int(tried), succeeded / max(tried, 1)) for tried, succeeded in counts.T.tolist()]
                for source, counts in self._levels.items()
            },
            break_even=float(np.mean(self._break_even)) if self._break_even else None,
            tokens_error=errors[0],
            seconds_error=errors[1],
            goodput=tokens / seconds if seconds else 0.0,
            hindsight={
                length: fixed[0] / fixed[1] for length, fixed in zip(_FIXED, self._fixed.tolist()) if fixed[1] > 0
            },
            extras=extras,
        )
