"""Faster `model.generate` for transformers models, with the same tokens: lossless speculative decoding for batches."""

# ruff: noqa: I001  # one line per module
import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the names of `_PLACES`, for type checkers and editors
    from .candidates import (
        BlockCandidates as BlockCandidates,
        BlockDrafter as BlockDrafter,
        Committed as Committed,
        DatastoreCandidates as DatastoreCandidates,
        DraftModelCandidates as DraftModelCandidates,
        EagleHeads as EagleHeads,
        EarlyExitCandidates as EarlyExitCandidates,
        FeatureCandidates as FeatureCandidates,
        MedusaCandidates as MedusaCandidates,
        MedusaHeads as MedusaHeads,
        MLPSpeculator as MLPSpeculator,
        MLPSpeculatorCandidates as MLPSpeculatorCandidates,
        MtpLayers as MtpLayers,
        PromptLookupCandidates as PromptLookupCandidates,
        RoutedCandidates as RoutedCandidates,
        SuffixTreeCandidates as SuffixTreeCandidates,
        TextClassifier as TextClassifier,
        TreeCandidateGenerator as TreeCandidateGenerator,
    )
    from .cpu.quantized import Int4Linear as Int4Linear, Int8Linear as Int8Linear, quantize as quantize
    from .decoding.statistics import GenerationStatistics as GenerationStatistics
    from .decoding.trace import TracedRequest as TracedRequest, TracedStep as TracedStep
    from .drafts.tree import DraftTree as DraftTree
    from .generate import disable as disable, enable as enable, enabled as enabled
    from .goodput import FixedLength as FixedLength, LengthPolicy as LengthPolicy, NoSpeculation as NoSpeculation
    from .online.distillation import OnlineDistillation as OnlineDistillation
    from .prepare.config import SmartSpecConfig as SmartSpecConfig
    from .prepare.decode import (
        SpeculativeDecoderOnlyOutput as SpeculativeDecoderOnlyOutput,
        SpeculativeEncoderDecoderOutput as SpeculativeEncoderDecoderOutput,
        decode as decode,
    )
    from .prepare.presets import suffix_trees as suffix_trees
    from .sampling.noise import SeededGumbelLogitsProcessor as SeededGumbelLogitsProcessor
    from .serving.engine import Engine as Engine
    from .serving.outputs import EngineOutput as EngineOutput

__version__ = "0.1.0"

# Names are imported when they are first asked for: torch and transformers take seconds, and `smartspec --help` needs
# neither.
_PLACES = {
    "candidates": (
        "BlockCandidates BlockDrafter Committed DatastoreCandidates DraftModelCandidates EagleHeads "
        "EarlyExitCandidates FeatureCandidates MedusaCandidates MedusaHeads MLPSpeculator MLPSpeculatorCandidates "
        "MtpLayers PromptLookupCandidates RoutedCandidates SuffixTreeCandidates TextClassifier TreeCandidateGenerator"
    ),
    "decoding.statistics": "GenerationStatistics",
    "decoding.trace": "TracedRequest TracedStep",
    "drafts.tree": "DraftTree",
    "generate": "disable enable enabled",
    "goodput": "FixedLength LengthPolicy NoSpeculation",
    "online.distillation": "OnlineDistillation",
    "prepare.config": "SmartSpecConfig",
    "prepare.decode": "SpeculativeDecoderOnlyOutput SpeculativeEncoderDecoderOutput decode",
    "prepare.presets": "suffix_trees",
    "sampling.noise": "SeededGumbelLogitsProcessor",
    "serving.engine": "Engine",
    "serving.outputs": "EngineOutput",
    "cpu.quantized": "Int4Linear Int8Linear quantize",
}
_ROOMS = [
    *("candidates", "cpu", "decoding", "drafts", "generate", "goodput", "online", "prepare", "sampling", "serving"),
    *("replicas", "simulator", "target_model"),
]
_MODULES = {name: module for module, names in _PLACES.items() for name in names.split()}
__all__ = sorted(_MODULES)


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
