"""What a source that calibrates its probabilities asks of a calibrator."""

from collections.abc import Hashable
from typing import Any, Protocol

import numpy as np


class ProbabilityCalibrator(Protocol):
    """What a source's raw probabilities are worth; `goodput.Calibrator` is one."""

    def calibrate(self, source: Hashable, scores: Any, depths: Any, match_lengths: Any) -> np.ndarray: ...
    def update(self, source: Hashable, scores: Any, depths: Any, match_lengths: Any, hits: Any) -> None: ...
