"""Candidate sources: everything that proposes draft trees."""

from .base import TreeCandidateGenerator
from .combined.fused.source import FusedCandidates
from .combined.fused.sssd import SSSDCandidates
from .combined.routed.classifier import TextClassifier
from .combined.routed.source import RoutedCandidates
from .combined.staged import StagedCandidates
from .combined.wrapped import WrappedCandidates
from .committed import Committed
from .forwarding import ForwardingSource
from .heads.blocks.drafter import BlockDrafter
from .heads.blocks.source import BlockCandidates
from .heads.eagle.heads import EagleHeads
from .heads.eagle.parallel import ParallelCandidates
from .heads.feature_source import FeatureCandidates
from .heads.medusa.heads import MedusaHeads
from .heads.medusa.source import MedusaCandidates
from .heads.mlp_speculator import MLPSpeculator, MLPSpeculatorCandidates
from .heads.mtp import MtpLayers
from .models.draft_model import DraftModelCandidates
from .models.early_exit import EarlyExitCandidates
from .models.growing import GrowingCandidates
from .models.translated.source import TranslatedDraftCandidates
from .request import SourceRequest
from .text.datastore.file import Datastore, build_datastore
from .text.datastore.input_trees import InputTreeCandidates
from .text.datastore.source import DatastoreCandidates
from .text.prompt_lookup import PromptLookupCandidates
from .text.suffix.source import SuffixTreeCandidates
from .text.token_recycling import TokenRecyclingCandidates

__all__ = [
    "BlockCandidates",
    "BlockDrafter",
    "Committed",
    "Datastore",
    "DatastoreCandidates",
    "DraftModelCandidates",
    "EagleHeads",
    "EarlyExitCandidates",
    "FeatureCandidates",
    "ForwardingSource",
    "FusedCandidates",
    "GrowingCandidates",
    "InputTreeCandidates",
    "MLPSpeculator",
    "MLPSpeculatorCandidates",
    "MedusaCandidates",
    "MedusaHeads",
    "MtpLayers",
    "ParallelCandidates",
    "PromptLookupCandidates",
    "RoutedCandidates",
    "SSSDCandidates",
    "SourceRequest",
    "StagedCandidates",
    "SuffixTreeCandidates",
    "TextClassifier",
    "TokenRecyclingCandidates",
    "TranslatedDraftCandidates",
    "TreeCandidateGenerator",
    "WrappedCandidates",
    "build_datastore",
]
