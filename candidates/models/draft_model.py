"""Drafting with a smaller model of the same tokenizer."""

import os
from collections.abc import Hashable
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch.nn.functional import pad
from transformers import PreTrainedModel

from ...drafts.tree import DraftTree
from ...sampling.noise import NoiseKeys
from ...target_model.cache.footprint import Footprint
from ...target_model.cache.kept_memory import borrow_memory, release_memory
from ...target_model.compat import num_positions
from ...target_model.encoded import EncodedForward
from ...target_model.forward.chains import ChainForward
from ...target_model.forward.packed import PackedForward
from ...target_model.layout.rows import CacheRow
from ...target_model.support.capabilities import can_pack
from ...target_model.written import packed_forward
from ..request import SourceRequest
from .draft_ahead import DraftLevel
from .draft_growth import DraftState, Growth
from .encoded import EncodedRows, reads_encoder
from .growing import GrowingCandidates


class SharedVocabulary(NamedTuple):
    """
    One tokenizer, with embeddings of different sizes: ids below both sizes mean the same, and ids that only one model
    has are padding, or were added to it later. These are never proposed, and a draft reads the text without those that
    it does not have.

    Args:
        draft_size, target_size (`int`): Sizes of the vocabularies, padding included.
    """

    draft_size: int
    target_size: int

    def known(self, tokens: np.ndarray) -> list[int]:
        """Return those of a text's tokens that the draft has."""
        return tokens[tokens < self.draft_size].tolist()

    def scores(self, logits: torch.Tensor, is_whole: bool = False) -> torch.Tensor:
        """
        Return the target's part of logits `[nodes, draft_size]`: those of the tokens that both have, or with
        `is_whole`, of all `target_size`, of which the draft's are the first.
        """
        missing = self.target_size - self.draft_size if is_whole else 0
        return logits[:, : self.target_size] if missing <= 0 else pad(logits, (0, missing), value=-torch.inf)


