"""Drafting with a smaller model that has another tokenizer than the target."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from transformers import PreTrainedModel

from ...drafts.price import LevelPrice
from ...drafts.tree import DraftTree
from ...sampling.noise import NoiseKeys
from ...target.rows import CacheRow
from ..draft_growth import DraftState, Growth
from ..draft_model import DraftModelCandidates
from .text import TranslatedText
from .translation import Translation


@dataclass(eq=False)
class TranslatedState(DraftState):
    """
    Tokens, nodes and trees are the draft's. Its text is translated when it is asked for a draft; until then, `tokens`
    are what its row holds, or will hold, of the text before.
    """

    text: TranslatedText = field(default_factory=lambda: TranslatedText([], 0))
    is_behind: bool = True


class TranslatedDraftCandidates(DraftModelCandidates):
    """
    Drafts with a model that has a tokenizer of its own. It reads the target's text encoded anew, and drafts tokens that
    both have: its scores are put into the target's vocabulary, so that it sees the target's processors and noise.

    Args:
        model (`PreTrainedModel`): A causal LM.
        translation (`Translation`): Between its tokenizer and the target's.
        num_nodes, width, confidence_threshold, samples: See `GrowingCandidates`.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        translation: Translation,
        num_nodes: int | None = None,
        width: int | None = None,
        confidence_threshold: float = 0.0,
        samples: bool = False,
    ):
        super().__init__(model, num_nodes, width, confidence_threshold, samples)
        self.translation = translation

    def _new_state(self, row: CacheRow, prompt: np.ndarray) -> DraftState:
        text = self.translation.begin(prompt)
        return TranslatedState(row, text.tokens, text=text)

    def observe(self, request_id: Hashable, tokens: np.ndarray) -> None:
        state = self._states[request_id]
        assert isinstance(state, TranslatedState)
        if not state.is_behind and state.row.length == len(state.tokens):
            # As in other drafts, the last token is none of those that were run.
            state.accepted = state.nodes.path_along(self.translation.to_draft(tokens[:-1]))
            state.tokens += state.nodes.tokens[state.accepted].tolist()
        state.nodes, state.is_behind = DraftTree.empty(), True
        self.translation.extend(state.text, tokens)
        state.num_generated += len(tokens)

    def _prepare(self) -> None:
        super()._prepare()
        states = [state for state in self._states.values() if isinstance(state, TranslatedState) and state.is_behind]
        if states:
            self._translate(states)

    def _translate(self, states: list[TranslatedState]) -> None:
        """Brings texts up to date, and takes rows back to where they have not changed."""
        assert self._forward is not None
        firsts = [state.text.num_fixed for state in states]
        before = [state.tokens[first:] for state, first in zip(states, firsts)]
        self.translation.read([state.text for state in states])
        for state, first, old in zip(states, firsts, before):
            length = first + _num_equal(old, state.tokens[first:])
            self._forward.cut(state.row, min(state.row.length, length))
            state.is_behind = False

    def _can_grow(self, growth: Growth) -> bool:
        assert isinstance(growth.state, TranslatedState)
        return bool(growth.state.tokens) and growth.state.text.is_complete

    def propose(
        self, request_ids: Sequence[Hashable], max_nodes: Sequence[int], price: LevelPrice | None = None
    ) -> list[DraftTree]:
        trees = super().propose(request_ids, max_nodes, price)
        return [replace(tree, tokens=self.translation.to_target(tree.tokens)) for tree in trees]

    def _best_children(
        self, growths: list[Growth], numbers: list[int], logits: torch.Tensor, noise: NoiseKeys | None, width: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if noise is None:
            return super()._best_children(growths, numbers, self.translation.restricted(logits), noise, width)
        scores = self.translation.scores(logits)
        tokens, probs = super()._best_children(growths, numbers, scores, noise, width)
        return self.translation.draft_ids(tokens), probs


def _num_equal(first: list[int], second: list[int]) -> int:
    """How many tokens two texts begin with alike."""
    return next(
        (place for place, (one, other) in enumerate(zip(first, second)) if one != other), min(len(first), len(second))
    )
