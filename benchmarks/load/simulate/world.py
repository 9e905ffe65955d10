"""Models, loads, policies and the form of the simulated figures."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from hf_smartspec.candidates import TreeCandidateGenerator
from hf_smartspec.commands.common.recordings import Recording
from hf_smartspec.commands.load.policies import Policies
from hf_smartspec.goodput import (
    CostModel,
    DraftCost,
    LengthPolicy,
)
from hf_smartspec.goodput.papers.length import expected_length
from hf_smartspec.goodput.papers.policies import BatchLookupTable
from hf_smartspec.simulator import LoadRequest, LoadResult, SimulatedEngine, TableCandidates

from ...kit.claims import Claim
from ..devices import Device, datasheet_cost

LENGTH = 128  # tokens of prompts and of outputs, where all have the same
ALPHA = 0.7
CLOSE = 1.05  # latency by the best one's that counts as equal
DRAFT_LENGTH = 5
MAX_BATCH_SIZE = 128
HEADS = 3


@dataclass
class Figure:
    """
    Args:
        name, title (`str`): The paper's figure, and its subject.
        x, y (`str`): Labels of the axes.
        panels (`dict`): The y values by panel, series and x.
        claims (list of `Claim`): The paper's claims about its figure, and whether they hold here.
    """

    name: str
    title: str
    x: str
    y: str
    panels: dict[str, dict[str, dict[float, float]]] = field(default_factory=dict)
    claims: list[Claim] = field(default_factory=list)

    @classmethod
    def of(cls, found: Mapping[str, Any]) -> "Figure":
        """Return the figure that `asdict` has made this of, from a file or not."""
        panels = {
            panel: {name: {float(x): y for x, y in values.items()} for name, values in series.items()}
            for panel, series in found["panels"].items()
        }
        return cls(**dict(found) | {"panels": panels, "claims": [Claim(*item) for item in found["claims"]]})

    def claim(self, text: str, holds: Any) -> None:
        self.claims.append(Claim(text, bool(holds)))


@dataclass
class World:
    """
    Assumptions of all figures.

    Args:
        target (`CostModel`): A 7 B model on an A100, by default, as in the papers.
        draft (`DraftCost`): Cost of a draft model of 160 M parameters.
        heads (`DraftCost`): Cost of Medusa's heads.
        lookup (`DraftCost`): Cost of prompt lookup.
        num_requests (`int`): Per load.
        recordings (by name, lists of `Recording`): Real text to replay.
    """

    num_requests: int
    recordings: Mapping[str, list[Recording]]
    seed: int = 0
    target: CostModel = field(default_factory=lambda: datasheet_cost(Device.a100(), 6.7e9, 32, 4096))
    draft: DraftCost = field(
        default_factory=lambda: DraftCost.of_model(datasheet_cost(Device.a100(), 160e6, 12, 768), LENGTH)
    )
    heads: DraftCost = field(default_factory=lambda: DraftCost(per_call=2e-4))
    lookup: DraftCost = field(default_factory=lambda: DraftCost(per_call=2e-5, per_row=1e-5))
    tick: Callable[[], object] = lambda: None  # after every load

    def rng(self, *key: int) -> np.random.Generator:
        return np.random.default_rng([self.seed, *key])

    def same_lengths(self, times: np.ndarray) -> list[LoadRequest]:
        lengths = [LENGTH] * len(times)
        return LoadRequest.of_lengths(times, lengths, lengths, self.rng(1))

    def chat_lengths(self, times: np.ndarray) -> list[LoadRequest]:
        """Return prompts of medium length with longer outputs of higher variance (SmartSpec, Figure 10)."""
        rng = self.rng(2)
        prompts = np.clip(rng.lognormal(4.5, 0.8, len(times)), 8, 1024).astype(int)
        outputs = np.clip(rng.lognormal(4.8, 0.9, len(times)), 4, 1024).astype(int)
        return LoadRequest.of_lengths(times, prompts.tolist(), outputs.tolist(), rng)

    def run(
        self,
        requests: Sequence[LoadRequest],
        policy: Callable[[SimulatedEngine], LengthPolicy],
        source: TreeCandidateGenerator,
        draft: DraftCost,
    ) -> LoadResult:
        engine = SimulatedEngine(self.target, source, draft, max_batch_size=MAX_BATCH_SIZE)
        result = engine.run(requests, policy(engine))
        self.tick()
        return result

    def run_draft(
        self, requests: Sequence[LoadRequest], policy: Callable[[SimulatedEngine], LengthPolicy]
    ) -> LoadResult:
        source = TableCandidates((1,) * DRAFT_LENGTH, is_autoregressive=True)
        return self.run(requests, policy, source, self.draft)

    def policy(self, name: str) -> Callable[[SimulatedEngine], LengthPolicy]:
        """Return a maker of policies that the benches of load know by name."""
        return partial(Policies(self.target, max_length=DRAFT_LENGTH, seed=self.seed).new, name)


def llama_3_cost() -> CostModel:
    """
    Return the cost of Llama 3 8 B on a device of 280 TFLOP/s and 0.8 TB/s, as in SSSD's example (section 3.2.1), that
    multiplies while it reads: a forward takes the longer of both, and reads 128 KiB of keys and values per token.
    """
    flops, bandwidth, parameters = 280e12, 0.8e12, 8.03e9
    read, per_token = 2 * parameters / bandwidth, 2 * parameters / flops
    knots = [1.0, read / per_token, 2**16]
    return CostModel(2**17 / bandwidth, 0.0, 0.0, knots=knots, curve=[read, read, 2**16 * per_token])


def lookup_table(world: World) -> BatchLookupTable:
    """Return the grid search of every batch size, by the cost model (Su et al., section 4)."""

    def seconds_per_token(batch_size: int, length: int) -> float:
        if length > DRAFT_LENGTH:
            return np.inf
        seconds = world.target.seconds(batch_size * 1.5 * LENGTH, batch_size * (length + 1), length + 1)
        seconds += length * (world.draft.per_call + batch_size * world.draft.per_row)
        return float(seconds / (batch_size * expected_length(ALPHA, length)))

    return BatchLookupTable.profiled(seconds_per_token, MAX_BATCH_SIZE)
