"""Drafting with a smaller model that has another tokenizer than the target."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from transformers import PreTrainedModel

from ....device import to_device
from ....drafts.price import LevelPrice
from ....drafts.tree import DraftTree
from ....sampling.noise import NoiseKeys
from ....target_model.layout.rows import CacheRow
from ..draft_ahead import DraftLevel
from ..draft_growth import DraftState, Growth
from ..draft_model import DraftModelCandidates
from .reencoding import Reencoding
from .text import TranslatedText
from .translation import Translation


@dataclass(eq=False)
class TranslatedState(DraftState):
    """
    State of a request in the draft's tokens: nodes, trees and text. The text is translated when a draft is asked for;
    until then, `tokens` are those of the text before, which the row holds or will hold.
    """

    text: TranslatedText = field(default_factory=lambda: TranslatedText([], 0))
    is_behind: bool = True


class TranslatedDraftCandidates(DraftModelCandidates):
    """
    Drafts with a model that has a tokenizer of its own. It reads the target's text encoded anew.

    For requests that do not sample, it drafts any of its tokens, and what they say is encoded anew as the target would
    (Timor et al., 2025, algorithm 2). For those that sample, it drafts tokens that both have (algorithm 4): its scores
    are put into the target's vocabulary, so that it sees the target's processors and noise.

    Args:
        model (`PreTrainedModel`): A causal LM.
        translation (`Translation`): Between its tokenizer and the target's.
        num_nodes, width, confidence_threshold, samples: See `GrowingCandidates`.
        reencodes (`bool`): Whether drafts are ever encoded anew. They are not where the target's tokenizer is one that
            does not return where tokens lie in a text, or with `samples`.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        translation: Translation,
        num_nodes: int | None = None,
        width: int | None = None,
        confidence_threshold: float = 0.0,
        samples: bool = False,
        reencodes: bool = True,
    ):
        super().__init__(model, num_nodes, width, confidence_threshold, samples)
        self.translation = translation
        is_possible = reencodes and not samples and Reencoding.is_possible(translation)
        self._reencoding = Reencoding(translation) if is_possible else None

    def _new_state(self, row: CacheRow, prompt: np.ndarray) -> DraftState:
        text = self.translation.begin(prompt)
        return TranslatedState(row, text.tokens, text=text)

    def observe(self, request_id: Hashable, tokens: np.ndarray) -> None:
        state = self._states[request_id]
        assert isinstance(state, TranslatedState)
        state.is_behind = True
        self.translation.extend(state.text, tokens)
        state.num_generated += len(tokens)

    def _prepare(self) -> None:
        self._drop_outdated()
        states = [state for state in self._states.values() if isinstance(state, TranslatedState) and state.is_behind]
        if states:
            self._translate(states)
        self._commit()

    def _translate(self, states: list[TranslatedState]) -> None:
        """
        Bring texts up to date. Rows keep the part of the text that is the same as before, and the nodes of the newest
        draft that it continues with.
        """
        assert self._forward is not None
        firsts = [state.text.num_fixed for state in states]
        before = [state.tokens[first:] for state, first in zip(states, firsts)]
        self.translation.read([state.text for state in states])
        for state, first, old in zip(states, firsts, before):
            length = first + _num_equal(old, state.tokens[first:])
            if length == first + len(old) == state.row.length:
                # As in other drafts, the last token is none of those that were run.
                state.accepted = state.nodes.path_along(np.array(state.tokens[length:-1], np.int64))
            else:
                self._forward.cut(state.row, min(state.row.length, length))
            state.nodes, state.is_behind = DraftTree.empty(), False

    def _can_grow(self, growth: Growth) -> bool:
        assert isinstance(growth.state, TranslatedState)
        return bool(growth.state.tokens) and growth.state.text.is_complete

    def propose(
        self, request_ids: Sequence[Hashable], max_nodes: Sequence[int], price: LevelPrice | None = None
    ) -> list[DraftTree]:
        trees = super().propose(request_ids, max_nodes, price)
        free = [
            (number, state.text, trees[number], max_nodes[number])
            for number, name in enumerate(request_ids)
            if isinstance(state := self._states[name], TranslatedState) and self._is_free(state) and len(trees[number])
        ]
        encoded: dict[int, DraftTree] = {}
        if self._reencoding is not None and free:
            places, texts, drafts, limits = zip(*free)
            encoded = dict(zip(places, self._reencoding.to_target(texts, drafts, limits)))
        return [
            encoded[number] if number in encoded else replace(tree, tokens=self.translation.to_target(tree.tokens))
            for number, tree in enumerate(trees)
        ]

    def _is_free(self, state: DraftState) -> bool:
        """Return whether the request's drafts may hold any of the draft's tokens."""
        return self._reencoding is not None and state.seed is None

    def _best_children(
        self, growths: list[Growth], numbers: list[int], logits: torch.Tensor, noise: NoiseKeys | None, width: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        is_free = np.repeat([self._is_free(growth.state) for growth in growths], numbers)
        if is_free.all():
            return super()._best_children(growths, numbers, self.translation.readable(logits), None, width)
        if noise is None:
            return super()._best_children(growths, numbers, self.translation.restricted(logits), None, width)
        tokens, probs = super()._best_children(growths, numbers, self.translation.scores(logits), noise, width)
        tokens = self.translation.draft_ids(tokens)
        if not is_free.any():
            return tokens, probs
        free_logits = self.translation.readable(logits)
        free_tokens, free_probs = super()._best_children(growths, numbers, free_logits, None, width)
        chosen = to_device(is_free, logits.device)[:, None]
        return torch.where(chosen, free_tokens, tokens), torch.where(chosen, free_probs, probs)

    def _signature(self, levels: list[DraftLevel], width: int) -> Hashable:
        return None  # which tokens both have is sent when it is first asked for


def _num_equal(first: list[int], second: list[int]) -> int:
    """Return the number of tokens at the beginning that two texts have in common."""
    return next(
        (place for place, (one, other) in enumerate(zip(first, second)) if one != other), min(len(first), len(second))
    )
