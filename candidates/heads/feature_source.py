"""The source that drafts with the target's features and a `FeatureDrafter`."""

import torch

from ...target_model.drafters.features import FeatureForward
from ..models.draft_growth import Growth
from ..models.growing import GrowingCandidates
from .hidden_states import HiddenStateCandidates, KnownStates
from .learned import FeatureDrafter


class FeatureCandidates(HiddenStateCandidates, GrowingCandidates):
    """
    Drafts with a `FeatureDrafter`, such as EAGLE's heads: trees grow level by level, by the drafter's own confidence.

    Its row of keys and values ends with the text: what it computed for a draft from features of its own is computed
    anew from the target's as soon as these are known.

    Args:
        heads (`FeatureDrafter`): On the device of the target's output.
        num_nodes, width, confidence_threshold, samples: See `GrowingCandidates`.
    """

    heads: FeatureDrafter
    _num_ahead = 1

    def __init__(
        self,
        heads: FeatureDrafter,
        num_nodes: int | None = None,
        width: int | None = None,
        confidence_threshold: float = 0.0,
        samples: bool = False,
    ):
        super().__init__(heads, num_nodes, width, confidence_threshold, samples, vocab_size=heads.vocab_size)

    @property
    def _token_ids(self) -> torch.Tensor | None:
        return self.heads.token_ids

    def _new_forward(self) -> FeatureForward:
        return FeatureForward(self.heads)

    def _can_grow(self, growth: Growth) -> bool:
        state = growth.state
        assert isinstance(state, KnownStates)
        # The last token is fed anew if need be: another's row may have brought its keys and values, and no more of it.
        first = min(state.row.length, len(state.tokens) - 1)
        return state.num_known == len(state.tokens) > 0 and state.start <= first
