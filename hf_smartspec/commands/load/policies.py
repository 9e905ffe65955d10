"""The length policies of the benches of load, by name."""

import copy
from collections.abc import Callable
from dataclasses import dataclass

from ...goodput import CostModel, FixedLength, GoodputAuction, LengthPolicy, NoSpeculation
from ...goodput.papers.policies import BatchLookupTable, Oracle, RequestGoodput, StepGoodput
from ...simulator import SimulatedEngine, TableCandidates
from ...simulator.oracle import DraftOracle
from .arguments import AUCTION, NONE, ORACLE


@dataclass
class Policies:
    """
    Makes length policies by name: "none", "k=3", "table", "step", "request", "auction", and "oracle" in simulations.

    Args:
        cost (`CostModel`): What is known of the target's; every policy gets a copy to correct.
        table (`BatchLookupTable`, *optional*): For "table".
    """

    cost: CostModel
    table: BatchLookupTable | None = None

    def new(self, name: str, engine: SimulatedEngine | None = None) -> LengthPolicy:
        if name == NONE:
            return NoSpeculation()
        if name.startswith("k="):
            return FixedLength(int(name[2:]))
        if name == "table":
            assert self.table is not None, "the table is made before it is asked for"
            return BatchLookupTable(self.table.lengths)
        cost = copy.deepcopy(self.cost)
        if name == ORACLE:
            assert engine is not None, "only simulated engines know what will come"
            is_table = isinstance(engine.first_stage.source, TableCandidates)
            return DraftOracle(cost, engine, engine.first_stage.cost) if is_table else Oracle(cost, engine.continuation)
        kinds: dict[str, Callable[[CostModel], LengthPolicy]] = {
            "step": StepGoodput, "request": RequestGoodput, AUCTION: GoodputAuction,
        }  # fmt: skip
        return kinds[name](cost)


def is_fixed(name: str) -> bool:
    """Whether the policy never changes its mind."""
    return name == NONE or name.startswith("k=")
