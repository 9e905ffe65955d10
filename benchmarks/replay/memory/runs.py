"""Measurements of `python -m benchmarks memory`."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np

from hf_smartspec.candidates import DatastoreCandidates, SuffixTreeCandidates, TreeCandidateGenerator
from hf_smartspec.candidates.text.datastore.file import Datastore, build_datastore
from hf_smartspec.candidates.text.suffix.source import MOST_BYTES
from hf_smartspec.commands.common.arguments import UsageError, usage_errors
from hf_smartspec.commands.common.console import track
from hf_smartspec.commands.common.recordings import Recording

from .arguments import LEAST_BYTES

BATCH_SIZE = 64  # held-out requests, if there are as many: one at a time and all at once
NUM_NODES = 8  # of every draft, so that drafts of all sizes cost the same work
HELD_OUT_LEN = 32  # tokens of a held-out response that are decoded

_CHANGED = 0.1  # share of tokens that another pass over the text replaces
_PROBE = 100_000  # tokens whose insertion and removal is timed, or a quarter of a smaller tree
_PASSES = 3
_TREE_BYTES, _BYTES_PER_TOKEN = 2**33, 64  # of the tree, at least: address space, of which it uses what it needs
_MICROSECONDS = 1e6


class TextStream:
    """
    An endless stream of outputs: real ones in random order, and further passes over them in which every tenth token is
    replaced at random by one of another place.

    Args:
        responses (sequence of `np.ndarray`, int): Token ids.
        held_out (sequence of `Recording`): Requests that are not among them, whose responses have at least
            `HELD_OUT_LEN` tokens.
    """

    def __init__(self, responses: Sequence[np.ndarray], held_out: Sequence[Recording]):
        self.held_out = list(held_out)
        kept = [response.astype(np.int32) for response in responses if len(response)]
        # So that the text is of the same kind at every size, also where files differ.
        self._responses = [kept[index] for index in np.random.default_rng(0).permutation(len(kept))]
        self._tokens = np.concatenate(self._responses)
        self.num_outputs, self.num_tokens = len(kept), len(self._tokens)

    def __iter__(self) -> Iterator[np.ndarray]:
        yield from self._responses
        rng = np.random.default_rng(0)
        while True:
            for response in self._responses:
                is_changed = rng.random(len(response)) < _CHANGED
                others = self._tokens[rng.integers(0, len(self._tokens), len(response))]
                yield np.where(is_changed, others, response)


def take(outputs: Iterator[np.ndarray], num_tokens: int) -> list[np.ndarray]:
    """Return the next outputs, until they have so many tokens; the last one may be cut."""
    taken: list[np.ndarray] = []
    while num_tokens > 0:
        taken.append(next(outputs)[:num_tokens])
        num_tokens -= len(taken[-1])
    return taken


class TreeProbe:
    """
    A suffix tree that grows from measurement to measurement.

    Args:
        most_tokens (`int`): The largest size at which to measure.

    Raises:
        UsageError: if the machine does not have the memory for it.
    """

    def __init__(self, stream: TextStream, most_tokens: int = 0):
        num_bytes = min(max(_TREE_BYTES, _BYTES_PER_TOKEN * most_tokens), MOST_BYTES)
        with usage_errors("--tokens", MemoryError):
            self._source = SuffixTreeCandidates(num_bytes, num_nodes=NUM_NODES, min_probability=0.0, keep_outputs=False)
        self._source.warm_up()
        self._held_out, self._outputs = stream.held_out, iter(stream)
        self._numbers: list[tuple[int | None, int]] = []  # of the kept outputs, the oldest first, and their tokens
        self._num_tokens, self._seconds = 0, 0.0

    def measure(self, num_tokens: int) -> dict[str, Any]:
        """
        Time everything where the tree holds `num_tokens`, more than before.

        Raises:
            UsageError: if these do not fit into memory.
        """
        probe = max(min(num_tokens // 4, _PROBE), 1)
        self._fill(num_tokens - probe - self._num_tokens)
        inserted = self._fill(num_tokens - self._num_tokens)
        if self._source.num_cached_tokens() < num_tokens:
            raise UsageError(f"--tokens: {num_tokens} do not fit into {self._source.max_bytes} bytes")
        return {
            "tokens": num_tokens,
            "fill_seconds": self._seconds,  # of everything that was ever added
            "insert_us_per_token": inserted,
            "bytes": self._source.num_bytes(),
            "bytes_per_token": self._source.num_bytes() / num_tokens,
            **draft_costs(self._source, self._held_out),
            "remove_us_per_token": self._remove(probe),
        }

    def _fill(self, num_tokens: int) -> float:
        """Add outputs of so many tokens and return microseconds per token."""
        seconds = 0.0
        for output in track(take(self._outputs, num_tokens), desc="filling"):
            start = perf_counter()
            numbers = self._source.add_outputs([output], progress=False)
            seconds += perf_counter() - start
            self._numbers.append((numbers[0], len(output)))
        self._num_tokens += max(num_tokens, 0)
        self._seconds += seconds
        return seconds * _MICROSECONDS / max(num_tokens, 1)

    def _remove(self, num_tokens: int) -> float:
        """Forget the oldest outputs, of so many tokens or a few more, and return microseconds per token."""
        removed, seconds, count = 0, 0.0, 0
        while removed < num_tokens:
            number, length = self._numbers[count]
            assert number is not None, "everything fits into memory"
            start = perf_counter()
            self._source.remove_output(number)
            seconds += perf_counter() - start
            removed, count = removed + length, count + 1
        del self._numbers[:count]
        self._num_tokens -= removed
        return seconds * _MICROSECONDS / removed


def draft_costs(source: TreeCandidateGenerator, held_out: Sequence[Recording]) -> dict[str, float]:
    """
    Return microseconds per draft call after every token of the held-out responses, for one row and for all rows at
    once: the median call, and of a few passes the fastest one.
    """
    single = [[call for recording in held_out for call in _draft(source, [recording])] for _ in range(_PASSES)]
    batch = [_draft(source, held_out) for _ in range(_PASSES)]
    batch_us = _fastest(batch)
    return {
        "draft_us": _fastest(single),
        "drafted": _mean_size(single),
        "batch_draft_us": batch_us,
        "batch_draft_us_per_row": batch_us / len(held_out),
        "batch_drafted": _mean_size(batch),
    }


class _Call(NamedTuple):
    seconds: float
    num_nodes: float  # per row


def _fastest(passes: list[list[_Call]]) -> float:
    return min(float(np.median([call.seconds for call in calls])) for calls in passes) * _MICROSECONDS


def _mean_size(passes: list[list[_Call]]) -> float:
    return float(np.mean([call.num_nodes for calls in passes for call in calls]))


def _draft(source: TreeCandidateGenerator, recordings: Sequence[Recording]) -> list[_Call]:
    """Draft after every token of the recordings; rows advance by one token, regardless of the drafts."""
    ids, limits, calls = list(range(len(recordings))), [NUM_NODES] * len(recordings), []
    for name, (prompt, _) in zip(ids, recordings):
        source.start(name, prompt)
    for position in range(HELD_OUT_LEN):
        start = perf_counter()
        trees = source.propose(ids, limits)
        calls.append(_Call(perf_counter() - start, sum(map(len, trees)) / len(trees)))
        for name, (_, response) in zip(ids, recordings):
            source.observe(name, response[position : position + 1])
    for name in ids:
        source.stop(name)
    return calls


def measure_eviction(stream: TextStream, max_bytes: int) -> dict[str, Any]:
    """Measure a tree of full memory, where every token added replaces another."""
    source, outputs = SuffixTreeCandidates(max_bytes), iter(stream)
    num_added = 0
    for output in track(outputs, desc="filling a bounded tree", unit=" outputs"):
        source.add_outputs([output], progress=False)
        num_added += len(output)
        if source.num_cached_tokens() < num_added:  # some had to be forgotten
            break
    seconds, largest, num_tokens = 0.0, 0, max_bytes // LEAST_BYTES
    for output in track(take(outputs, num_tokens), desc="evicting"):
        start = perf_counter()
        source.add_outputs([output], progress=False)
        seconds += perf_counter() - start
        largest = max(largest, source.num_bytes())
    return {
        "max_bytes": max_bytes,
        "largest_bytes": largest,
        "holds": largest <= max_bytes,
        "tokens": source.num_cached_tokens(),
        "replace_us_per_token": seconds * _MICROSECONDS / num_tokens,
    }


def measure_datastore(stream: TextStream, num_tokens: int, path: Path) -> dict[str, Any]:
    """Build a datastore file and draft from it."""
    documents = take(iter(stream), num_tokens)
    start = perf_counter()
    build_datastore(documents, path)
    seconds = perf_counter() - start
    source = DatastoreCandidates(Datastore.open(path))
    return {
        "tokens": num_tokens,
        "build_seconds": seconds,
        "bytes": path.stat().st_size,
        **draft_costs(source, stream.held_out),
    }
