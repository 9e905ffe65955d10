"""How much to speculate: plain arithmetic on numpy arrays, no torch and no model."""

from .acceptance import Calibrator, expected_calibration_error, outcomes
from .entropy import empirical_entropy
from .selector import FixedLength, LengthPolicy, NoSpeculation

__all__ = [
    "Calibrator",
    "FixedLength",
    "LengthPolicy",
    "NoSpeculation",
    "empirical_entropy",
    "expected_calibration_error",
    "outcomes",
]
