"""How much to speculate: plain arithmetic on numpy arrays, no torch and no model."""

from .acceptance import Calibrator, expected_calibration_error, outcomes
from .auction import GoodputAuction, Prediction
from .cost import CostModel, CostPoint, DraftCost, DraftTimer, StepSeconds
from .drafting import PrefillGate
from .entropy import empirical_entropy
from .estimators import AcceptanceEstimator
from .length import PowerLaw, expected_length, expected_tree_length, optimal_length
from .policies import BatchLookupTable, Oracle, RequestGoodput, StepGoodput, StepPlan
from .roofline import Roofline, free_tokens
from .selector import FixedLength, LengthPolicy, NoSpeculation, StepRows

__all__ = [
    "AcceptanceEstimator",
    "BatchLookupTable",
    "Calibrator",
    "CostModel",
    "CostPoint",
    "DraftCost",
    "DraftTimer",
    "FixedLength",
    "GoodputAuction",
    "LengthPolicy",
    "NoSpeculation",
    "Oracle",
    "PowerLaw",
    "Prediction",
    "PrefillGate",
    "RequestGoodput",
    "Roofline",
    "StepGoodput",
    "StepPlan",
    "StepRows",
    "StepSeconds",
    "empirical_entropy",
    "expected_calibration_error",
    "expected_length",
    "expected_tree_length",
    "free_tokens",
    "optimal_length",
    "outcomes",
]
