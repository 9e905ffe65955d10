"""Peers take turns: everybody decodes the same prompts once, then again, so that the load meets all of them."""

from collections.abc import Iterator, Sequence
from statistics import median
from typing import Any, NamedTuple

from ..common.progress import track
from .processes import PeerError, PeerProcess


class Entry(NamedTuple):
    """One line of the table: a peer's way to decode, with so many rows at once."""

    peer: str
    way: str
    rows: int

    def __str__(self) -> str:
        return f"{self.peer}, {self.way}, batch {self.rows}"


class Measured(NamedTuple):
    """What an entry took."""

    seconds: list[float]  # of every repetition; all of the prompts once
    tokens: list[list[int]]  # new ones of each prompt


def entries(processes: dict[str, PeerProcess], batch_sizes: Sequence[int]) -> Iterator[Entry]:
    """What can be measured: some ways take one row only."""
    for rows in batch_sizes:
        for peer, process in processes.items():
            yield from (Entry(peer, way, rows) for way, in_batches in process.ways.items() if in_batches or rows == 1)


def measure(
    processes: dict[str, PeerProcess],
    batch_sizes: Sequence[int],
    num_prompts: int,
    num_tokens: int,
    repeats: int,
    failures: dict[str, str],
) -> dict[Entry, Measured]:
    """
    What every entry took in `repeats` turns, behind one that warms up. What fails is left out, and named in `failures`.

    Args:
        num_prompts (`int`): That are decoded one by one; batches are one batch.
    """
    found = {entry: Measured([], []) for entry in entries(processes, batch_sizes)}
    for turn in range(1 + repeats):
        for entry in track(list(found), desc=f"turn {turn + 1} of {1 + repeats}"):
            try:
                seconds, tokens = _decode(processes[entry.peer], entry, num_prompts, num_tokens)
            except PeerError as error:
                failures[str(entry)] = str(error)
                del found[entry]
                continue
            found[entry].tokens[:] = tokens
            if turn:
                found[entry].seconds.append(seconds)
    return found


def _decode(process: PeerProcess, entry: Entry, num_prompts: int, num_tokens: int) -> tuple[float, list[list[int]]]:
    """Seconds and tokens of all prompts, one by one, or of one batch."""
    starts = range(num_prompts) if entry.rows == 1 else (0,)
    answers = [process.decode(entry.way, first, entry.rows) for first in starts]
    tokens = [row for answer in answers for row in answer.tokens]
    lengths = {len(row) for row in tokens}
    if lengths != {num_tokens}:
        raise PeerError(f"decoded {sorted(lengths)} tokens in place of {num_tokens}")
    return sum(answer.seconds for answer in answers), tokens


def rows_of(found: dict[Entry, Measured], reference: str) -> list[dict[str, Any]]:
    """
    Lines for a table and for JSON, each with how far its tokens are those of the first way of the peer `reference`.

    In half precision and in int8 engines round differently: they differ from the first near-tie on.
    """
    references = {entry.rows: measured.tokens for entry, measured in reversed(found.items()) if entry.peer == reference}
    return [_row(entry, measured, references.get(entry.rows)) for entry, measured in found.items()]


def _row(entry: Entry, measured: Measured, expected: list[list[int]] | None) -> dict[str, Any]:
    seconds, total = median(measured.seconds), sum(map(len, measured.tokens))
    agreed = None if expected is None else sum(map(agreeing, measured.tokens, expected))
    return {
        **entry._asdict(),
        "tokens_per_second": total / seconds,
        "seconds": measured.seconds,
        "num_tokens": total,
        "agreeing": agreed,
    }


def agreeing(tokens: Sequence[int], expected: Sequence[int]) -> int:
    """How many tokens are the same up to the first difference."""
    return next((index for index, (a, b) in enumerate(zip(tokens, expected)) if a != b), len(tokens))
