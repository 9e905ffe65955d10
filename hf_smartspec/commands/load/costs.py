"""Costs of the sources' steps on the real engine: measured once, kept in a file, and used in virtual time."""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ...goodput import CostModel, DraftCost
from ..common.arguments import UsageError


@dataclass
class Calibration:
    """Measured costs of a source's steps on the real engine."""

    cost: CostModel  # the target's profile, corrected by measured steps
    draft: DraftCost
    step_seconds: float  # further seconds of a step
    request_seconds: float  # seconds to prepare a request
    max_nodes: int  # draft nodes per row, at most
    drafter: DraftCost | None = None  # cost of a draft model that drafts after the source of `draft`

    def scaled(self, factor: float) -> "Calibration":
        """Return the costs on a machine that is slower by this factor."""
        cost = self.cost
        names = ("alpha", "beta", "gamma", "delta", "host")
        slower: dict[str, Any] = {name: getattr(cost, name) * factor for name in names}
        slower["curve"] = tuple(value * factor for value in cost.curve)
        return replace(
            self,
            cost=replace(cost, **slower),
            draft=_scaled(self.draft, factor),
            step_seconds=self.step_seconds * factor,
            request_seconds=self.request_seconds * factor,
            drafter=None if self.drafter is None else _scaled(self.drafter, factor),
        )

    @classmethod
    def of_hybrid(cls, trees: "Calibration", draft: "Calibration") -> "Calibration":
        """Return the costs of suffix trees with a draft model, from those of each."""
        return replace(
            trees,
            request_seconds=max(trees.request_seconds, draft.request_seconds),
            max_nodes=max(trees.max_nodes, draft.max_nodes),
            drafter=draft.draft,
        )

    def as_dict(self) -> dict[str, Any]:
        """Return the costs for JSON, with the learnt corrections of the cost model."""
        numbers = asdict(self)
        arrays = {name: value.tolist() for name, value in numbers["cost"].items() if isinstance(value, np.ndarray)}
        return numbers | {"cost": numbers["cost"] | arrays}

    @classmethod
    def from_dict(cls, numbers: dict[str, Any]) -> "Calibration":
        """
        Return the costs in a result of `as_dict`; raises `TypeError` or `KeyError` or `ValueError` for anything else.
        """
        learnt = {name: np.array(value) for name, value in numbers["cost"].items() if name.startswith("_")}
        drafter = numbers["drafter"]
        return cls(
            **numbers
            | {
                "cost": CostModel(**numbers["cost"] | learnt),
                "draft": DraftCost(**numbers["draft"]),
                "drafter": drafter and DraftCost(**drafter),
            }
        )


def _scaled(draft: DraftCost, factor: float) -> DraftCost:
    return replace(draft, per_call=draft.per_call * factor, per_row=draft.per_row * factor)


class Calibrations:
    """
    Calibrations by source; each is measured when it is first used.

    Args:
        measure (`Callable`): Measures a source, by name.
        path (`Path`, *optional*): A file with calibrations, to which measured ones are added.
        machine (`dict`): Description of the machine, for the file; its "parameters" must be those of the file's target.

    Raises:
        UsageError: for a file that cannot be read, or is of another target.
    """

    def __init__(
        self, measure: Callable[[str], Calibration], path: Path | None = None, machine: dict[str, Any] | None = None
    ):
        self._measure, self._path, self._machine = measure, path, machine or {}
        self._known: dict[str, Calibration] = {}
        if path is not None and path.exists():
            self._read(path)

    def __getitem__(self, source: str) -> Calibration:
        if source == "hybrid":
            return Calibration.of_hybrid(self["suffix"], self["draft"])
        if source not in self._known:
            self._known[source] = self._measure(source)
            if self._path is not None:
                self._path.write_text(json.dumps(self.as_dict(), indent=2) + "\n")
        return self._known[source]

    def as_dict(self) -> dict[str, Any]:
        sources = {source: calibration.as_dict() for source, calibration in self._known.items()}
        return {"machine": self._machine, "sources": sources}

    def _read(self, path: Path) -> None:
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            machine = content["machine"]
            self._known = {name: Calibration.from_dict(numbers) for name, numbers in content["sources"].items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise UsageError(f"--profile: {str(path)!r} is no profile of an earlier run: {error}") from error
        found, expected = machine.get("parameters"), self._machine.get("parameters")
        if found != expected:
            raise UsageError(
                f"--profile: {str(path)!r} was measured on a target of {found} parameters, this one has {expected}"
            )
