"""
A simulated verifier, which compares the drafts of sources with recorded responses (SuffixDecoding's simulated
experiments, section 4.4 and appendix A.2).
"""

import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count, zip_longest
from typing import Any, NamedTuple

import numpy as np

from ...candidates import Committed, TreeCandidateGenerator
from ...candidates.base import pass_on, refuse_needs
from ...drafts.price import FREE
from ...goodput import Calibrator, expected_calibration_error, outcomes
from ..common.console import track
from ..common.recordings import Recording, count_accepted
from .sources import SourceSpec

_MICROSECONDS = 1e6
_START, _PROPOSE, _OBSERVE, _STOP = range(4)  # columns of `Tally.seconds`


class Nodes(NamedTuple):
    """Nodes of one proposal whose parent was on the recorded path; arrays of shape `[m]`."""

    request: int  # position of the request in the data set
    scores: np.ndarray  # float32, the source's probabilities
    depths: np.ndarray  # int64
    match_lengths: np.ndarray  # int64
    hits: np.ndarray  # bool, whether the response has this token


@dataclass
class Tally:
    """Counts and times of one source on one data set."""

    # Per request, in the data set's order: tokens, steps, drafted and accepted tokens.
    requests: np.ndarray
    # Per request: seconds to start, propose (its share of the calls), observe and stop.
    seconds: np.ndarray
    prompt_lens: np.ndarray  # per request, tokens
    nodes: list[Nodes] = field(default_factory=list)
    propose_seconds: list[float] = field(default_factory=list)  # per call
    rows: list[int] = field(default_factory=list)  # in each of these calls
    observe_seconds: list[float] = field(default_factory=list)  # per call
    num_bytes: int | None = None
    num_cached_tokens: int | None = None

    @classmethod
    def of(cls, num_requests: int) -> "Tally":
        return cls(np.zeros((num_requests, 4), np.int64), np.zeros((num_requests, 4)), np.zeros(num_requests, np.int64))

    def summary(self) -> dict[str, float | int | None]:
        """Return the results as plain numbers; None where nothing was measured."""
        tokens, steps, drafted, accepted = (int(value) for value in self.requests.sum(axis=0))
        return {
            "requests": int((self.requests[:, 1] > 0).sum()),
            "generated_tokens": tokens,
            "steps": steps,
            "drafted_tokens": drafted,
            "accepted_tokens": accepted,
            "tokens_per_step": _ratio(tokens, steps),
            "accepted_per_step": _ratio(accepted, steps),
            "drafted_per_step": _ratio(drafted, steps),
            "acceptance_rate": _ratio(accepted, drafted),
            "bytes_per_cached_token": _ratio(self.num_bytes or 0, self.num_cached_tokens or 0),
            **self.times(),
            **self.calibration(),
        }

    def times(self) -> dict[str, float | None]:
        """
        Return microseconds as medians, which a stall of the machine does not move, and for `propose` also the mean per
        step, since some calls of a source may cost far more than others. `us_per_token` is the time of all calls for a
        request by its tokens.
        """
        done = self.requests[:, 1] > 0
        _, steps, drafted, _ = self.requests.sum(axis=0)
        lens, prompted = self.requests[done, 0], self.prompt_lens > 0
        median = _quantile(np.divide(self.propose_seconds, self.rows), 0.5)
        return {
            "propose_us_per_step": _ratio(sum(self.propose_seconds) * _MICROSECONDS, steps),
            "propose_us_per_step_median": median,
            "propose_us_per_call_median": _quantile(self.propose_seconds, 0.5),
            "propose_us_per_call_p99": _quantile(self.propose_seconds, 0.99),
            "propose_us_per_drafted_token": _ratio((median or 0.0) * steps, drafted),
            "observe_us_per_step": _quantile(self.observe_seconds, 0.5),
            "start_us_per_prompt_token": _quantile(self.seconds[prompted, _START] / self.prompt_lens[prompted], 0.5),
            "stop_us_per_token": _quantile(self.seconds[done, _STOP] / lens, 0.5),
            "us_per_token": _quantile(self.seconds[done].sum(axis=1) / lens, 0.5),
        }

    def calibration(self) -> dict[str, float | None]:
        """
        Return the expected calibration error on the second half of the requests: of the raw scores (`ece_raw`),
        calibrated on the first half only (`ece_calibrated`), and calibrated on all earlier requests (`ece_online`).
        """
        half = len(self.requests) // 2
        late = [nodes for nodes in self.nodes if nodes.request >= half]
        if not late:
            return {"ece_raw": None, "ece_calibrated": None, "ece_online": None}
        held_out = Nodes(-1, *(np.concatenate(arrays) for arrays in list(zip(*late))[1:]))
        frozen, online = Calibrator(), Calibrator()
        for nodes in self.nodes:
            if nodes.request < half:
                frozen.update("source", *nodes[1:])
        probs = []
        for nodes in self.nodes:
            if nodes.request >= half:
                probs.append(online.calibrate("source", *nodes[1:4]))
            online.update("source", *nodes[1:])
        return {
            "ece_raw": expected_calibration_error(held_out.scores, held_out.hits),
            "ece_calibrated": expected_calibration_error(frozen.calibrate("source", *held_out[1:4]), held_out.hits),
            "ece_online": expected_calibration_error(np.concatenate(probs), held_out.hits),
        }


