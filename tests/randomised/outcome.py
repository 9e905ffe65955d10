"""What came of random requests: counts, and every difference."""

import logging
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from ..cases import Setting
from ..ties import first_difference
from .requests import Way

_COUNTERS = ("counts", "targets", "asked", "drafted", "accepted")


@dataclass
class Outcome:
    """
    Args:
        seed (`int`): Of the round.
        counts (`Counter`): `requests`, `sampled`, `cancelled`, `tokens`, `ties`, `differences`, `reused` (prompt
            tokens), and `swaps` of weights.
        targets (`Counter`): Requests, by the target's architecture.
        asked, drafted, accepted (`Counter`): Requests and tokens, by who drafted.
        ties, faults (list of `str`): Every difference from plain `generate`: those that rounding explains, and others.
    """

    seed: int
    counts: Counter = field(default_factory=Counter)
    targets: Counter = field(default_factory=Counter)
    asked: Counter = field(default_factory=Counter)
    drafted: Counter = field(default_factory=Counter)
    accepted: Counter = field(default_factory=Counter)
    ties: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    def __add__(self, other: "Outcome") -> "Outcome":
        sums = {name: getattr(self, name) + getattr(other, name) for name in _COUNTERS}
        return Outcome(self.seed, **sums, ties=self.ties + other.ties, faults=self.faults + other.faults)

    def compare(self, setting: Setting, row: int, expected: list[int], actual: list[int], where: str) -> None:
        """Adds one request: what plain `generate` says behind its prompt, and what was generated."""
        self.counts.update(requests=1, sampled=setting.sampling is not None, tokens=len(actual))
        if actual == expected:
            return
        difference = first_difference(f"round {self.seed}, {where}", setting, row, expected, actual)
        if difference.tie is None:
            self.counts["differences"] += 1
            self.faults.append(str(difference))
        else:
            self.counts["ties"] += 1
            self.ties.append(str(difference))

    def add_fault(self, text: str) -> None:
        self.counts["differences"] += 1
        self.faults.append(f"round {self.seed}, {text}")

    def add_drafts(self, way: Way, num_requests: int, statistics: Any) -> None:
        self.asked[way.name] += num_requests
        self.drafted[way.name] += statistics.drafted_tokens
        self.accepted[way.name] += statistics.accepted_tokens

    def idle(self, kinds: Any) -> list[str]:
        """Kinds that drafted nothing, or nothing that came true: of these, nothing has been shown."""
        return [kind for kind in kinds if not (self.drafted[kind] and self.accepted[kind])]

    def as_dict(self) -> dict[str, Any]:
        return dict(vars(self))

    @classmethod
    def of_dict(cls, content: dict[str, Any]) -> "Outcome":
        return cls(**content | {name: Counter(content[name]) for name in _COUNTERS})

    def __str__(self) -> str:
        names = ("requests", "sampled", "cancelled", "tokens", "reused", "swaps", "ties", "differences")
        lines = [
            f"\n  {name}: {num:,} requests, {self.drafted[name]:,} drafted, {self.accepted[name]:,} accepted"
            for name, num in sorted(self.asked.items())
        ]
        targets = ", ".join(f"{name} {num:,}" for name, num in sorted(self.targets.items()))
        return ", ".join(f"{self.counts[name]:,} {name}" for name in names) + "".join(lines) + f"\n  targets: {targets}"


class Complaints(logging.Handler):
    """A drafter that fails is dropped with a warning, and outputs stay right: here that is a fault."""

    def __init__(self, outcome: Outcome):
        super().__init__(logging.WARNING)
        self.outcome = outcome

    def emit(self, record: logging.LogRecord) -> None:
        message = record.getMessage()
        is_of_shaken = "hardly ever drafts" in message and self.outcome.counts["swaps"]  # who may never be right again
        if not message.startswith("Compiling") and not is_of_shaken:
            self.outcome.add_fault(message)
