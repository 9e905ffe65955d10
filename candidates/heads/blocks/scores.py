"""What block drafters say of the tokens after an anchor: candidates of each depth, and their probabilities."""

from typing import NamedTuple

import torch


class Lattice(NamedTuple):
    """
    What a tree is made of: L depths of k candidates, and for each the probabilities of those after it.

    Args:
        tokens (`torch.Tensor` of shape `[R, L, k]`, int64): Candidates of each depth, the target's tokens, best first.
        first (`torch.Tensor` of shape `[R, k]`, float32): Log-probabilities at depth 1, after the anchor.
        given (`torch.Tensor` of shape `[R, L - 1, k, k]`, float32): Log-probability of candidate c of depth d + 2
            after candidate p of depth d + 1, at `[:, d, p, c]`. Where depths are independent, the third size is 1.
        confidence (`torch.Tensor` of shape `[R, L, k]`, *optional*): Probability that a child is accepted (DSpark): at
            `[:, d, p]`, one of depth d + 1 after candidate p of depth d; at `[:, 0]`, one after the anchor.
    """

    tokens: torch.Tensor
    first: torch.Tensor
    given: torch.Tensor
    confidence: torch.Tensor | None = None


def independent(logits: torch.Tensor, width: int) -> Lattice:
    """
    Return the lattice of depths that do not depend on one another (DFlash, JetSpec).

    Args:
        logits (`torch.Tensor` of shape `[R, L, own vocab]`, float32): Tokens are their places in it.
        width (`int`): Largest number of candidates.
    """
    scores, tokens = logits.topk(min(width, logits.shape[-1]), dim=-1)
    scores = scores - logits.logsumexp(dim=-1, keepdim=True)
    return Lattice(tokens, scores[:, 0], scores[:, 1:, None])
