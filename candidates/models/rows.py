"""Sources with a forward of their own, in whose cache every request has a row."""

from abc import abstractmethod
from collections.abc import Hashable

import numpy as np

from ...sampling.processors import ScoreProcessing
from ...target_model.forward.chains import ChainForward
from ...target_model.forward.ragged import RaggedForward
from ...target_model.layout.rows import CacheRow
from ..base import TreeCandidateGenerator
from ..request import SourceRequest
from .draft_growth import DraftState


class RowCandidates(TreeCandidateGenerator):
    """
    A source with a forward of its own, which is made for the first request and dropped after the last. Rows of the
    forward's cache hold each request's text.
    """

    def __init__(self) -> None:
        self._forward: RaggedForward | ChainForward | None = None
        self._states: dict[Hashable, DraftState] = {}

    @abstractmethod
    def _new_forward(self) -> RaggedForward | ChainForward:
        """Return the forward that drafts; it is dropped when no request is left."""

    def _new_state(self, row: CacheRow, prompt: np.ndarray) -> DraftState:
        return DraftState(row, prompt.tolist())

    def _new_row(self, request: SourceRequest) -> CacheRow:
        """Return an empty row for the request."""
        assert self._forward is not None
        return self._forward.add()

    def begin(self, request: SourceRequest) -> int | None:
        self._forward = self._forward or self._new_forward()
        state = self._new_state(self._new_row(request), request.prompt)
        state.request, state.seed = request, request.seed
        if request.seed is not None:  # else the arg max of the draft's own scores
            state.processing = ScoreProcessing(request.processors)
        self._states[request.request_id] = state
        return None

    def stop(self, request_id: Hashable) -> None:
        state = self._states.pop(request_id, None)
        if state is not None and self._forward is not None:
            self._forward.remove(state.row)
        if not self._states:
            self._give_up_forward()

    def _give_up_forward(self) -> None:
        """Drop the forward: no request is left."""
        self._forward = None
