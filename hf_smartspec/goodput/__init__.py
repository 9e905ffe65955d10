"""Decisions on how much to speculate: plain arithmetic on numpy arrays, without torch or a model."""

from .auction import GoodputAuction, Prediction
from .cost import CostModel, CostPoint, StepSeconds
from .draft_cost import DraftCost, DraftTimer
from .estimates.acceptance import AcceptanceEstimator
from .estimates.calibrator import Calibrator, expected_calibration_error, outcomes
from .papers.entropy import empirical_entropy
from .papers.length import PowerLaw, correct_lengths, expected_length, expected_tree_length, optimal_length
from .papers.operators import LayerSizes, Operator
from .papers.policies import BatchLookupTable, Oracle, RandomLength
from .papers.roofline import Roofline, RooflineBudget, free_tokens
from .papers.smartspec import ConfidenceGoodput, RequestGoodput, StepGoodput, StepPlan, TreeGoodput
from .policy import FixedLength, LengthPolicy, NoSpeculation, Stage, StepOutcome, StepRows
from .prefill_gate import PrefillGate

__all__ = [
    "AcceptanceEstimator",
    "BatchLookupTable",
    "Calibrator",
    "ConfidenceGoodput",
    "CostModel",
    "CostPoint",
    "DraftCost",
    "DraftTimer",
    "FixedLength",
    "GoodputAuction",
    "LayerSizes",
    "LengthPolicy",
    "NoSpeculation",
    "Operator",
    "Oracle",
    "PowerLaw",
    "Prediction",
    "PrefillGate",
    "RandomLength",
    "RequestGoodput",
    "Roofline",
    "RooflineBudget",
    "Stage",
    "StepGoodput",
    "StepOutcome",
    "StepPlan",
    "StepRows",
    "StepSeconds",
    "TreeGoodput",
    "correct_lengths",
    "empirical_entropy",
    "expected_calibration_error",
    "expected_length",
    "expected_tree_length",
    "free_tokens",
    "optimal_length",
    "outcomes",
]
