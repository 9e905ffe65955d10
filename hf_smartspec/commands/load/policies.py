"""Length policies of the benches of load, by name."""

import copy
from dataclasses import dataclass

from ...goodput import CostModel, FixedLength, GoodputAuction, LengthPolicy, NoSpeculation, RooflineBudget
from ...goodput.papers.policies import BatchLookupTable, Oracle, RandomLength
from ...goodput.papers.smartspec import ConfidenceGoodput, RequestGoodput, StepGoodput, TreeGoodput
from ...simulator import SimulatedEngine, TableCandidates
from ...simulator.oracle import DraftOracle
from .arguments import AUCTION, NONE, ORACLE


@dataclass
class Policies:
    """
    Maker of length policies: "none", "k=3", "table", "random", SmartSpec's "step", "request", "tree" and "confidence",
    "roofline", "auction", and "oracle" in simulations.
    """

    cost: CostModel  # cost of the target's forwards; every policy gets a copy to correct
    table: BatchLookupTable | None = None  # table of the policy "table"
    max_length: int = 8  # longest chain of "random", "step", "request" and "confidence"
    seed: int = 0  # of "random"

    def new(self, name: str, engine: SimulatedEngine | None = None) -> LengthPolicy:
        if name == NONE:
            return NoSpeculation()
        if name.startswith("k="):
            return FixedLength(int(name[2:]))
        if name == "table":
            assert self.table is not None, "the table is made before it is asked for"
            return BatchLookupTable(self.table.lengths)
        if name == "random":
            return RandomLength(self.max_length, self.seed)
        cost = copy.deepcopy(self.cost)
        if name == ORACLE:
            assert engine is not None, "only a simulated engine has the texts to come"
            is_table = isinstance(engine.first_stage.source, TableCandidates)
            return DraftOracle(cost, engine, engine.first_stage.cost) if is_table else Oracle(cost, engine.continuation)
        if name == "roofline":
            return RooflineBudget.of_profile(cost)
        if name == AUCTION:
            return GoodputAuction(cost)
        if name == "tree":
            return TreeGoodput(cost)
        if name == "confidence":
            return ConfidenceGoodput(cost, max_length=self.max_length)
        kinds: dict[str, type[StepGoodput | RequestGoodput]] = {"step": StepGoodput, "request": RequestGoodput}
        return kinds[name](cost, self.max_length)


def is_fixed(name: str) -> bool:
    """Return whether the policy always drafts the same number of tokens."""
    return name == NONE or name.startswith("k=")
