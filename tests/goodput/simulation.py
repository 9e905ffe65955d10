"""A decoding loop without a model: drafters of known accuracy, forwards of known cost."""

from dataclasses import dataclass

import numpy as np

from hf_smartspec import DraftTree
from hf_smartspec.drafts.merge import join
from hf_smartspec.goodput import CostModel, DraftCost, LengthPolicy, Stage, StepOutcome, StepRows, StepSeconds

VOCAB_SIZE = 1000
CHEAP = DraftCost(per_call=1e-4)


def line(gamma: float = 0.7e-3, delta: float = 20e-3, alpha: float = 2e-6, beta: float = 0.0) -> CostModel:
    """Some model's cost; by default about that of 200 M parameters on two CPU cores."""
    return CostModel(alpha, gamma, delta, beta)


@dataclass
class Drafter:
    """Chains whose every token is right with `accuracy`, given that those before it are, and that claim `claimed`."""

    accuracy: float
    claimed: float = 0.9
    cost: DraftCost = CHEAP
    length: int = 8

    def draft(self, truth: np.ndarray, limit: int, rng: np.random.Generator) -> DraftTree:
        size = min(limit, self.length)
        is_right = rng.random(size) < self.accuracy
        tokens = np.where(is_right, truth[:size], VOCAB_SIZE)
        return DraftTree.chain(tokens, np.full(size, self.claimed, np.float32))


@dataclass
class Totals:
    tokens: int = 0
    seconds: float = 0.0
    steps: int = 0
    rested: int = 0  # of these, without the policy
    drafted: int = 0
    verified: int = 0
    expected: float = 0.0  # what the policy predicted of `tokens`
    mean_tokens: float = 0.0  # `tokens` without their chance: the mean of steps that verify as many nodes

    @property
    def goodput(self) -> float:
        return self.tokens / self.seconds


def simulate(
    policy: LengthPolicy,
    drafters: list[Drafter],
    true_cost: CostModel,
    steps: int,
    seed: int = 0,
    noise: float = 0.03,
    context: int = 200,
) -> Totals:
    """Runs `steps` steps of a batch of one row per drafter; those of one cost draft in one call."""
    rng, totals = np.random.default_rng(seed), Totals()
    for _ in range(steps):
        rows = rows_of(drafters, context)
        truths = [rng.integers(0, VOCAB_SIZE, 64) for _ in drafters]
        if policy.rests(rows.request_ids):
            totals.tokens += len(drafters)
            totals.mean_tokens += len(drafters)
            forward = float(true_cost.seconds(*rows.forward_size())) * rng.lognormal(0, noise)
            policy.rested(len(drafters), StepSeconds(0.0, forward, 0.0))
            totals.seconds += forward
            totals.steps += 1
            totals.rested += 1
            totals.expected += len(drafters)
            continue
        proposed = drafted(policy, rows, drafters, truths, rng)
        verified = policy.select(rows, proposed)
        accepted = [int(np.cumprod(tree.tokens == truth[: len(tree)]).sum()) for tree, truth in zip(verified, truths)]
        sizes = [len(tree) for tree in verified]
        forward = float(true_cost.seconds(rows.num_context, len(drafters) + sum(sizes), 1 + max(sizes)))
        forward *= rng.lognormal(0, noise)
        drafting = sum(stage.seconds for stage in rows.stages)
        tokens = [truth[: count + 1] for truth, count in zip(truths, accepted)]
        seconds = StepSeconds(drafting, forward, 0.0)
        policy.observe(StepOutcome(rows, proposed, verified, accepted, seconds, tokens))
        totals.tokens += sum(map(len, tokens))
        for item, size in zip(drafters, sizes):
            totals.mean_tokens += sum(item.accuracy**depth for depth in range(size + 1))
        totals.seconds += drafting + forward
        totals.steps += 1
        totals.drafted += sum(map(len, proposed))
        totals.verified += sum(sizes)
        if hasattr(policy, "prediction"):
            totals.expected += policy.prediction.tokens
    return totals


def rows_of(drafters: list[Drafter], context: int = 200) -> StepRows:
    """A step with a row for each drafter, and a stage for each of their costs."""
    caps = np.array([drafter.length for drafter in drafters])
    costs = [drafter.cost for drafter in drafters]
    stages = [Stage(cost, np.where([other == cost for other in costs], caps, 0)) for cost in dict.fromkeys(costs)]
    return StepRows(range(len(drafters)), np.full(len(drafters), context), caps, stages=stages)


def drafted(
    policy: LengthPolicy,
    rows: StepRows,
    drafters: list[Drafter],
    truths: list[np.ndarray],
    rng: np.random.Generator,
) -> list[DraftTree]:
    """What all stages draft, as the decoding loop asks them."""
    trees = [DraftTree.empty()] * len(rows)
    for stage in rows.stages:
        limits = policy.max_nodes(rows, stage, trees)
        assert len(limits) == len(rows) and all(0 <= limit <= cap for limit, cap in zip(limits, stage.caps))
        stage.asked = np.array(limits)
        if not stage.asked.any():
            continue
        stage.proposed = [
            item.draft(truth, int(limit), rng) if limit else DraftTree.empty()
            for item, truth, limit in zip(drafters, truths, limits)
        ]
        calls, in_calls = stage.cost.calls(stage.levels)
        stage.seconds = stage.cost.per_call * calls + stage.cost.per_row * in_calls
        trees = join(trees, policy.calibrated(rows, stage, stage.proposed), rows.caps)
    return trees


def decide(policy: LengthPolicy, rows: StepRows, trees: list[DraftTree]) -> list[DraftTree]:
    """What a policy verifies of these trees, which the only stage of the step has drafted."""
    (stage,) = rows.stages
    stage.asked = np.asarray(policy.max_nodes(rows, stage, [DraftTree.empty()] * len(rows)))
    stage.proposed = trees
    return policy.select(rows, policy.calibrated(rows, stage, trees))


def model_cost(per_call=1e-3):
    return DraftCost(per_call=per_call, is_autoregressive=True, source="model")
