"""The kinds of learned drafters: how each is recognised, loaded, and made a source."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel

from ..base import TreeCandidateGenerator
from ..calibrator import ProbabilityCalibrator
from .eagle import EagleHeads
from .eagle_files import says_eagle
from .feature_source import FeatureCandidates
from .features import FeatureDrafter
from .files import config_of
from .learned import LearnedDrafter
from .medusa import MedusaHeads, says_medusa
from .medusa_source import MedusaCandidates
from .mlp_speculator import MLPSpeculator, says_mlp_speculator
from .mtp import MtpLayers, says_mtp
from .speculator_source import MLPSpeculatorCandidates


@dataclass(frozen=True)
class Kind:
    """
    A kind of learned drafters.

    Args:
        drafter (subclass of `LearnedDrafter`): What holds the weights.
        says (`Callable`): Whether a name given as `assistant=`, of a folder or hub id with this `config.json`, stands
            for one of this kind.
        source (`Callable`): From a drafter, what is learnt of probabilities, and the width of trees that was asked for
            (None: what pays) to the source that drafts with it.
    """

    drafter: type[LearnedDrafter]
    says: Callable[[str, Mapping[str, Any]], bool]
    source: Callable[[Any, ProbabilityCalibrator, int | None], TreeCandidateGenerator]


def _medusa(heads: MedusaHeads, calibrator: ProbabilityCalibrator, width: int | None) -> TreeCandidateGenerator:
    return MedusaCandidates(heads, calibrator=calibrator)


def _speculator(heads: MLPSpeculator, calibrator: ProbabilityCalibrator, width: int | None) -> TreeCandidateGenerator:
    return MLPSpeculatorCandidates(heads, width=width)


def _features(heads: FeatureDrafter, calibrator: ProbabilityCalibrator, width: int | None) -> TreeCandidateGenerator:
    return FeatureCandidates(heads, width=width)


KINDS = (
    Kind(MtpLayers, says_mtp, _features),
    Kind(MedusaHeads, says_medusa, _medusa),
    Kind(MLPSpeculator, says_mlp_speculator, _speculator),
    Kind(EagleHeads, says_eagle, _features),
)


def load(name: str, target: PreTrainedModel) -> LearnedDrafter | None:
    """
    The learned drafter of a folder or hub id, on the target's device and in its dtype; None where that holds none.

    Raises:
        ValueError: if it cannot be read, or does not fit the target.
    """
    config = {} if says_mtp(name) else config_of(name)  # the target's own layers have no folder
    kind = next((kind for kind in KINDS if kind.says(name, config)), None)
    return None if kind is None else kind.drafter.from_pretrained(name, target)


def source_of(drafter: LearnedDrafter, calibrator: ProbabilityCalibrator, width: int | None) -> TreeCandidateGenerator:
    """What drafts with it; see `Kind`."""
    kind = next(kind for kind in KINDS if isinstance(drafter, kind.drafter))
    return kind.source(drafter, calibrator, width)
