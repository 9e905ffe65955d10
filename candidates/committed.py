"""What sources are shown of a step beside its tokens: the target's hidden states and scores."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import torch

from ..drafts.tree import DraftTree

HIDDEN_STATES, SCORES = "hidden_states", "scores"
LAST = -1  # the last hidden state behind the final norm, which the head reads


class Likeliest(NamedTuple):
    """
    The k tokens that the target thinks likeliest to follow others, best first: at least as many as the source named,
    unless the vocabulary is smaller.

    Args:
        before, tokens (`np.ndarray` of shape `[n]`, int64): The others, and those before them (-1: there is none).
        following (`np.ndarray` of shape `[n, k]`, integers): What may follow them.
        shares (`np.ndarray` of shape `[n, k]`, float32): Probabilities among the k, before any processor.
    """

    before: np.ndarray
    tokens: np.ndarray
    following: np.ndarray
    shares: np.ndarray


@dataclass(frozen=True, eq=False)
class Committed:
    """
    What `observe` gets in sources with `needs`.

    Hidden states come of every token of the text, prompt included, each once and in order: `hidden_states[layer][j]` is
    that of the token at position `start + j` of the text (prompt, then generated tokens, without padding). It is what
    the target picked the *next* token by, so the newest token of a text has none yet, and while a text goes on there is
    one for each of `tokens`: that of the token before it. A prompt's come with the first generated token, or, where it
    is run in pieces, in several calls, of which the earlier ones have no `tokens`.

    `start` is where the last call ended. Where it is less, the text was run anew from there on, because the target's
    weights have changed or because some other source could not do without: what was kept of these positions counts no
    more.

    Tensors lie on the target's device. They stay as they are, and are not to be written to.

    Args:
        tokens (`np.ndarray` of shape `[n]`, int64): Tokens committed since the last call: those of the accepted path,
            and the target's own behind it.
        path (`np.ndarray` of shape `[n - 1]`, int64): The nodes of `tree` that were accepted; shorter or empty where
            nothing was verified.
        hidden_states (mapping of `int` to `torch.Tensor` of shape `[m, hidden_size]`): By layer, see
            `TreeCandidateGenerator.hidden_layers`; in the model's dtype. Empty where they are no need.
        scores (`torch.Tensor` of shape `[1 + nodes, vocab_size]`, *optional*): The target's logits, float32, before any
            processor: behind the last committed token, then behind each node of `tree`. None where they are no need,
            and while only a prompt is run.
        tree (`DraftTree`): The draft that was verified: what the length policy has left of the proposal.
        start (`int`): Position in the text of the first hidden state.
    """

    tokens: np.ndarray
    path: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    hidden_states: Mapping[int, torch.Tensor] = field(default_factory=dict)
    scores: torch.Tensor | None = None
    tree: DraftTree = field(default_factory=DraftTree.empty)
    start: int = 0

    def only(self, layers: Sequence[int], scores: bool) -> "Committed":
        """The same without hidden states of other layers, and without scores if these are no need."""
        if len(layers) == len(self.hidden_states) and (scores or self.scores is None):
            return self
        states = {layer: states for layer, states in self.hidden_states.items() if layer in layers}
        return replace(self, hidden_states=states, scores=self.scores if scores else None)
