"""How much to speculate: plain arithmetic on numpy arrays, no torch and no model."""

from .acceptance import Calibrator, expected_calibration_error, outcomes
from .auction import GoodputAuction, Prediction
from .cost import CostModel, CostPoint, DraftCost, StepSeconds
from .entropy import empirical_entropy
from .estimators import AcceptanceEstimator
from .selector import FixedLength, LengthPolicy, NoSpeculation, StepRows

__all__ = [
    "AcceptanceEstimator",
    "Calibrator",
    "CostModel",
    "CostPoint",
    "DraftCost",
    "FixedLength",
    "GoodputAuction",
    "LengthPolicy",
    "NoSpeculation",
    "Prediction",
    "StepRows",
    "StepSeconds",
    "empirical_entropy",
    "expected_calibration_error",
    "outcomes",
]
