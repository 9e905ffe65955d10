"""Requests of recorded traces, and random drafts."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from hf_smartspec.simulator import LoadRequest
from hf_smartspec.simulator.requests import NUM_TOKENS

from .arrivals import Trace

_BLOCK = 512  # tokens of a block of a prompt, in traces


def of_trace(trace: Trace, rng: np.random.Generator) -> list[LoadRequest]:
    """Return the requests of a trace. Prompts share beginnings where the trace has the same blocks."""
    requests = LoadRequest.of_lengths(trace.times, trace.prompt_lens, trace.output_lens, rng)
    if trace.blocks is None:
        return requests
    # Other token ids than those of random prompts.
    texts = ((blocks[:, None] * _BLOCK + np.arange(_BLOCK)).ravel() + NUM_TOKENS for blocks in trace.blocks)
    return [replace(item, prompt=text[: len(item.prompt)]) for item, text in zip(requests, texts)]


def with_acceptance(
    requests: Sequence[LoadRequest],
    alphas: float | Sequence[float] | np.ndarray,
    rng: np.random.Generator,
    width: int = 1,
) -> list[LoadRequest]:
    """
    Return the requests with random drafts: each of a drafter's `width` candidates for a token is right with probability
    alpha, independently (the assumption of SmartSpec's Eq. 8 for chains, and of Eq. 10 for trees of heads), and the
    drafts' probabilities are exact. The same tokens are drafted right under every policy.

    Args:
        alphas (`float`, or one per request): Acceptance probabilities, in [0, 1].

    Raises:
        ValueError: for an alpha outside [0, 1].
    """
    result = []
    for request, alpha in zip(requests, np.broadcast_to(alphas, len(requests)).tolist()):
        if not 0 <= alpha <= 1:
            raise ValueError(f"`alphas` must lie in [0, 1], got {alpha!r}.")
        size = len(request.response)
        hits = rng.random((size, width)) < alpha
        ranks = np.where(hits.any(axis=1), hits.argmax(axis=1), width)
        probs = np.tile(alpha * (1 - alpha) ** np.arange(width), (size, 1)).astype(np.float32)
        result.append(replace(request, ranks=ranks, probs=probs))
    return result
