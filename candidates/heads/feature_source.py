"""The source that drafts with the target's features and a `FeatureDrafter`."""

from collections.abc import Hashable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from ...drafts.tree import DraftTree
from ...target_model.drafters.features import FeatureForward
from ...target_model.layout.rows import CacheRow, RowInput
from ..committed import HIDDEN_STATES, Committed
from ..models.draft_growth import DraftState, Growth
from ..models.growing import GrowingCandidates
from ..request import SourceRequest
from .learned import FeatureDrafter

_MOST_PENDING = 256  # hidden states that are kept for a draft; more go into the row


@dataclass(eq=False)
class _State(DraftState):
    """
    State of one request: its text without the first token, which is what the drafter's row holds, and the target's
    hidden states `[k, hidden]` of the tokens from `start` on; those of earlier tokens have gone into the row, which
    holds at least `start` tokens.
    """

    first_token: int = -1
    start: int = 0
    known: torch.Tensor | None = None

    @property
    def num_known(self) -> int:
        return self.start + (0 if self.known is None else len(self.known))

    @property
    def num_pending(self) -> int:
        """Number of hidden states that have not gone into the row."""
        return self.num_known - self.row.length

    def features(self) -> torch.Tensor | None:
        return None if self.known is None else self.known[self.row.length - self.start :]

    def shared(self, other: "_State") -> int:
        """
        Return the number of tokens at the beginning whose hidden states the other has too: both texts, with the token
        after each of these, are the same.
        """
        own, others = self.tokens, other.tokens
        if self.first_token != other.first_token:
            return 0
        num = min(len(own), len(others))
        differs = np.array(own[:num]) != np.array(others[:num])
        return min(int(differs.argmax()) if differs.any() else num, other.num_known)

    def take(self, states: torch.Tensor, start: int) -> None:
        """
        Add the hidden states of the tokens from `start` on, and drop those that have gone into the row. If states
        between the known ones and these are missing, they are of no use.
        """
        if start > self.num_known:
            return
        first = min(self.row.length, start)
        if self.known is not None:
            kept = self.known[max(first - self.start, 0) : max(start - self.start, 0)]
            states = torch.cat([kept, states]) if len(kept) else states
        self.start, self.known = first, states

    def let_go(self) -> None:
        """Keep only the newest of the hidden states that have gone into the row, since drafts begin with it."""
        if self.known is not None:
            start = max(min(self.row.length, self.num_known) - 1, self.start)
            self.start, self.known = start, self.known[start - self.start :].clone()


class FeatureCandidates(GrowingCandidates):
    """
    Drafts with a `FeatureDrafter`, such as EAGLE's heads: trees grow level by level, by the drafter's own confidence.

    Its row of keys and values ends with the text: what it computed for a draft from features of its own is computed
    anew from the target's as soon as these are known.

    Args:
        heads (`FeatureDrafter`): On the device of the target's output.
        num_nodes, width, confidence_threshold, samples: See `GrowingCandidates`.
    """

    needs = frozenset({HIDDEN_STATES})
    follows_target = True
    is_learned = True

    def __init__(
        self,
        heads: FeatureDrafter,
        num_nodes: int | None = None,
        width: int | None = None,
        confidence_threshold: float = 0.0,
        samples: bool = False,
    ):
        super().__init__(num_nodes, width, confidence_threshold, samples, vocab_size=heads.vocab_size)
        self.heads, self.hidden_layers, self.label = heads, heads.hidden_layers, heads.label
        self._ended: dict[Hashable, _State] = {}  # whose keys and values may serve others

    @property
    def name(self) -> str:
        return f"{type(self.heads).__name__}({self.heads.identity})"

    @property
    def _token_ids(self) -> torch.Tensor | None:
        return self.heads.token_ids

    @torch.no_grad()
    def bytes_per_token(self) -> int:
        """Measure the keys and values by a forward of one token."""
        forward, heads = FeatureForward(self.heads), self.heads
        shape = 1, len(self.hidden_layers) * heads.target_size
        states = torch.zeros(shape, dtype=heads.dtype, device=heads.device)
        forward.forward([RowInput(forward.add(), np.zeros(1, np.int64), features=states)])
        return forward.cache.bytes_per_line

    def _new_forward(self) -> FeatureForward:
        return FeatureForward(self.heads)

    def _new_state(self, row: CacheRow, prompt: np.ndarray) -> _State:
        first, *rest = prompt.tolist()
        return _State(row, rest, first_token=first)

    def _can_grow(self, growth: Growth) -> bool:
        state = growth.state
        assert isinstance(state, _State)
        # The last token is fed anew if need be: another's row may have brought its keys and values, and no more of it.
        first = min(state.row.length, len(state.tokens) - 1)
        return state.num_known == len(state.tokens) > 0 and state.start <= first

    def begin(self, request: SourceRequest) -> int:
        """Begin a request with the results of `request.shares_with`, as far as both texts are the same."""
        super().begin(request)
        request.on_release.append(partial(self._release, request.request_id))
        state, other = self._state(request.request_id), self._known_state(request.shares_with)
        num = 0 if other is None else min(request.num_cached, state.shared(other))
        if other is None or not num:
            return 0
        assert isinstance(self._forward, FeatureForward)
        state.start = min(num, other.row.length)
        if num > state.start and other.known is not None:
            state.known = other.known[state.start - other.start : num - other.start].clone()
        self._forward.reuse(state.row, other.row, state.start)
        return num

    @torch.no_grad()
    def observe(self, request_id: Hashable, committed: Committed) -> None:
        state = self._state(request_id)
        state.nodes = DraftTree.empty()
        state.tokens += committed.tokens.tolist()
        state.num_generated += len(committed.tokens)
        if committed.start < state.row.length:
            self._cut(state, committed.start)
        # Layers may lie on several devices.
        states = [committed.hidden_states[layer].to(self.heads.device) for layer in self.hidden_layers]
        state.take(states[0] if len(states) == 1 else torch.cat(states, dim=1), committed.start)
        if not len(committed.tokens) or state.num_pending > _MOST_PENDING:
            self._run_pending(state)

    def _run_pending(self, state: _State) -> None:
        """
        Feed hidden states to the row, so that they need not be kept until a long prompt or a pause in drafting ends.
        """
        forward, features = self._forward, state.features()
        if features is not None and len(features):
            assert forward is not None
            feed = np.array(state.tokens[state.row.length : state.num_known], np.int64)
            forward.forward([RowInput(state.row, feed, features=features)])
            state.let_go()

    def _cut(self, state: _State, length: int) -> None:
        assert self._forward is not None
        self._forward.cut(state.row, length)

    def _state(self, request_id: Hashable) -> _State:
        state = self._known_state(request_id)
        assert state is not None, "a request that has been started"
        return state

    def _known_state(self, request_id: Hashable | None) -> _State | None:
        """Return the state of a running or ended request; None where other sources drafted for it."""
        state = self._states.get(request_id) or self._ended.get(request_id)
        assert state is None or isinstance(state, _State)
        return state

    def stop(self, request_id: Hashable) -> None:
        state = self._states.pop(request_id, None)
        if isinstance(state, _State):
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
