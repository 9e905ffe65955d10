"""Candidate sources: everything that proposes draft trees."""

from .base import TreeCandidateGenerator
from .committed import Committed
from .datastore.file import Datastore, build_datastore
from .datastore.source import DatastoreCandidates
from .draft_model import DraftModelCandidates
from .early_exit import EarlyExitCandidates
from .fused.source import FusedCandidates
from .heads.eagle import EagleHeads
from .heads.feature_source import FeatureCandidates
from .heads.medusa import MedusaHeads
from .heads.mlp_speculator import MLPSpeculator
from .heads.mtp import MtpLayers
from .heads.source import MedusaCandidates
from .heads.speculator_source import MLPSpeculatorCandidates
from .prompt_lookup import PromptLookupCandidates
from .routed.classifier import TextClassifier
from .routed.source import RoutedCandidates
from .staged import StagedCandidates
from .suffix.source import SuffixTreeCandidates
from .wrapped import WrappedCandidates

__all__ = [
    "Committed",
    "Datastore",
    "DatastoreCandidates",
    "DraftModelCandidates",
    "EagleHeads",
    "EarlyExitCandidates",
    "FeatureCandidates",
    "FusedCandidates",
    "MLPSpeculator",
    "MLPSpeculatorCandidates",
    "MedusaCandidates",
    "MedusaHeads",
    "MtpLayers",
    "PromptLookupCandidates",
    "RoutedCandidates",
    "StagedCandidates",
    "SuffixTreeCandidates",
    "TextClassifier",
    "TreeCandidateGenerator",
    "WrappedCandidates",
    "build_datastore",
]