def _ratio(value: float, number: float) -> float | None:
    return float(value / number) if number else None


def _quantile(seconds: Sequence[float] | np.ndarray, quantile: float) -> float | None:
    return float(np.quantile(seconds, quantile)) * _MICROSECONDS if len(seconds) else None


@dataclass
class _Row:
    """A request in progress."""

    index: int  # in the data set
    response: np.ndarray  # int64 `[response_len]`
    position: int = 0  # tokens committed so far


class Replayer:
    """
    Replay with one source, which keeps what it has learnt from one data set to the next.

    Args:
        source (`TreeCandidateGenerator`): Any source that needs no target.
        num_nodes (`int`, *optional*): Nodes per row and step, likely or not. Where not given, the source's default at
            most, without unlikely ones.
        batch_size (`int`): Requests that run at once and are drafted for in one call.

    Raises:
        ValueError: for a source that needs hidden states or scores, which only a target has.
    """

    def __init__(self, source: TreeCandidateGenerator, num_nodes: int | None = None, batch_size: int = 1):
        refuse_needs(source, "a replay")
        self.source, self.batch_size = source, batch_size
        self.num_nodes = source.default_num_nodes if num_nodes is None else num_nodes
        names_number = num_nodes is not None and source.heeds_prices and not source.is_autoregressive
        self._price: dict[str, Any] = {"price": FREE} if names_number else {}
        self._ids = count()

    def run(self, recordings: Sequence[Recording], tally: Tally) -> Generator[None, None, None]:
        """Replay the requests in order, `batch_size` at once, and count in `tally`; yield after every request."""
        rows: dict[int, _Row] = {}
        waiting = iter(enumerate(recordings))
        try:
            while self._fill(rows, waiting, tally):
                for finished in self._step(rows, tally):
                    _, seconds = _timed(self.source.stop, finished)
                    tally.seconds[rows.pop(finished).index, _STOP] = seconds
                    yield
        finally:
            for request_id in rows:
                self.source.stop(request_id)
            source: Any = self.source
            if hasattr(source, "num_cached_tokens"):
                tally.num_bytes, tally.num_cached_tokens = int(source.num_bytes()), int(source.num_cached_tokens())

    def _fill(self, rows: dict[int, _Row], waiting: Iterator[tuple[int, Recording]], tally: Tally) -> bool:
        """Start requests in the free rows; return whether any request runs."""
        while len(rows) < self.batch_size and (item := next(waiting, None)) is not None:
            index, (prompt, response) = item
            request_id = next(self._ids)
            rows[request_id] = _Row(index, response)
            _, seconds = _timed(self.source.start, request_id, prompt)
            tally.seconds[index, _START] = seconds
            tally.prompt_lens[index] = len(prompt)
        return bool(rows)

    def _step(self, rows: dict[int, _Row], tally: Tally) -> list[int]:
        """Draft for all rows at once, commit the accepted tokens and one more; return the requests that are done."""
        ids = list(rows)
        trees, drafting = _timed(self.source.propose, ids, [self.num_nodes] * len(ids), **self._price)
        tally.propose_seconds.append(drafting)
        tally.rows.append(len(ids))
        for request_id, tree in zip(ids, trees):
            row = rows[request_id]
            tree = tree.most_likely(self.num_nodes)
            rest = row.response[row.position :]
            num_accepted = count_accepted(tree, rest)
            committed = rest[: num_accepted + 1]
            if len(tree):
                nodes, hits = outcomes(tree, rest)
                matches = np.broadcast_to(tree.match_lengths, len(tree))[nodes]
                tally.nodes.append(Nodes(row.index, tree.probs[nodes], tree.depths[nodes], matches, hits))
            tally.requests[row.index] += (len(committed), 1, len(tree), num_accepted)
            _, seconds = _timed(pass_on, self.source, request_id, Committed(committed))
            tally.observe_seconds.append(seconds)
            tally.seconds[row.index, _PROPOSE : _OBSERVE + 1] += drafting / len(ids), seconds
            row.position += len(committed)
        return [request_id for request_id in ids if rows[request_id].position == len(rows[request_id].response)]


