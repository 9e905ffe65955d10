"""Figures that the library aims at on a GPU, held against those that were measured."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

from ...kit.tables import Row
from . import speed, verification
from .arguments import ACCEPTANCE, TEXT, VERIFICATION

Results = dict[str, dict[str, Row]]


class Target(NamedTuple):
    """A bound on a figure: at most so much, or at least."""

    text: str
    bound: float
    is_most: bool
    measured: Callable[[Results], float | None]

    def check(self, results: Results) -> dict[str, Any]:
        measured = self.measured(results)
        is_reached = None
        if measured is not None:
            is_reached = bool(measured <= self.bound if self.is_most else measured >= self.bound)
        return {
            "text": self.text,
            "target": f"at {'most' if self.is_most else 'least'} {self.bound:g}",
            "measured": measured,
            "reached": is_reached,
        }


def targets(shape: str, batch_sizes: Iterable[int]) -> list[Target]:
    """Return the bounds for a shape; those on batches of other requests for each of the batch sizes."""
    half = speed.rate_name(0.7)
    found = [
        Target(
            f"{shape}, batch 1, verification of 16 tokens / bandwidth limit", 1.15, True, partial(_verification, shape)
        ),
        Target(f"{shape}, batch 1, {half} / generate", 2.5, False, partial(_ratio, shape, f"batch 1, {half}")),
        Target(f"{shape}, batch 128, the slowest of ours / generate", 0.98, False, partial(_least, shape, 128)),
    ]
    for size in sorted(batch_sizes):
        text = f"{shape}, batch {size}, {half} / generate_batch"
        found.append(Target(text, 1.5, False, partial(_to_continuous, shape, size, half)))
    return found


def _verification(shape: str, results: Results) -> float | None:
    row = results.get(f"{VERIFICATION} {shape}", {}).get(verification.case_name(1, 16))
    return None if row is None else row["times_limit"]


def _ratio(shape: str, name: str, results: Results) -> float | None:
    return speed.ratio(results.get(f"{ACCEPTANCE} {shape}", {}), name)


def _least(shape: str, size: int, results: Results) -> float | None:
    """Return the lowest ratio of all measurements of this library at that batch size, with drafts or without."""
    ratios = []
    for section in (ACCEPTANCE, TEXT):
        rows = results.get(f"{section} {shape}", {})
        names = [name for name, row in rows.items() if f"batch {size}, " in name and "steps" in row]
        ratios += [ratio for name in names if (ratio := speed.ratio(rows, name)) is not None]
    return min(ratios, default=None)


def _to_continuous(shape: str, size: int, name: str, results: Results) -> float | None:
    rows = results.get(f"{ACCEPTANCE} {shape}", {})
    own, other = (rows.get(f"batch {size}, {way}") for way in (name, speed.CONTINUOUS))
    return None if own is None or other is None else own["tokens_per_second"] / other["tokens_per_second"]
