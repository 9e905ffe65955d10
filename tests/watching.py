"""A source that keeps what it is shown of hidden states and scores, and compares all of it with plain forwards."""

from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
import torch

from hf_smartspec import Committed, DraftTree, TreeCandidateGenerator

from .sources import remembers_errors

TOLERANCE = 1e-5


class Watching(TreeCandidateGenerator):
    """
    Drafts as another source does, which is shown tokens only.

    Args:
        source (`TreeCandidateGenerator`): Drafts.
        layers (sequence of `int`): Of which hidden states are asked for.
        scores (`bool`): Whether scores are asked for, too.
        keeps (`bool`): Whether states are kept for prompts that begin alike, until `on_release`.
    """

    def __init__(
        self,
        source: TreeCandidateGenerator,
        layers: Sequence[int] = (-1, 0, 1),
        scores: bool = True,
        keeps: bool = True,
    ):
        self.source, self.keeps = source, keeps
        self.default_num_nodes, self.hidden_layers = source.default_num_nodes, tuple(layers)
        self.needs = frozenset({"hidden_states"} if layers else ()) | ({"scores"} if scores else set())
        self.texts: dict[Hashable, list[int]] = {}
        self.states: dict[Hashable, dict[int, torch.Tensor]] = {}
        self.ended: list[tuple[list[int], dict[int, torch.Tensor]]] = []  # texts and states
        self.steps: list[tuple[list[int], Committed]] = []  # with the text before
        self.reused: list[int] = []
        self.num_restarts = 0
        self.errors: list[Exception] = []  # which the engine survives

    @remembers_errors
    def begin(self, request):
        name, length = request.request_id, request.num_cached
        kept = self.states.get(request.shares_with, {}) if self.keeps else {}
        self.texts[name] = request.prompt.tolist()
        self.states[name] = {layer: states[:length] for layer, states in kept.items()}
        self.source.begin(request)
        request.on_release.append(lambda: self.states.pop(name, None))
        if length:
            self.reused.append(min(length, self.num_states(name)))
        return self.reused[-1] if length else 0

    def num_states(self, request_id) -> int:
        return min([len(self.states[request_id].get(layer, ())) for layer in self.hidden_layers], default=0)

    def propose(self, request_ids, max_nodes):
        return self.source.propose(request_ids, max_nodes)

    @remembers_errors
    def observe(self, request_id, committed):
        assert isinstance(committed, Committed) and committed.tokens.dtype == np.int64
        if self.hidden_layers:
            assert set(committed.hidden_states) == set(self.hidden_layers)
            assert len({len(states) for states in committed.hidden_states.values()}) == 1
            self.num_restarts += committed.start < self.num_states(request_id)
            assert committed.start <= self.num_states(request_id), "a state was left out"
        known = self.states[request_id]
        for layer, states in committed.hidden_states.items():
            known[layer] = torch.cat([known.get(layer, states)[: committed.start], states])
        self.steps.append((list(self.texts[request_id]), committed))
        self.texts[request_id] += committed.tokens.tolist()
        if self.hidden_layers and len(committed.tokens):
            assert self.num_states(request_id) == len(self.texts[request_id]) - 1, "the newest token has no state yet"
        if len(committed.tokens):
            self.source.observe(request_id, committed.tokens)

    def stop(self, request_id):
        self.source.stop(request_id)
        if request_id in self.texts:
            self.ended.append((self.texts.pop(request_id), self.states[request_id]))

    # What tests ask afterwards

    @property
    def num_accepted(self) -> int:
        return sum(len(step.path) for _, step in self.steps)

    def check(self, model: Any, **inputs: Any) -> None:
        """Every vector and every score that was shown is that of a plain forward of the same text."""
        assert not self.errors, self.errors[0]
        assert self.ended and not self.texts, "nothing was decoded, or something still runs"
        for text, states in self.ended:
            expected = plain_states(model, text, self.hidden_layers, **inputs)
            for layer in self.hidden_layers:
                num = len(states.get(layer, ()))
                if num:
                    error = (states[layer] - expected[layer][:num]).abs().max()
                    assert error <= TOLERANCE * max(float(expected[layer].abs().max()), 1), (layer, float(error))
        for text, step in self.steps:
            self._check_step(model, text, step, **inputs)

    def _check_step(self, model: Any, text: list[int], step: Committed, **inputs: Any) -> None:
        if len(step.tree) or len(step.tokens) < 2:  # otherwise, several steps without drafts that come together
            followed = step.tree.tokens[step.path[: max(len(step.tokens) - 1, 0)]].tolist()
            assert followed == step.tokens[:-1].tolist()
        assert step.tree.parents[step.path].tolist() == [-1, *step.path[:-1].tolist()][: len(step.path)]
        if "scores" not in self.needs or not len(step.tokens):
            assert step.scores is None
            return
        assert step.scores.shape[0] == 1 + len(step.tree) and step.scores.dtype == torch.float32
        for node in range(-1, len(step.tree)):
            expected = plain_logits(model, text + path_to(step.tree, node), **inputs)
            error = (step.scores[node + 1] - expected).abs().max()
            assert error <= TOLERANCE * max(float(expected.abs().max()), 1), float(error)


def path_to(tree: DraftTree, node: int) -> list[int]:
    tokens: list[int] = []
    while node >= 0:
        tokens, node = [int(tree.tokens[node]), *tokens], int(tree.parents[node])
    return tokens


@torch.no_grad()
def plain_logits(model: Any, text: Sequence[int], **inputs: Any) -> torch.Tensor:
    name = "decoder_input_ids" if model.config.is_encoder_decoder else "input_ids"
    return model(**{name: torch.tensor([list(text)])}, **inputs).logits[0, -1].float()


@torch.no_grad()
def plain_states(model: Any, text: Sequence[int], layers: Sequence[int], **inputs: Any) -> dict[int, torch.Tensor]:
    """As transformers returns them; of the last layer only what is behind the norm."""
    name = "decoder_input_ids" if model.config.is_encoder_decoder else "input_ids"
    output = model(**{name: torch.tensor([list(text)])}, output_hidden_states=True, **inputs)
    states = output.decoder_hidden_states if model.config.is_encoder_decoder else output.hidden_states
    return {layer: states[layer][0] for layer in layers}
