"""transformers' own candidate generators, and anybody else's, as a source for batches."""

import copy
from collections.abc import Hashable, Sequence

import numpy as np
import torch
from transformers.generation import CandidateGenerator

from ..drafts.tree import DraftTree
from .base import TreeCandidateGenerator


class WrappedCandidates(TreeCandidateGenerator):
    """
    Serves a `CandidateGenerator` that knows one sequence at a time. Every request gets a copy of its own, one level
    deep: models are shared, per-sequence state is not.

    Args:
        generator (`CandidateGenerator`): Must not ask for the target's outputs (`requires_model_outputs`).
        device (`torch.device`): Where the generator expects `input_ids`.

    Raises:
        ValueError: if the generator needs the target's outputs.
    """

    def __init__(self, generator: CandidateGenerator, device: torch.device | str = "cpu"):
        if generator.requires_model_outputs:
            raise ValueError(
                f"{type(generator).__name__} needs the target's hidden states (`requires_model_outputs`), which "
                "wrapped candidate generators do not receive. Pass it to transformers' own assisted decoding instead."
            )
        self.generator, self.device = generator, torch.device(device)
        self.default_num_nodes = 32  # a ceiling only: the generator decides how much it drafts
        self._copies: dict[Hashable, CandidateGenerator] = {}
        self._ids: dict[Hashable, np.ndarray] = {}
        self._drafted: dict[Hashable, tuple[np.ndarray, torch.Tensor | None]] = {}

    def start(self, request_id: Hashable, prompt: np.ndarray) -> None:
        generator = copy.copy(self.generator)
        for name, value in vars(generator).items():
            if isinstance(value, dict | list | set):
                setattr(generator, name, copy.copy(value))
        self._copies[request_id], self._ids[request_id] = generator, prompt

    def propose(self, request_ids: Sequence[Hashable], max_nodes: Sequence[int]) -> list[DraftTree]:
        return [self._propose(name, limit) for name, limit in zip(request_ids, max_nodes)]

    def _propose(self, request_id: Hashable, limit: int) -> DraftTree:
        ids = self._ids[request_id]
        candidates, logits = self._copies[request_id].get_candidates(self._tensor(ids))  # type: ignore[arg-type]
        draft = candidates[0, len(ids) :].cpu().numpy()[:limit]
        self._drafted[request_id] = (draft, logits)
        return DraftTree.chain(draft)

    def observe(self, request_id: Hashable, tokens: np.ndarray) -> None:
        self._ids[request_id] = np.concatenate([self._ids[request_id], tokens])
        draft, logits = self._drafted.pop(request_id, (tokens[:0], None))
        matches = draft[: len(tokens)] == tokens[: len(draft)]
        num_matches = len(matches) if matches.all() else int(matches.argmin())
        scores = logits if logits is not None else torch.zeros(1, len(draft), 1)
        ids = self._tensor(self._ids[request_id])
        self._copies[request_id].update_candidate_strategy(ids, scores, num_matches)  # type: ignore[arg-type]

    def stop(self, request_id: Hashable) -> None:
        for state in (self._copies, self._ids, self._drafted):
            state.pop(request_id, None)

    def _tensor(self, ids: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(ids))[None].to(self.device)
