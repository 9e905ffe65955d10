"""Drafting with the first layers of the target itself."""

from collections.abc import Hashable, Sequence
from threading import RLock

import numpy as np
from transformers import PreTrainedModel

from ...drafts.price import LevelPrice
from ...drafts.tree import DraftTree
from ...target_model.drafters.early_exit import EarlyExitForward
from ...target_model.forward.packed import PackedForward
from ...target_model.layout.rows import CacheRow
from ...target_model.written import written_decoder
from ...validate import is_integer
from ..request import SourceRequest
from .draft_growth import Growth
from .growing import GrowingCandidates


class EarlyExitCandidates(GrowingCandidates):
    """
    Drafts with the first layers of the target, its final norm and its head (LayerSkip, arXiv 2404.16710, section 4.3).
    There is no second model, and nothing of the text is computed twice: drafts attend to the target's own keys and
    values. A request's first draft comes when these are there, after its prompt.

    Args:
        model (`PreTrainedModel`): The target, whose decoder must be of a structure that can be written out.
        num_layers (`int`): How many layers draft: at least one, and not all.
        num_nodes, width, confidence_threshold, samples: See `GrowingCandidates`.

    Raises:
        ValueError: if the target has no such number of layers, or these cannot be run by themselves.
    """

    label = "early_exit"
    follows_target = True

    def __init__(
        self,
        model: PreTrainedModel,
        num_layers: int,
        num_nodes: int | None = None,
        width: int | None = None,
        confidence_threshold: float = 0.0,
        samples: bool = False,
    ):
        super().__init__(num_nodes, width, confidence_threshold, samples)
        if not isinstance(model, PreTrainedModel):
            raise TypeError(f"`model` must be a PreTrainedModel, got {type(model).__name__}.")
        most = model.config.get_text_config(decoder=True).num_hidden_layers - 1
        if not is_integer(num_layers) or not 1 <= num_layers <= most:
            raise ValueError(
                f"`num_layers` of {type(model).__name__} must be an integer from 1 to {most}, got {num_layers!r}: all "
                "layers are the target itself."
            )
        decoder = None if model.config.is_encoder_decoder else written_decoder(model)
        if decoder is None:
            raise ValueError(
                f"The first layers of {type(model).__name__} cannot be run by themselves: its structure is not one of "
                "those that are known, or its modules are hooked or replaced. Pass another `assistant`."
            )
        if any(layer.recurrence is not None for layer in decoder.plan.layers[:num_layers]):
            raise ValueError(
                f"The first layers of {type(model).__name__} cannot be run by themselves: some have states, which what "
                "they draft would change. Pass another `assistant`."
            )
        self.model, self.num_layers = model, num_layers
        # Threads that share it may lose drafts, but must not draft over one another's keys and values.
        self._lock = RLock()

    @property
    def name(self) -> str:
        return f"{type(self).__name__}({self.num_layers}, {id(self.model):x})"

    def begin(self, request: SourceRequest) -> None:
        whole = request.forward
        if whole is None:
            raise ValueError(f"{self.name} drafts beside its target only: pass it as `assistant`.")
        if not isinstance(whole, PackedForward):
            raise ValueError(f"{self.name} drafts beside packed forwards only, and this is {type(whole).__name__}.")
        if whole.model is not self.model:
            raise ValueError(f"{self.name} drafts for the model that it was made with only.")
        with self._lock:
            forward = self._forward or EarlyExitForward(whole, self.num_layers)
            if not isinstance(forward, EarlyExitForward) or forward.whole is not whole:
                raise ValueError(f"{self.name} drafts for another engine or call at present: make a new source.")
            self._forward = forward
            super().begin(request)

    def stop(self, request_id: Hashable) -> None:
        with self._lock:
            super().stop(request_id)

    def observe(self, request_id: Hashable, tokens: np.ndarray) -> None:
        state = self._states[request_id]
        state.tokens += tokens.tolist()
        state.num_generated += len(tokens)

    def propose(
        self, request_ids: Sequence[Hashable], max_nodes: Sequence[int], price: LevelPrice | None = None
    ) -> list[DraftTree]:
        with self._lock:
            for name in request_ids:  # a suspended request may go on in another row
                state = self._states[name]
                assert state.request is not None and state.request.row is not None
                state.row = state.request.row
            try:
                return super().propose(request_ids, max_nodes, price)
            finally:  # rows are the target's, which has run nothing of this
                for state in [self._states[name] for name in request_ids]:
                    if state.row.length >= len(state.tokens) - 1:
                        self._own_forward.cut(state.row, len(state.tokens) - 1)

    @property
    def _own_forward(self) -> EarlyExitForward:
        assert isinstance(self._forward, EarlyExitForward), "no request has been started"
        return self._forward

    def _new_forward(self) -> EarlyExitForward:
        raise AssertionError("`begin` makes it for the target's forward")

    def _new_row(self, request: SourceRequest) -> CacheRow:
        assert request.row is not None, "a forward has rows"
        return request.row

    def _prepare(self) -> None:
        self._own_forward.share()

    def _can_grow(self, growth: Growth) -> bool:
        """Return whether the prompt has been run."""
        return growth.state.row.length == len(growth.state.tokens) - 1

    def _max_depth(self, growth: Growth, price: LevelPrice | None) -> int:
        """
        Return the most levels that fit into the row's slot: the memory is the target's, which has reserved its own
        need.
        """
        row = growth.state.row
        room = row.prefix_len + row.stride - len(growth.state.tokens)
        depth = super()._max_depth(growth, price)
        if price is not None and price.widths:
            return min(depth, int(np.count_nonzero(np.cumprod(price.widths).cumsum() <= room)))
        return min(depth, max(room // self._width(price), 0))
