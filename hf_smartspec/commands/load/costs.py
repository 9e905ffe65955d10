"""What the sources' steps cost on the real engine: measured once, kept in a file, and used in virtual time."""

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
    """
    What a source's steps on the real engine have shown.

    Args:
        cost (`CostModel`): The target's profile, corrected by measured steps.
        draft (`DraftCost`): What drafting takes.
        step_seconds (`float`): What a step takes besides.
        request_seconds (`float`): What it takes to prepare a request.
        max_nodes (`int`): Draft nodes per row, at most.
        drafter (`DraftCost`, *optional*): What a draft model takes that only speaks where `draft` has little to say.
    """

    cost: CostModel
    draft: DraftCost
    step_seconds: float
    request_seconds: float
    max_nodes: int
    drafter: DraftCost | None = None

    def scaled(self, factor: float) -> "Calibration":
        """On a machine that is slower by this factor."""
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
        """Of suffix trees and a draft model together, from those of each."""
        return replace(
            trees,
            request_seconds=max(trees.request_seconds, draft.request_seconds),
            max_nodes=max(trees.max_nodes, draft.max_nodes),
            drafter=draft.draft,
        )

    def as_dict(self) -> dict[str, Any]:
        """As JSON knows it, with what was learnt about the cost."""
        numbers = asdict(self)
        arrays = {name: value.tolist() for name, value in numbers["cost"].items() if isinstance(value, np.ndarray)}
        return numbers | {"cost": numbers["cost"] | arrays}

    @classmethod
    def from_dict(cls, numbers: dict[str, Any]) -> "Calibration":
        """
        Raises:
            TypeError, KeyError, ValueError: for anything that `as_dict` did not make.
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
    By source; each is measured when it is first asked for.

    Args:
        measure (`Callable`): Measures a source, by name.
        path (`Path`, *optional*): A file that has some, and gets those that are measured.
        machine (`dict`): Where it is measured, for the file; its "parameters" must be those of the file's target.

    Raises:
        UsageError: for a file that cannot be read, or tells of something else.
    """

    def __init__(
        self,
        measure: Callable[[str], Calibration],
        path: Path | None = None,
        machine: dict[str, Any] | None = None,
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
