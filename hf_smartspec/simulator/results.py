"""Results of a load: latencies and throughput of a real or a simulated engine."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from ..decoding.statistics import GenerationStatistics


class Served(NamedTuple):
    """One answered request; times in seconds from the beginning of the load."""

    arrival: float
    first_token: float
    end: float
    num_tokens: int

    @property
    def latency(self) -> float:
        """Seconds from the arrival to the last token, waiting included."""
        return self.end - self.arrival


@dataclass
class LoadResult:
    """
    Result of a load.

    Args:
        served (list of `Served`): The requests that were answered, in the order of their arrival.
        statistics (`GenerationStatistics`): Sums over all steps; times of a simulated load are virtual.
        batched_tokens (`int`): Tokens in all forwards, prompts included.
        seconds_waited (`float`): Seconds in the queue, summed over requests, where known.
    """

    served: list[Served] = field(default_factory=list)
    statistics: GenerationStatistics = field(default_factory=GenerationStatistics)
    batched_tokens: int = 0
    seconds_waited: float = 0.0

    @property
    def latencies(self) -> np.ndarray:
        """Seconds from arrival to last token of each request, `[n]` float64."""
        return np.array([item.latency for item in self.served])

    @property
    def mean_latency(self) -> float:
        """Mean seconds from arrival to last token; NaN if no request was served."""
        return float(self.latencies.mean()) if self.served else np.nan

    def latency(self, percentile: float) -> float:
        """Return the given percentile of the latencies, in seconds; NaN if no request was served."""
        return float(np.percentile(self.latencies, percentile)) if self.served else np.nan

    def seconds_per_token(self, percentile: float) -> float:
        """
        Return the given percentile, over requests with two tokens or more, of the mean seconds between two tokens of an
        answer; NaN without such a request.
        """
        times = [(item.end - item.first_token) / (item.num_tokens - 1) for item in self.served if item.num_tokens > 1]
        return float(np.percentile(times, percentile)) if times else np.nan

    @property
    def first_token(self) -> float:
        """Mean seconds from arrival to the first token."""
        return float(np.mean([item.first_token - item.arrival for item in self.served])) if self.served else np.nan

    @property
    def num_tokens(self) -> int:
        return sum(item.num_tokens for item in self.served)

    @property
    def seconds(self) -> float:
        """Seconds from the first arrival to the last end."""
        if not self.served:
            return 0.0
        return max(item.end for item in self.served) - min(item.arrival for item in self.served)

    @property
    def goodput(self) -> float:
        """Generated tokens per second."""
        return self.num_tokens / self.seconds if self.seconds else np.nan

    def as_dict(self) -> dict[str, float]:
        counts = self.statistics
        return {
            "requests": len(self.served),
            "mean_latency": self.mean_latency,
            "p50_latency": self.latency(50),
            "p90_latency": self.latency(90),
            "p99_latency": self.latency(99),
            "p50_per_token": self.seconds_per_token(50),
            "p99_per_token": self.seconds_per_token(99),
            "first_token": self.first_token,
            "goodput": self.goodput,
            "tokens": self.num_tokens,
            "forwards": counts.forwards,
            "acceptance_rate": counts.acceptance_rate,
            "mean_accepted_length": self.num_tokens / max(counts.steps, 1),
            "drafted_per_step": counts.drafted_tokens / max(counts.steps, 1),
        }


def pooled(results: Sequence[LoadResult]) -> LoadResult:
    """Return repetitions of a load as one result, one after the other, so that goodput is all tokens by all seconds."""
    total = LoadResult()
    offset = 0.0
    for result in results:
        first = min((item.arrival for item in result.served), default=0.0)
        shift = offset - first
        total.served += [
            Served(item.arrival + shift, item.first_token + shift, item.end + shift, item.num_tokens)
            for item in result.served
        ]
        total.statistics += result.statistics
        total.batched_tokens += result.batched_tokens
        total.seconds_waited += result.seconds_waited
        offset += result.seconds
    return total
