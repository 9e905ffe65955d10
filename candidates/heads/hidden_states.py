"""Sources whose rows hold what a drafter computes of the target's hidden states."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch

from ...drafts.tree import DraftTree
from ...target_model.forward.ragged import RaggedForward
from ...target_model.layout.rows import CacheRow, RowInput
from ..committed import HIDDEN_STATES, Committed
from ..models.draft_growth import DraftState
from ..models.rows import RowCandidates
from ..request import SourceRequest

# Hidden states that are kept for a draft, which may never be wanted: more tokens than these, of more bytes, go into the
# row, which takes a small model as long as some of its steps.
_MOST_PENDING, _MOST_BYTES = 256, 2**23


@dataclass(eq=False)
class KnownStates(DraftState):
    """
    State of one request: its text without the first token, and the target's hidden states `[k, hidden]` of the tokens
    from `start` on; those of earlier tokens have gone into the drafter's row, which holds at least `start` tokens.
    """

    first_token: int = -1
    start: int = 0
    pieces: list[torch.Tensor] = field(default_factory=list)  # of the hidden states, in order
    num_known: int = 0  # tokens up to the last one whose hidden state is known

    def set_known(self, start: int, *pieces: torch.Tensor) -> None:
        """Replace the hidden states by these of the tokens from `start` on."""
        self.start, self.pieces, self.num_known = start, list(pieces), start + sum(map(len, pieces))

    @property
    def known(self) -> torch.Tensor | None:
        """The hidden states, joined when they are read: not at every step that is decoded without a draft."""
        if len(self.pieces) > 1:
            self.pieces = [torch.cat(self.pieces)]
        return self.pieces[0] if self.pieces else None

    @property
    def num_pending(self) -> int:
        """Number of hidden states that have not gone into the row."""
        return self.num_known - self.row.length

    def features(self) -> torch.Tensor | None:
        known = self.known
        return None if known is None else known[self.row.length - self.start :]

    def input(self) -> RowInput:
        """Return the row's input with all these."""
        feed = np.array(self.tokens[self.row.length : self.num_known], np.int64)
        return RowInput(self.row, feed, features=self.features())

    def shared(self, other: "KnownStates", num_ahead: int) -> int:
        """
        Return the number of tokens at the beginning whose hidden states the other has too: both texts, with the
        `num_ahead` tokens after each of these, are the same.
        """
        own, others = self.tokens, other.tokens
        if self.first_token != other.first_token:
            return 0
        num = min(len(own), len(others))
        differs = np.array(own[:num]) != np.array(others[:num])
        num_same = 1 + (int(differs.argmax()) if differs.any() else num)
        return min(num_same - num_ahead, other.num_known)

    def take(self, states: torch.Tensor, start: int) -> None:
        """
        Add the hidden states of the tokens from `start` on, and drop those that have gone into the row. If states
        between the known ones and these are missing, they are of no use.
        """
        if start > self.num_known:
            return
        first = min(self.row.length, start)
        if first == self.start and start == self.num_known:
            self.pieces.append(states)
            self.num_known += len(states)
            return
        known = self.known
        kept = states[:0] if known is None else known[max(first - self.start, 0) : max(start - self.start, 0)]
        self.set_known(first, torch.cat([kept, states]) if len(kept) else states)

    def let_go(self) -> None:
        """Keep only the newest of the hidden states that have gone into the row, since drafts begin with it."""
        start = max(min(self.row.length, self.num_known) - 1, self.start)
        while self.pieces and self.start + len(self.pieces[0]) <= start:
            self.start += len(self.pieces.pop(0))
        if self.start < start:
            self.pieces[0], self.start = self.pieces[0][start - self.start :].clone(), start


