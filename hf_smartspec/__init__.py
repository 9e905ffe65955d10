"""Faster `model.generate` for transformers models, with the same tokens: lossless speculative decoding for batches."""

from .candidates import (
    Committed,
    DatastoreCandidates,
    DraftModelCandidates,
    EagleHeads,
    FeatureCandidates,
    MedusaCandidates,
    MedusaHeads,
    MLPSpeculator,
    MLPSpeculatorCandidates,
    MtpLayers,
    PromptLookupCandidates,
    RoutedCandidates,
    SuffixTreeCandidates,
    TextClassifier,
    TreeCandidateGenerator,
)
from .decoding.statistics import GenerationStatistics
from .decoding.trace import TracedRequest, TracedStep
from .drafts.tree import DraftTree
from .generate import disable, enable, enabled
from .goodput import FixedLength, LengthPolicy, NoSpeculation
from .online.distillation import OnlineDistillation
from .prepare.config import SmartSpecConfig
from .prepare.decode import SpeculativeDecoderOnlyOutput, SpeculativeEncoderDecoderOutput, decode
from .prepare.resolve import suffix_trees
from .sampling.noise import SeededGumbelLogitsProcessor
from .serving.engine import Engine
from .serving.outputs import EngineOutput
from .target.quantized import Int8Linear, quantize

__version__ = "0.1.0"

__all__ = [
    "Committed",
    "DatastoreCandidates",
    "DraftModelCandidates",
    "DraftTree",
    "EagleHeads",
    "Engine",
    "EngineOutput",
    "FeatureCandidates",
    "FixedLength",
    "GenerationStatistics",
    "Int8Linear",
    "LengthPolicy",
    "MLPSpeculator",
    "MLPSpeculatorCandidates",
    "MedusaCandidates",
    "MedusaHeads",
    "MtpLayers",
    "NoSpeculation",
    "OnlineDistillation",
    "PromptLookupCandidates",
    "RoutedCandidates",
    "SeededGumbelLogitsProcessor",
    "SmartSpecConfig",
    "SpeculativeDecoderOnlyOutput",
    "SpeculativeEncoderDecoderOutput",
    "SuffixTreeCandidates",
    "TextClassifier",
    "TracedRequest",
    "TracedStep",
    "TreeCandidateGenerator",
    "decode",
    "disable",
    "enable",
    "enabled",
    "quantize",
    "suffix_trees",
]
