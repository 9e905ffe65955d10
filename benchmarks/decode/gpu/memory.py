"""Peak memory."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from ...kit.tables import Column

PEAK = Column("peak GB", "peak_bytes", "{:.1f}", 1e-9)


@dataclass
class Peak:
    """Bytes that torch had allocated at most, weights included; 0 on devices without such a count."""

    value: int = 0


@contextmanager
def peak_bytes(device: torch.device) -> Iterator[Peak]:
    """Yield an object whose `value` is the block's peak memory, once the block has ended."""
    peak = Peak()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    yield peak
    if device.type == "cuda":
        peak.value = torch.cuda.max_memory_allocated(device)
