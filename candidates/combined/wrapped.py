"""transformers' own candidate generators, and any others with their interface, as a source for batches."""

import copy
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import Cache
from transformers.generation import CandidateGenerator, PromptLookupCandidateGenerator
from transformers.modeling_outputs import CausalLMOutputWithPast

from ...drafts.tree import DraftTree
from ..base import TreeCandidateGenerator
from ..committed import HIDDEN_STATES, LAST, SCORES, Committed

# Of these, what a step came to is not looked at.
_DEAF = (CandidateGenerator, PromptLookupCandidateGenerator)


class _Step(NamedTuple):
    """A step that a generator which needs the target's outputs has not drafted from yet."""

    length: int  # of the text that it ended
    states: dict[int, torch.Tensor]
    num_matches: int


@dataclass
class _Sequence:
    """A request: its own generator, its text, and the draft after it."""

    generator: CandidateGenerator
    ids: np.ndarray
    drafted: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    pieces: list[dict[int, torch.Tensor]] = field(default_factory=list)  # hidden states of a prompt that is being run
    num_states: int = 0
    steps: list[_Step] = field(default_factory=list)


class WrappedCandidates(TreeCandidateGenerator):
    """
    Serves a `CandidateGenerator` that drafts for one sequence at a time. Every request gets a copy of its own, one
    level deep: models are shared, per-sequence state is not.

    A generator that asks for the target's outputs (`requires_model_outputs`, as those of transformers for multi-token
    prediction and DFlash do) gets the hidden states that it names in `model_kwargs_overrides`. It drafts from the
    second step on, and once for every step, as in transformers' own loop, also where it was not asked.

    Args:
        generator (`CandidateGenerator`): Drafts.
        device (`torch.device`): Device on which the generator expects `input_ids`.
        num_layers (`int`, *optional*): Decoder layers of the target, for generators that ask for hidden states by their
            numbers.

    Raises:
        ValueError: if the generator needs more of the target's outputs than hidden states.
    """

    def __init__(
        self, generator: CandidateGenerator, device: torch.device | str = "cpu", num_layers: int | None = None
    ):
        self.generator, self.device, self.num_layers = generator, torch.device(device), num_layers
        self.label = type(generator).__name__
        self.default_num_nodes = 32  # a ceiling only: the generator decides how much it drafts
        needs = set()
        if type(generator).update_candidate_strategy not in [item.update_candidate_strategy for item in _DEAF]:
            needs.add(SCORES)
        if generator.requires_model_outputs:
            needs.add(HIDDEN_STATES)
            self.hidden_layers = _asked_layers(generator, num_layers)
        self.needs, self.follows_target = frozenset(needs), generator.requires_model_outputs
        self.observes_every_step = generator.requires_model_outputs
        self._sequences: dict[Hashable, _Sequence] = {}

    @property
    def name(self) -> str:
        return f"{type(self).__name__}({type(self.generator).__name__})"

    def start(self, request_id: Hashable, prompt: np.ndarray) -> None:
        self._sequences[request_id] = _Sequence(_copy(self.generator), prompt)

    def propose(self, request_ids: Sequence[Hashable], max_nodes: Sequence[int]) -> list[DraftTree]:
        return [self._propose(self._sequences[name], limit) for name, limit in zip(request_ids, max_nodes)]

    def _propose(self, sequence: _Sequence, limit: int) -> DraftTree:
        if not self.generator.requires_model_outputs:
            self._draft(sequence, len(sequence.ids))
        while sequence.steps:
            self._draft(sequence, sequence.steps[0].length, **self._outputs(sequence.steps[0]))
            del sequence.steps[0]  # not before: a generator that fails has failed for good
        return DraftTree.chain(sequence.drafted[:limit])

    def _draft(self, sequence: _Sequence, length: int, **outputs: Any) -> None:
        ids: Any = self._tensor(sequence.ids[:length])
        candidates, _ = sequence.generator.get_candidates(ids, **outputs)
        sequence.drafted = candidates[0, length:].cpu().numpy()

    def _outputs(self, step: _Step) -> dict[str, Any]:
        """Return the further arguments that transformers' loop gives to generators which need the target's outputs."""
        numbered = [step.states.get(layer) for layer in (*range(self.num_layers or 0), LAST)]
        states: Any = tuple(None if item is None else item[None] for item in numbered)
        return {
            "model_kwargs": {
                "position_ids": torch.arange(step.length, device=self.device)[None],
                "attention_mask": None,
            },
            "model_outputs": CausalLMOutputWithPast(hidden_states=states),
            "is_first_iteration": False,
            "n_last_matches": step.num_matches,
        }

    def observe(self, request_id: Hashable, tokens: np.ndarray | Committed) -> None:
        step = Committed.of(tokens)
        sequence = self._sequences[request_id]
        sequence.ids = np.concatenate([sequence.ids, step.tokens])
        if HIDDEN_STATES in self.needs:
            self._take(sequence, step)
        if not len(step.tokens):
            return
        if step.scores is None:  # as many lines as there would be
            scores = torch.zeros(1 + len(sequence.drafted), 1)
            num_matches = _num_matches(sequence.drafted, step.tokens)
        else:
            scores, num_matches = step.scores, len(step.path)
        ids = self._tensor(sequence.ids)
        sequence.drafted = sequence.drafted[:0]
        sequence.generator.update_candidate_strategy(ids, scores[None], num_matches)  # type: ignore[arg-type]

    def _take(self, sequence: _Sequence, step: Committed) -> None:
        if step.start < sequence.num_states:  # the text was run anew
            sequence.generator, sequence.pieces, sequence.steps = _copy(self.generator), [], []
        sequence.pieces.append(dict(step.hidden_states))
        sequence.num_states = step.start + len(step.hidden_states[self.hidden_layers[0]])
        if len(step.tokens):
            states = {layer: torch.cat([item[layer] for item in sequence.pieces]) for layer in self.hidden_layers}
            sequence.steps.append(_Step(len(sequence.ids), states, len(step.tokens) - 1))
            sequence.pieces = []

    def stop(self, request_id: Hashable) -> None:
        self._sequences.pop(request_id, None)

    def _tensor(self, ids: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(ids))[None].to(self.device)