def _timed(function: Callable[..., Any], *args: Any, **named: Any) -> tuple[Any, float]:
    start = time.perf_counter()
    result = function(*args, **named)
    return result, time.perf_counter() - start


def warm_up(source: TreeCandidateGenerator, build: Callable[[], TreeCandidateGenerator], recording: Recording) -> None:
    """Let a source compile and load what it needs, by its own `warm_up` or through another source of its kind."""
    if hasattr(source, "warm_up"):
        source.warm_up()
        return
    short = Recording(recording.prompt[:256], recording.response[:64])
    for _ in Replayer(build()).run([short], Tally.of(1)):
        pass


Results = dict[str, dict[SourceSpec, Tally]]  # by data set and source


def replay(
    data: Mapping[str, Sequence[Recording]],
    specs: Sequence[SourceSpec],
    results: Results,
    limit: int | None = None,
    batch_size: int = 1,
    num_nodes: int | None = None,
    carries_over: bool = False,
) -> None:
    """
    Replay every data set with every source and fill in `results`. Sources take turns, request by request, so that
    changes of the machine's load meet all alike.

    Args:
        data (mapping): Recordings by the name of their data set.
        limit (`int`, *optional*): Requests per data set, at most.
        batch_size (`int`): Requests that run at once.
        num_nodes (`int`, *optional*): Draft nodes per request and step, for sources whose specification has no number.
        carries_over (`bool`): Whether sources keep what they learnt from one data set to the next.
    """
    replayers: dict[SourceSpec, Replayer] = {}
    total = sum(len(items[:limit]) for items in data.values()) * len(specs)
    with track(total=total, desc="replaying") as progress:
        for name, recordings in data.items():
            recordings = recordings[:limit]
            if not replayers or not carries_over:
                replayers = {}
                for spec in specs:
                    source = spec.build()
                    warm_up(source, spec.build, recordings[0])
                    limit_of = num_nodes if spec.num_nodes is None else spec.num_nodes
                    replayers[spec] = Replayer(source, limit_of, batch_size)
            tallies = {spec: Tally.of(len(recordings)) for spec in specs}
            results[name] = tallies
            runs = [replayer.run(recordings, tallies[spec]) for spec, replayer in replayers.items()]
            try:
                for _ in zip_longest(*runs):
                    progress.update(len(runs))
            finally:
                for item in runs:
                    item.close()
