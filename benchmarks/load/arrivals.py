"""Arrivals of benches: phases of different rates, and recorded traces."""

import csv
import gzip
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

import numpy as np

from hf_smartspec.simulator import gamma


def alternating(
    rates: Sequence[float], period: float, num_requests: int, rng: np.random.Generator, variation: float = 1.0
) -> np.ndarray:
    """
    Draw arrival times in phases of `period` seconds with the given rates in turn (Su et al., Figure 6). A process of
    rate 1 is drawn, and its time rescaled by the phases' rates.

    Args:
        rates (sequence of `float`): Requests per second of each phase; the first phase follows the last.
        variation (`float`): As in `gamma`.

    Returns:
        `np.ndarray` of shape `[num_requests]`, float64: seconds, rising.
    """
    _check_positive("period", period)
    if not len(rates):
        raise ValueError("`rates` must name at least one rate, got none.")
    for rate in rates:
        _check_positive("rates", rate)
    expected = gamma(1.0, variation, num_requests, rng)  # expected number of requests by each arrival
    num_phases = len(rates) * (int(expected[-1] / (sum(rates) * period)) + 1) if num_requests else 0
    due = np.cumsum([0.0, *(rates[phase % len(rates)] * period for phase in range(num_phases))])
    return np.interp(expected, due, np.arange(num_phases + 1) * period)


def _check_positive(name: str, value: float) -> None:
    if not np.isfinite(value) or value <= 0:
        raise ValueError(f"`{name}` must be positive, got {value!r}.")


class Trace(NamedTuple):
    """
    Recorded arrivals.

    Args:
        times (`np.ndarray` of shape `[n]`, float64): Seconds since the first.
        prompt_lens, output_lens (`np.ndarray` of shape `[n]`, int64): Numbers of tokens, at least 1.
        blocks (list of `np.ndarray`, *optional*): For every request the ids of its prompt's blocks of 512 tokens, if
            the trace has them: equal ids are equal text.
    """

    times: np.ndarray
    prompt_lens: np.ndarray
    output_lens: np.ndarray
    blocks: list[np.ndarray] | None = None

    @property
    def rate(self) -> float:
        """Requests per second."""
        return (len(self.times) - 1) / max(float(self.times[-1]), 1e-9)

    def at_rate(self, rate: float) -> "Trace":
        """Return the trace with its times scaled to `rate` requests per second."""
        _check_positive("rate", rate)
        return self._replace(times=self.times * (self.rate / rate))

    def shortened(self, max_prompt: int, max_output: int) -> "Trace":
        """Return the trace with prompts and outputs cut to these numbers of tokens."""
        return self._replace(
            prompt_lens=np.minimum(self.prompt_lens, max_prompt), output_lens=np.minimum(self.output_lens, max_output)
        )


class _Format(NamedTuple):
    """Names of the columns of a kind of trace, and how to parse its times."""

    time: str
    prompt: str
    output: str
    seconds: Callable[[str], float]
    blocks: str | None = None


def _timestamp_seconds(text: str) -> float:
    whole, _, fraction = text.partition(".")
    return (datetime.fromisoformat(whole) - datetime(2000, 1, 1)).total_seconds() + float(f"0.{fraction or 0}")


_FORMATS = (
    _Format("TIMESTAMP", "ContextTokens", "GeneratedTokens", _timestamp_seconds),  # Azure
    _Format("timestamp_ms", "input_length", "output_length", lambda text: float(text) / 1e3, "hash_ids"),  # Mooncake
)


def read_trace(path: str | Path, num_requests: int | None = None) -> Trace:
    """
    Read a trace, or its first `num_requests` requests: a .csv or .csv.gz file of the Azure LLM inference traces
    (TIMESTAMP, ContextTokens, GeneratedTokens) or of Mooncake's (timestamp_ms, input_length, output_length, hash_ids).

    Raises:
        OSError: if the file cannot be read.
        ValueError: if the file is no such trace.
    """
    path = Path(path)
    try:
        with gzip.open(path, "rt", newline="") if path.suffix == ".gz" else path.open(newline="") as file:
            reader = csv.DictReader(file)
            names = reader.fieldnames or []
            form = next((item for item in _FORMATS if {item.time, item.prompt, item.output} <= set(names)), None)
            if form is None:
                raise ValueError(f"{str(path)!r} is no trace of a known format: its columns are {', '.join(names)}.")
            rows = [row for _, row in zip(range(num_requests if num_requests is not None else 2**62), reader)]
        if not rows:
            raise ValueError(f"{str(path)!r} holds no requests.")
        times = np.array([form.seconds(row[form.time]) for row in rows])
        lens = np.array([[int(row[form.prompt]), int(row[form.output])] for row in rows], np.int64)
        blocks = [np.array(row[form.blocks].split(), np.int64) for row in rows] if form.blocks in names else None
    except (UnicodeDecodeError, EOFError, TypeError, AttributeError, csv.Error) as error:
        raise ValueError(f"{str(path)!r} is no trace of a known format: {error}") from error
    order = np.argsort(times, kind="stable")
    prompt_lens, output_lens = np.maximum(lens[order], 1).T
    return Trace(times[order] - times.min(), prompt_lens, output_lens, blocks and [blocks[index] for index in order])
