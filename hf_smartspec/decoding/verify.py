"""The accepted path: which token the target picks at each node, and whether the draft holds it."""

from collections.abc import Sequence

import torch

from ..drafts.tree import DraftTree
from ..sampling.noise import add_gumbel_noise, gumbel_noise
from ..sampling.top import argmax
from .request import Request

# Acceptance draws from a stream of its own, independent of the residual's and the draft's.
_ACCEPT_STREAM = 0x5EED_ACCE


def accepted_path(tree: DraftTree, picks: Sequence[int]) -> list[int]:
    """
    The nodes that hold the target's tokens, from the root on: `picks[n + 1]` is its token behind node n, and `picks[0]`
    that behind the last committed token.
    """
    path: list[int] = []
    last = -1
    for node, (parent, token) in enumerate(zip(tree.parents.tolist(), tree.tokens.tolist())):
        if parent == last and token == picks[last + 1]:  # parents stand before their children
            path.append(node)
            last = node
    return path


def coupled_picks(requests: Sequence[Request], scores: torch.Tensor) -> list[int]:
    """
    The target's own tokens: arg max of processed scores (`[rows, vocab_size]`), plus each sampling row's Gumbel noise.
    A draft node is accepted if it *is* the token, so the outcome cannot depend on the drafts.
    """
    seeds = [request.seed for request in requests]
    if any(seed is not None for seed in seeds):
        scores = add_gumbel_noise(scores, seeds, [request.num_generated for request in requests])
    return argmax(scores)


def rejection_picks(requests: Sequence[Request], scores: torch.Tensor) -> list[int]:
    """
    Speculative sampling (Leviathan et al., 2023, algorithm 1; Chen et al., 2023) for chains with draft distributions
    q: the draft token x is kept with probability min(1, p(x) / q(x)), else a token is drawn from max(0, p - q). The
    output has the target's distribution, but which tokens come out depends on the drafts. Rows without a
    distribution, and greedy rows, are picked for as in `coupled_picks`.
    """
    return [_rejection_pick(request, line) for request, line in zip(requests, scores)]


def _rejection_pick(request: Request, scores: torch.Tensor) -> int:
    tree, node = request.tree, request.cursor + 1
    if request.seed is None or tree is None or tree.distributions is None or node >= len(tree):
        return coupled_picks([request], scores[None])[0]
    target = scores.softmax(dim=-1)
    draft = tree.distributions[node].to(target.device)
    token = int(tree.tokens[node])
    uniform = _uniform(request.seed, request.num_generated)
    if uniform * float(draft[token]) < float(target[token]):
        return token
    residual = (target - draft).clamp(min=0)
    if float(residual.sum()) <= 0:  # p equals q up to rounding: then p itself is the right distribution
        residual = target
    return coupled_picks([request], residual.log()[None])[0]


def _uniform(seed: int, position: int) -> float:
    """A uniform variate of its own stream, from the Gumbel noise by its distribution function exp(-exp(-g))."""
    noise = gumbel_noise(seed ^ _ACCEPT_STREAM, position, torch.zeros(1, dtype=torch.long))
    return float(torch.exp(-torch.exp(-noise.double())))


METHODS = {"coupled": coupled_picks, "rejection": rejection_picks}
