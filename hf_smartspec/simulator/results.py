"""What became of a load: latencies and throughput, of a real engine or of a simulated one."""

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
        """From its arrival to its last token; waiting counts."""
        return self.end - self.arrival


@dataclass
class LoadResult:
    """
    Args:
        served (list of `Served`): The requests that were answered, in the order of their arrival.
        statistics (`GenerationStatistics`): Sums over all steps; times are virtual where the load was simulated.
        batched_tokens (`int`): Tokens in all forwards, prompts included.
        seconds_waited (`float`): Of all requests in the queue, where that is known.
    """

    served: list[Served] = field(default_factory=list)
    statistics: GenerationStatistics = field(default_factory=GenerationStatistics)
    batched_tokens: int = 0
    seconds_waited: float = 0.0

    @property
    def latencies(self) -> np.ndarray:
        """Seconds, `[n]` float64."""
        return np.array([item.latency for item in self.served])

    @property
    def mean_latency(self) -> float:
        """Seconds; NaN where nothing was served."""
        return float(self.latencies.mean()) if self.served else np.nan

    def latency(self, percentile: float) -> float:
        """The given percentile of the latencies, in seconds."""
        return float(np.percentile(self.latencies, percentile)) if self.served else np.nan

    @property
    def first_token(self) -> float:
        """Mean seconds from arrival to the first token."""
        return float(np.mean([item.first_token - item.arrival for item in self.served])) if self.served else np.nan

    @property
    def num_tokens(self) -> int:
        return sum(item.num_tokens for item in self.served)

    @property
    def seconds(self) -> float:
        """From the first arrival to the last end."""
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
            "p90_latency": self.latency(90),
            "p99_latency": self.latency(99),
            "first_token": self.first_token,
            "goodput": self.goodput,
            "tokens": self.num_tokens,
            "forwards": counts.forwards,
            "acceptance_rate": counts.acceptance_rate,
            "mean_accepted_length": self.num_tokens / max(counts.steps, 1),
            "drafted_per_step": counts.drafted_tokens / max(counts.steps, 1),
        }


def pooled(results: Sequence[LoadResult]) -> LoadResult:
    """Repetitions of one load as one result: one after the other, so that goodput stays tokens by seconds."""
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