def _copy(generator: CandidateGenerator) -> CandidateGenerator:
    own = copy.copy(generator)
    for name, value in vars(own).items():
        if isinstance(value, dict | list | set):
            setattr(own, name, copy.copy(value))
        elif isinstance(value, Cache):
            setattr(own, name, copy.deepcopy(value))
    return own


def _asked_layers(generator: CandidateGenerator, num_layers: int | None) -> tuple[int, ...]:
    """Return the hidden states that a generator asks transformers' loop for, in this project's numbers."""
    asked = dict(getattr(generator, "model_kwargs_overrides", {}))
    selection = asked.pop("output_hidden_states", True)
    if asked:
        raise ValueError(
            f"{type(generator).__name__} needs {sorted(asked)} of the target, and only hidden states can be had. Pass "
            "it to transformers' own assisted decoding instead."
        )
    if selection == LAST:
        return (LAST,)
    if num_layers is None:
        raise ValueError(
            f"{type(generator).__name__} asks for hidden states by numbers: say how many layers the target has "
            "(`num_layers=...`)."
        )
    numbers = range(num_layers + 1) if selection is True else [selection] if isinstance(selection, int) else selection
    return tuple(LAST if number % (num_layers + 1) == num_layers else number % (num_layers + 1) for number in numbers)


def _num_matches(draft: np.ndarray, tokens: np.ndarray) -> int:
    """Return the number of tokens of a draft that were accepted."""
    matches = draft[: len(tokens)] == tokens[: len(draft)]
    return len(matches) if matches.all() else int(matches.argmin())
