"""Peers take turns: everybody decodes the same prompts once, then again, so that the load meets all of them."""

from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import Any, NamedTuple

from .known import BASELINES
from .processes import PeerError, PeerProcess
from .texts import Group

Row = dict[str, Any]
Rows = dict[str, Row]  # by the name of what was measured


class Entry(NamedTuple):
    """One line of the table: a peer's way to decode a group of prompts."""

    peer: str
    way: str
    group: Group

    def __str__(self) -> str:
        return f"{self.peer}, {self.way}, {self.group.text}, batch {self.group.batch_size}"

    def new_row(self) -> Row:
        row = {"peer": self.peer, "way": self.way, "text": self.group.text, "batch_size": self.group.batch_size}
        return row | {"seconds": []}


class Measuring:
    """
    Fills `rows`; what is there is not measured again, and what fails is named in `failures`.

    Args:
        processes (dict): Of the peers, by their names.
        reference (list of lists of `int`): The tokens of every prompt that are compared with.
        repeats (`int`): Turns, behind one that warms up.
        done (callable): Called after every measurement, with its name.
    """

    def __init__(
        self,
        processes: dict[str, PeerProcess],
        reference: Sequence[Sequence[int]],
        repeats: int,
        rows: Rows,
        failures: dict[str, str],
        done: Callable[[str], None],
    ):
        self.processes, self.reference, self.repeats = processes, reference, repeats
        self.rows, self.failures, self.done = rows, failures, done

    def run(self, groups: Sequence[Group]) -> None:
        for group in groups:
            entries = [entry for entry in self._entries(group) if not self._is_measured(entry)]
            for entry in entries:
                self.rows.pop(str(entry), None)
                self.failures.pop(str(entry), None)
            for turn in range(1 + self.repeats):
                for entry in entries:
                    if str(entry) not in self.failures:
                        self._measure(entry, turn)
                    self.done(str(entry))

    def num_calls(self, groups: Sequence[Group]) -> int:
        return (1 + self.repeats) * sum(
            not self._is_measured(entry) for group in groups for entry in self._entries(group)
        )

    def _entries(self, group: Group) -> Iterator[Entry]:
        """Some ways take one row only."""
        for peer, process in self.processes.items():
            ways = [way for way, in_batches in process.ways.items() if in_batches or group.batch_size == 1]
            yield from (Entry(peer, way, group) for way in ways)

    def _is_measured(self, entry: Entry) -> bool:
        return len(self.rows.get(str(entry), {"seconds": []})["seconds"]) >= self.repeats

    def _measure(self, entry: Entry, turn: int) -> None:
        try:
            seconds, tokens = self._decode(entry)
        except PeerError as error:
            self.failures[str(entry)] = str(error)
            self.rows.pop(str(entry), None)
            return
        if turn:
            row = self.rows.setdefault(str(entry), entry.new_row())
            row["seconds"].append(seconds)
            row |= self._compared(entry.group, tokens)

    def _decode(self, entry: Entry) -> tuple[float, list[list[int]]]:
        """Seconds and tokens of all calls."""
        answers = [self.processes[entry.peer].decode(entry.way, call) for call in entry.group.calls]
        tokens = [row for answer in answers for row in answer.tokens]
        wanted, lengths = len(self.reference[0]), {len(row) for row in tokens}
        if lengths != {wanted}:
            raise PeerError(f"decoded {sorted(lengths)} tokens in place of {wanted}")
        return sum(answer.seconds for answer in answers), tokens

    def _compared(self, group: Group, tokens: list[list[int]]) -> Row:
        """In half precision and in int8 engines round differently: they differ from the first near-tie on."""
        expected = [self.reference[number] for call in group.calls for number in call]
        same = list(map(agreeing, tokens, expected))
        return {
            "num_rows": len(tokens),
            "num_tokens": sum(map(len, tokens)),
            "num_same_rows": sum(count == len(row) for count, row in zip(same, tokens)),
            "num_same_tokens": sum(same),
        }


def agreeing(tokens: Sequence[int], expected: Sequence[int]) -> int:
    """How many tokens are the same up to the first difference."""
    return next((index for index, (a, b) in enumerate(zip(tokens, expected)) if a != b), len(tokens))


def finish(rows: Rows) -> None:
    """
    Adds "tokens_per_second" and "ratio": to plain `generate` on the same prompts, the median over turns, each with its
    neighbour; None where that was not measured.
    """
    for row in rows.values():
        row["tokens_per_second"] = row["num_tokens"] / median(row["seconds"])
        base = next((found for baseline in BASELINES if (found := _counterpart(rows, row, baseline))), None)
        row["ratio"] = base and median(plain / own for plain, own in zip(base["seconds"], row["seconds"]))


def _counterpart(rows: Rows, row: Row, baseline: tuple[str, str]) -> Row | None:
    wanted = (*baseline, row["text"], row["batch_size"])
    names = ("peer", "way", "text", "batch_size")
    return next((found for found in rows.values() if tuple(found[name] for name in names) == wanted), None)
