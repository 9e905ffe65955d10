"""The kinds of learned drafters: how each is recognised, loaded, and made a source."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel

from ...goodput.estimates.calibrator import Calibrator
from ..base import TreeCandidateGenerator
from .blocks.drafter import BlockDrafter
from .blocks.files import is_block_checkpoint
from .blocks.source import BlockCandidates
from .eagle.files import is_eagle_checkpoint
from .eagle.heads import EagleHeads
from .eagle.parallel import ParallelCandidates
from .feature_source import FeatureCandidates
from .files import config_of
from .learned import FeatureDrafter, LearnedDrafter
from .medusa.heads import MedusaHeads, is_medusa_checkpoint
from .medusa.source import MedusaCandidates
from .mlp_speculator import MLPSpeculator, MLPSpeculatorCandidates, is_speculator_checkpoint
from .mtp import MtpLayers, is_mtp


@dataclass(frozen=True)
class Kind:
    """
    A kind of learned drafters.

    Args:
        drafter (subclass of `LearnedDrafter`): The class of the module with the weights.
        recognizes (`Callable`): Returns whether a name given as `assistant=`, of a folder or hub id with this
            `config.json`, is one of this kind.
        source (`Callable`): Returns the source that drafts with a drafter, given a calibrator and the width of trees
            (None: the width that pays).
    """

    drafter: type[LearnedDrafter]
    recognizes: Callable[[str, Mapping[str, Any]], bool]
    source: Callable[[Any, Calibrator, int | None], TreeCandidateGenerator]


def _medusa(heads: MedusaHeads, calibrator: Calibrator, width: int | None) -> TreeCandidateGenerator:
    return MedusaCandidates(heads, calibrator=calibrator)


def _speculator(heads: MLPSpeculator, calibrator: Calibrator, width: int | None) -> TreeCandidateGenerator:
    return MLPSpeculatorCandidates(heads, width=width)


def _features(heads: FeatureDrafter, calibrator: Calibrator, width: int | None) -> TreeCandidateGenerator:
    return FeatureCandidates(heads, width=width)


def _eagle(heads: EagleHeads, calibrator: Calibrator, width: int | None) -> TreeCandidateGenerator:
    if heads.mask_hidden is None:
        return FeatureCandidates(heads, width=width)
    return ParallelCandidates(heads, width=width, calibrator=calibrator)


def _blocks(heads: BlockDrafter, calibrator: Calibrator, width: int | None) -> TreeCandidateGenerator:
    return BlockCandidates(heads, width=width)


# The first that recognises a folder counts: configs of EAGLE-1 are like any model's, so that it comes last.
KINDS = (
    Kind(MtpLayers, is_mtp, _features),
    Kind(MedusaHeads, is_medusa_checkpoint, _medusa),
    Kind(MLPSpeculator, is_speculator_checkpoint, _speculator),
    Kind(BlockDrafter, is_block_checkpoint, _blocks),
    Kind(EagleHeads, is_eagle_checkpoint, _eagle),
)


def load(name: str, target: PreTrainedModel) -> LearnedDrafter | None:
    """
    Load the learned drafter of a folder or hub id, to the target's device and in its dtype; None where it holds none.

    Raises:
        ValueError: if it cannot be read, or does not fit the target.
    """
    kind = kind_of(name)
    return None if kind is None else kind.drafter.from_pretrained(name, target)


def kind_of(name: str) -> Kind | None:
    """Return the kind of learned drafter that a folder or hub id holds; None for others. Raises as `config_of`."""
    config = {} if is_mtp(name) else config_of(name)  # the target's own layers have no folder
    return next((kind for kind in KINDS if kind.recognizes(name, config)), None)


def source_of(drafter: LearnedDrafter, calibrator: Calibrator, width: int | None) -> TreeCandidateGenerator:
    """Return the source that drafts with a learned drafter; for the arguments, see `Kind`."""
    kind = next(kind for kind in KINDS if isinstance(drafter, kind.drafter))
    return kind.source(drafter, calibrator, width)