class HiddenStateCandidates(RowCandidates):
    """
    A source that keeps keys and values of every token of a text, computed from the target's hidden states.

    States of accepted tokens are kept until the next draft, and go into the row with those of all other rows; those of
    long prompts, and of rows that are decoded without drafts, go into it in pieces. Rows of ended requests stay as long
    as further requests may begin with their texts.

    Args:
        heads (`LearnedDrafter`): On the device of the target's output; has `hidden_layers` and `target_size`.
        arguments, options: Of the class after this one.
    """

    needs = frozenset({HIDDEN_STATES})
    follows_target = True
    is_learned = True
    _num_ahead = 0  # tokens after a hidden state's own that go into the row with it

    def __init__(self, heads: Any, *arguments: Any, **options: Any):
        super().__init__(*arguments, **options)
        self.heads, self.hidden_layers, self.label = heads, heads.hidden_layers, heads.label
        self._ended: dict[Hashable, KnownStates] = {}  # whose keys and values may serve others

    @property
    def name(self) -> str:
        return f"{type(self.heads).__name__}({self.heads.identity})"

    def _new_state(self, row: CacheRow, prompt: np.ndarray) -> KnownStates:
        first, *rest = prompt.tolist()
        return KnownStates(row, rest, first_token=first)

    @torch.no_grad()
    def bytes_per_token(self) -> int:
        """Measure the keys and values by a forward of one token."""
        forward, heads = self._new_forward(), self.heads
        assert isinstance(forward, RaggedForward)
        shape = 1, len(self.hidden_layers) * heads.target_size
        states = torch.zeros(shape, dtype=heads.dtype, device=heads.device)
        forward.forward([RowInput(forward.add(), np.zeros(1, np.int64), features=states)])
        return forward.cache.bytes_per_line

    @property
    def _ragged(self) -> RaggedForward:
        assert isinstance(self._forward, RaggedForward), "no request has been started"
        return self._forward

    def begin(self, request: SourceRequest) -> int:
        """Begin a request with the results of `request.shares_with`, as far as both texts are the same."""
        super().begin(request)
        request.on_release.append(partial(self._release, request.request_id))
        state, other = self._state(request.request_id), self._known_state(request.shares_with)
        num = 0 if other is None else min(request.num_cached, state.shared(other, self._num_ahead))
        if other is None or not num:
            return 0
        start = min(num, other.row.length)
        known = None if num == start else other.known
        state.set_known(start, *([] if known is None else [known[start - other.start : num - other.start].clone()]))
        self._ragged.reuse(state.row, other.row, start)
        return num

    @torch.no_grad()
    def observe(self, request_id: Hashable, committed: Committed) -> None:
        state = self._state(request_id)
        state.nodes = DraftTree.empty()
        state.tokens += committed.tokens.tolist()
        state.num_generated += len(committed.tokens)
        if committed.start < state.row.length:
            self._ragged.cut(state.row, committed.start)
        # Layers may lie on several devices.
        device = self.heads.device
        states = [committed.hidden_states[layer].to(device) for layer in self.hidden_layers]
        state.take(torch.cat(states, dim=1), committed.start)  # a copy, also of one layer: it is a part of all rows'
        num, known = state.num_pending, state.pieces
        if num > _MOST_PENDING and num * known[-1].shape[1] * known[-1].itemsize > _MOST_BYTES:
            self._run_pending([state])  # not to be kept until a long prompt or a pause in drafting ends

    def _run_pending(self, states: Sequence[KnownStates]) -> None:
        """Feed the hidden states that have not gone into the rows of some requests."""
        pending = [state for state in states if state.num_pending > 0]
        if pending:
            self._ragged.forward([state.input() for state in pending])
            for state in pending:
                state.let_go()

    def _state(self, request_id: Hashable) -> KnownStates:
        state = self._known_state(request_id)
        assert state is not None, "a request that has been started"
        return state

    def _known_state(self, request_id: Hashable | None) -> KnownStates | None:
        """Return the state of a running or ended request; None where other sources drafted for it."""
        state = self._states.get(request_id) or self._ended.get(request_id)
        assert state is None or isinstance(state, KnownStates)
        return state

    def stop(self, request_id: Hashable) -> None:
        state = self._states.pop(request_id, None)
        if isinstance(state, KnownStates):
            self._remove_ended(request_id)
            state.request = None
            state.let_go()
            self._ended[request_id] = state

    def _release(self, request_id: Hashable) -> None:
        """Drop what was kept of an ended request, since no further one can share its keys and values."""
        self._remove_ended(request_id)
        if not self._states and not self._ended:
            self._give_up_forward()

    def _remove_ended(self, request_id: Hashable) -> None:
        state = self._ended.pop(request_id, None)
        if state is not None and self._forward is not None:
            self._forward.remove(state.row)
