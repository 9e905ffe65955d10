"""Drafting with a smaller model of the same vocabulary."""

import os
from collections.abc import Hashable

import numpy as np
from transformers import PreTrainedModel

from ..drafts.tree import DraftTree
from ..target.chains import ChainForward
from ..target.kept_memory import lend, take_back
from ..target.packed import PackedForward
from ..target.support import can_pack
from ..target.written import packed_forward
from .growing import GrowingCandidates


class DraftModelCandidates(GrowingCandidates):
    """
    Drafts with a smaller causal language model.

    The draft has a slot cache of its own, which holds each request's committed text and is cut back to it after every
    verification. Models that cannot be packed (bloom, falcon, ...) draft chains, row by row.

    Args:
        model (`PreTrainedModel`): A causal LM whose tokenizer is the target's.
        num_nodes, width, confidence_threshold, samples: See `GrowingCandidates`.

    Attributes:
        weights_version (`int`): To be counted up by whoever changes the model's weights while requests run: keys and
            values that were computed with the old ones are then computed anew, with the next draft.
    """

    weights_version = 0

    def __init__(
        self,
        model: PreTrainedModel,
        num_nodes: int | None = None,
        width: int | None = None,
        confidence_threshold: float = 0.0,
        samples: bool = False,
    ):
        if not isinstance(model, PreTrainedModel):
            raise TypeError(f"`model` must be a PreTrainedModel, got {type(model).__name__}.")
        self._draws_trees = can_pack(model)
        config = model.config.get_text_config(decoder=True)
        num_positions = getattr(config, "max_position_embeddings", None)
        super().__init__(num_nodes, width, confidence_threshold, samples, self._draws_trees, num_positions)
        if self.width > 1 and not self._draws_trees:
            raise ValueError(f"{type(model).__name__} cannot be packed, so that it drafts chains: leave `width` out.")
        self.model = model
        self._cached_version = self.weights_version  # what the cache was computed with

    @property
    def name(self) -> str:
        path = getattr(self.model, "name_or_path", "") or type(self.model).__name__
        return f"{type(self).__name__}({os.path.basename(path)}, {id(self.model):x})"  # models of one path may differ

    def _new_forward(self) -> PackedForward | ChainForward:
        if not self._draws_trees:
            return ChainForward(self.model)
        forward = packed_forward(self.model)
        lend(forward)
        return forward

    def stop(self, request_id: Hashable) -> None:
        self._coupling.pop(request_id, None)
        state = self._states.pop(request_id, None)
        if state is not None and self._forward is not None:
            self._forward.remove(state.row)
        if not self._states:
            if isinstance(self._forward, PackedForward):
                take_back(self._forward)
            self._forward = None

    def observe(self, request_id: Hashable, tokens: np.ndarray) -> None:
        state = self._states[request_id]
        if state.row.length == len(state.tokens):
            # The last token stays out even if it was drafted: the next draft needs its logits.
            state.accepted = state.nodes.path_along(tokens[:-1])
        state.nodes = DraftTree.empty()
        state.tokens += tokens.tolist()
        state.num_generated += len(tokens)

    def _prepare(self) -> None:
        self._drop_outdated()
        self._commit()

    def _drop_outdated(self) -> None:
        """Begins with empty rows where their keys and values are of other weights than the model has now."""
        if self.weights_version == self._cached_version:
            return
        self._cached_version = self.weights_version
        self._forward = self._new_forward()  # dtype or device may be others now, too
        for state in self._states.values():
            state.row, state.nodes, state.accepted = self._forward.add(), DraftTree.empty(), None

    def _commit(self) -> None:
        """Keeps the keys and values of what was accepted since the last draft, of all requests together."""
        assert self._forward is not None
        states = [state for state in self._states.values() if state.accepted is not None]
        self._forward.commit([state.row for state in states], [state.accepted or [] for state in states])
        for state in states:
            state.accepted = None
