"""Results of the target that sources get with the tokens of a step: hidden states, scores, and its likeliest tokens."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import torch

from ..drafts.tree import DraftTree

HIDDEN_STATES, SCORES = "hidden_states", "scores"
LAST = -1  # the last hidden state after the final norm, which the head reads


class Likeliest(NamedTuple):
    """
    The target's k likeliest next tokens after the last committed token and after each node of a draft, best first; at
    least as many as the source named, unless the vocabulary is smaller. Nodes may turn out wrong. On CPUs, greedy steps
    may rank them by scores that are nearly right (`cpu/screening.py`): the first need not be the target's own pick.

    Args:
        before, tokens (`np.ndarray` of shape `[n]`, int64): The tokens that are followed, and those before them (-1:
            there is none).
        following (`np.ndarray` of shape `[n, k]`, integers): Likeliest next tokens.
        shares (`np.ndarray` of shape `[n, k]`, float32): Probabilities among the k, before any processor.
    """

    before: np.ndarray
    tokens: np.ndarray
    following: np.ndarray
    shares: np.ndarray


@dataclass(frozen=True, eq=False)
class Committed:
    """
    Tokens that a step committed, with the target's results that a source has asked for (`needs`, `num_likeliest`).

    Every token of the text has hidden states, the prompt's included, and each is given once and in order:
    `hidden_states[layer][j]` is that of the token at position `start + j` of the text (prompt, then generated tokens,
    without padding). The target picked the *next* token by it, so the newest token of a text has none yet, and while a
    text is generated there is one for each of `tokens`: that of the token before it. A prompt's come with the first
    generated token, or, where the prompt is run in pieces, in several calls, of which the earlier ones have no
    `tokens`.

    `start` is where the last call ended. Where it is less, the text was run anew from there on, because the target's
    weights have changed or another source needed more of it: drop what was kept of these positions.

    Tensors lie on the target's device. They stay as they are, and must not be written to.

    Args:
        tokens (`np.ndarray` of shape `[n]`, int64): Tokens committed since the last call: those of the accepted path,
            and the bonus token after it. Those of steps that did not ask the source come together.
        path (`np.ndarray` of shape `[n - 1]`, int64): The nodes of `tree` that were accepted; shorter or empty where
            nothing was verified, or steps come together.
        hidden_states (mapping of `int` to `torch.Tensor` of shape `[m, hidden_size]`): By layer, see
            `TreeCandidateGenerator.hidden_layers`; in the model's dtype. Empty unless they are needed.
        scores (`torch.Tensor` of shape `[1 + nodes, vocab_size]`, *optional*): The target's logits, float32, before any
            processor: after the last committed token, then after each node of `tree`. None unless they are needed, and
            while only a prompt is run.
        tree (`DraftTree`): The draft that was verified: the nodes of the proposal that the length policy selected.
        start (`int`): Position in the text of the first hidden state.
        likeliest (`Likeliest`, *optional*): The target's likeliest next tokens. None in steps that did not compute
            them, and where no source has asked for them.
    """

    tokens: np.ndarray
    path: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    hidden_states: Mapping[int, torch.Tensor] = field(default_factory=dict)
    scores: torch.Tensor | None = None
    tree: DraftTree = field(default_factory=DraftTree.empty)
    start: int = 0
    likeliest: Likeliest | None = None

    @classmethod
    def of(cls, tokens: "np.ndarray | Committed") -> "Committed":
        """Return `tokens` as a `Committed`, which they may already be."""
        return tokens if isinstance(tokens, cls) else cls(tokens)  # type: ignore[arg-type]

    def only(self, layers: Sequence[int], scores: bool) -> "Committed":
        """Return the same without hidden states of other layers, and without scores unless asked for."""
        if len(layers) == len(self.hidden_states) and (scores or self.scores is None):
            return self
        states = {layer: states for layer, states in self.hidden_states.items() if layer in layers}
        return replace(self, hidden_states=states, scores=self.scores if scores else None)