class DraftModelCandidates(GrowingCandidates):
    """
    Drafts with a smaller language model. For targets with an encoder, it is one of the same kind: with an encoder of
    its own, which reads the same inputs, or a decoder that attends to the outputs of the target's.

    The draft has a slot cache of its own, which holds each request's committed text and is cut back to it after every
    verification. Models that cannot be packed (bloom, falcon, ...) draft chains, row by row. After a
    change of `weights_version`, the next draft computes all keys and values anew.

    Args:
        model (`PreTrainedModel`): A model whose tokenizer is the target's.
        num_nodes, width, confidence_threshold, samples: See `GrowingCandidates`.
        vocabulary (`SharedVocabulary`, *optional*): Set where the target's vocabulary has another size; found out where
            the source is an `assistant=`.
    """

    label = "draft_model"
    is_learned = True

    def __init__(
        self,
        model: PreTrainedModel,
        num_nodes: int | None = None,
        width: int | None = None,
        confidence_threshold: float = 0.0,
        samples: bool = False,
        vocabulary: SharedVocabulary | None = None,
    ):
        if not isinstance(model, PreTrainedModel):
            raise TypeError(f"`model` must be a PreTrainedModel, got {type(model).__name__}.")
        config = model.config.get_text_config(decoder=True)
        super().__init__(num_nodes, width, confidence_threshold, samples, can_pack(model), num_positions(config))
        if self.width > 1 and not self._draws_trees:
            raise ValueError(f"{type(model).__name__} cannot be packed, so that it drafts chains: leave `width` out.")
        self.model, self.vocabulary = model, vocabulary
        self._cached_version = self.weights_version  # what the cache was computed with
        self._encoded = EncodedRows(model) if reads_encoder(model) else None
        self._is_encoded = False  # whether requests have encoder outputs

    def serve(self, vocabulary: SharedVocabulary | None) -> None:
        """
        Set the vocabulary shared with the target of the requests to come.

        Raises:
            ValueError: while there are requests of a target with another one.
        """
        if vocabulary != self.vocabulary and self._states:
            raise ValueError(f"{self.name} drafts for a target with another vocabulary at present: make a new source.")
        self.vocabulary = vocabulary

    @property
    def name(self) -> str:
        path = getattr(self.model, "name_or_path", "") or type(self.model).__name__
        return f"{type(self).__name__}({os.path.basename(path)}, {id(self.model):x})"  # models of one path may differ

    def bytes_per_token(self) -> int:
        return self._footprint.per_token

    def bytes_per_request(self) -> int:
        return self._footprint.state

    @cached_property
    def _footprint(self) -> Footprint:
        is_packed = self._draws_trees and not self.model.config.is_encoder_decoder
        return packed_forward(self.model).footprint() if is_packed else Footprint.of(self.model)

    def _new_forward(self) -> PackedForward | ChainForward:
        if not self._draws_trees:
            return ChainForward(self.model)
        forward = EncodedForward(self.model) if self._is_encoded else packed_forward(self.model)
        borrow_memory(forward)
        return forward

    def begin(self, request: SourceRequest) -> None:
        if self._forward is None:
            self._is_encoded = self._encoded is not None and request.encoder_inputs is not None
        super().begin(request)

    def _new_row(self, request: SourceRequest) -> CacheRow:
        if self._encoded is None or not isinstance(self._forward, EncodedForward):
            return super()._new_row(request)
        if request.encoder_inputs is None:
            raise ValueError(f"{type(self.model).__name__} has an encoder, and the request has nothing for it to read")
        return self._encoded.add(request.encoder_inputs, request.encoder_row, self._forward)

    def _new_state(self, row: CacheRow, prompt: np.ndarray) -> DraftState:
        return DraftState(row, self._known(prompt) or [0])  # a draft starts from a token

    def _known(self, tokens: np.ndarray) -> list[int]:
        return tokens.tolist() if self.vocabulary is None else self.vocabulary.known(tokens)

    def _best_children(
        self, growths: list[Growth], numbers: list[int], logits: torch.Tensor, noise: NoiseKeys | None, width: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self.vocabulary is not None:
            logits = self.vocabulary.scores(logits, is_whole=self.samples)
        return super()._best_children(growths, numbers, logits, noise, width)

    def _signature(self, levels: list[DraftLevel], width: int) -> Hashable:
        known = super()._signature(levels, width)
        return None if known is None else (known, self.vocabulary)

    def _give_up_forward(self) -> None:
        if isinstance(self._forward, PackedForward):
            release_memory(self._forward)
        self._forward = None

    def observe(self, request_id: Hashable, tokens: np.ndarray) -> None:
        state = self._states[request_id]
        if state.row.length == len(state.tokens):
            # The last token stays out even if it was drafted: the next draft needs its logits.
            state.accepted = state.nodes.path_along(tokens[:-1])
        state.nodes = DraftTree.empty()
        state.tokens += self._known(tokens)
        state.num_generated += len(tokens)

    def _prepare(self) -> None:
        self._drop_outdated()
        self._commit()

    def _drop_outdated(self) -> None:
        """Replace rows by empty ones if their keys and values are of other weights than the model has now."""
        if self.weights_version == self._cached_version:
            return
        self._cached_version = self.weights_version
        self._forward = self._new_forward()  # dtype or device may be others now, too
        if self._encoded is not None:
            self._encoded.renew()
        for state in self._states.values():
            assert state.request is not None, "`begin` sets it"
            state.row, state.nodes, state.accepted = self._new_row(state.request), DraftTree.empty(), None

    def _commit(self) -> None:
        """Keep the keys and values of tokens accepted since the last draft, of all requests together."""
        assert self._forward is not None
        states = [state for state in self._states.values() if state.accepted is not None]
        self._forward.commit([state.row for state in states], [state.accepted or [] for state in states])
        for state in states:
            state.accepted = None
