"""Faster `model.generate` for transformers models, with the same tokens: lossless speculative decoding for batches."""

from .candidates import DraftModelCandidates, PromptLookupCandidates, TreeCandidateGenerator
from .config import SmartSpecConfig
from .decode import decode
from .generate import disable, enable, enabled
from .goodput import FixedLength, LengthPolicy, NoSpeculation
from .processors import SeededGumbelLogitsProcessor
from .request import GenerationStatistics
from .tree import DraftTree

__version__ = "0.1.0"

__all__ = [
    "DraftModelCandidates",
    "DraftTree",
    "FixedLength",
    "GenerationStatistics",
    "LengthPolicy",
    "NoSpeculation",
    "PromptLookupCandidates",
    "SeededGumbelLogitsProcessor",
    "SmartSpecConfig",
    "TreeCandidateGenerator",
    "decode",
    "disable",
    "enable",
    "enabled",
]
