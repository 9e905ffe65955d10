"""MLP speculators as a candidate source."""

import os
from collections.abc import Hashable
from dataclasses import dataclass

import numpy as np
import torch
from transformers import PreTrainedConfig

from ...target_model.forward.ragged import PlannedForward, RaggedForward
from ...target_model.layout.rows import CacheRow, RowInput
from ..committed import HIDDEN_STATES, LAST, Committed
from ..models.draft_growth import DraftState, Growth
from ..models.growing import GrowingCandidates
from ..request import SourceRequest
from .mlp_speculator import MLPSpeculator


@dataclass(eq=False)
class _State(DraftState):
    """Of one request: its newest token, and the hidden state `[1, hidden]` that this was picked by."""

    hidden: torch.Tensor | None = None

    def features(self) -> torch.Tensor | None:
        return self.hidden


class _SpeculatorForward(RaggedForward):
    """Steps of an MLP speculator for the whole batch. Rows hold nothing."""

    def __init__(self, speculator: MLPSpeculator):
        nothing_attends = PreTrainedConfig.from_dict({"hidden_size": speculator.hidden_size})
        super().__init__(nothing_attends, speculator.device, speculator.dtype)
        self.speculator = speculator

    @property
    def device(self) -> torch.device:
        return self.speculator.device

    def _run(self, planned: PlannedForward) -> torch.Tensor:
        states = planned.features
        if states is None:
            states = torch.cat([item.features for item in planned.rows if item.features is not None])
        step = _depth(planned.rows[0])
        planned.hidden, logits = self.speculator(planned.layout.tokens[0], states, step)
        return logits


def _depth(item: RowInput) -> int:
    """How many tokens behind the text those stand that are run."""
    depth, node = 0, item.first_node if item.num_nodes else -1
    while node >= 0:
        depth, node = depth + 1, int(item.tree.parents[node])
    return depth


class MLPSpeculatorCandidates(GrowingCandidates):
    """
    Drafts with an MLP speculator: trees grow step by step, by its own confidence, as deep as it has steps.

    Args:
        heads (`MLPSpeculator`): On the device of the target's output.
        num_nodes, width, confidence_threshold, samples: See `GrowingCandidates`.
    """

    label = "mlp_speculator"
    needs = frozenset({HIDDEN_STATES})
    follows_target = True
    is_learned = True
    hidden_layers = (LAST,)

    def __init__(
        self,
        heads: MLPSpeculator,
        num_nodes: int | None = None,
        width: int | None = None,
        confidence_threshold: float = 0.0,
        samples: bool = False,
    ):
        # Behind a text that it knows one token of, its positions are its steps.
        super().__init__(num_nodes, width, confidence_threshold, samples, num_positions=heads.num_steps)
        self.heads = heads

    @property
    def name(self) -> str:
        path = os.path.basename(self.heads.name_or_path)
        return f"{type(self).__name__}({path}, {id(self.heads):x})"  # heads of one path may differ

    def _new_forward(self) -> _SpeculatorForward:
        return _SpeculatorForward(self.heads)

    def _new_state(self, row: CacheRow, prompt: np.ndarray) -> _State:
        return _State(row, prompt[-1:].tolist())

    def _can_grow(self, growth: Growth) -> bool:
        return growth.state.features() is not None

    def begin(self, request: SourceRequest) -> int:
        super().begin(request)
        return request.num_cached  # only the newest hidden state is used

    def observe(self, request_id: Hashable, committed: Committed) -> None:
        state, hidden = self._states[request_id], committed.hidden_states.get(LAST)
        assert isinstance(state, _State)
        state.tokens = [*state.tokens, *committed.tokens.tolist()][-1:]
        state.num_generated += len(committed.tokens)
        if hidden is not None and len(hidden):
            state.hidden = hidden[-1:]
