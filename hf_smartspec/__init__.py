"""Faster `model.generate` for transformers models, with the same tokens: lossless speculative decoding for batches."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .candidates import (
        Committed,
        DatastoreCandidates,
        DraftModelCandidates,
        EagleHeads,
        EarlyExitCandidates,
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
    from .cpu.quantized import Int8Linear, quantize
    from .decoding.statistics import GenerationStatistics
    from .decoding.trace import TracedRequest, TracedStep
    from .drafts.tree import DraftTree
    from .generate import disable, enable, enabled
    from .goodput import FixedLength, LengthPolicy, NoSpeculation
    from .online.distillation import OnlineDistillation
    from .prepare.config import SmartSpecConfig
    from .prepare.decode import SpeculativeDecoderOnlyOutput, SpeculativeEncoderDecoderOutput, decode
    from .prepare.presets import suffix_trees
    from .sampling.noise import SeededGumbelLogitsProcessor
    from .serving.engine import Engine
    from .serving.outputs import EngineOutput

__version__ = "0.1.0"
__all__ = [
    "Committed",
    "DatastoreCandidates",
    "DraftModelCandidates",
    "DraftTree",
    "EagleHeads",
    "EarlyExitCandidates",
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

# Names are imported when they are first asked for: torch and transformers take seconds, and `smartspec --help` needs
# neither.
_PLACES = {
    "candidates": [
        "Committed",
        "DatastoreCandidates",
        "DraftModelCandidates",
        "EagleHeads",
        "EarlyExitCandidates",
        "FeatureCandidates",
        "MedusaCandidates",
        "MedusaHeads",
        "MLPSpeculator",
        "MLPSpeculatorCandidates",
        "MtpLayers",
        "PromptLookupCandidates",
        "RoutedCandidates",
        "SuffixTreeCandidates",
        "TextClassifier",
        "TreeCandidateGenerator",
    ],
    "decoding.statistics": ["GenerationStatistics"],
    "decoding.trace": ["TracedRequest", "TracedStep"],
    "drafts.tree": ["DraftTree"],
    "generate": ["disable", "enable", "enabled"],
    "goodput": ["FixedLength", "LengthPolicy", "NoSpeculation"],
    "online.distillation": ["OnlineDistillation"],
    "prepare.config": ["SmartSpecConfig"],
    "prepare.decode": ["SpeculativeDecoderOnlyOutput", "SpeculativeEncoderDecoderOutput", "decode"],
    "prepare.presets": ["suffix_trees"],
    "sampling.noise": ["SeededGumbelLogitsProcessor"],
    "serving.engine": ["Engine"],
    "serving.outputs": ["EngineOutput"],
    "cpu.quantized": ["Int8Linear", "quantize"],
}
_ROOMS = [
    *("candidates", "cpu", "decoding", "drafts", "generate", "goodput", "online", "prepare", "sampling", "serving"),
    *("replicas", "simulator", "target_model"),
    "sharing",  # the old name of replicas
]
_MODULES = {name: module for module, names in _PLACES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        value = getattr(importlib.import_module(f".{_MODULES[name]}", __name__), name)
    elif name in _ROOMS:
        value = importlib.import_module(f".{name}", __name__)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
