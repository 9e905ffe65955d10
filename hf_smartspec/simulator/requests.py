"""Requests of a load: arrival times, prompts, and the target's answers."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from .arrivals import Trace

_BLOCK = 512  # tokens of a block of a prompt, in traces
_FIRST_BLOCK = 2**40  # token ids from here on stand for blocks of traces


@dataclass(frozen=True, eq=False)
class LoadRequest:
    """
    One request of a load. In a simulation, the object is also the request's id for sources and policies.

    Args:
        arrival (`float`): Seconds from the beginning.
        prompt (`np.ndarray` of shape `[prompt_len]`, int64): Token ids.
        max_new_tokens (`int`): Limit of generated tokens.
        response (`np.ndarray` of shape `[n]`, int64): The target's answer, without the end-of-sequence token that
            follows it. Not needed on a real engine.
        ranks (`np.ndarray` of shape `[n]`, int): For `TableCandidates`: the rank of each response token among the
            drafter's candidates for it, given the text before it; 0 is the first.
        probs (`np.ndarray` of shape `[n, k]`, float32): Probabilities that the drafter gives its candidates.
        namespace (`str`): The group of requests whose outputs are drafted from.
    """

    arrival: float
    prompt: np.ndarray
    max_new_tokens: int
    response: np.ndarray
    ranks: np.ndarray | None = None
    probs: np.ndarray | None = None
    namespace: str = ""

    @classmethod
    def of_lengths(
        cls,
        times: np.ndarray,
        prompt_lens: Sequence[int] | np.ndarray,
        output_lens: Sequence[int] | np.ndarray,
        rng: np.random.Generator,
    ) -> "list[LoadRequest]":
        """Return requests of the given lengths with random prompts, of which no two begin alike."""
        prompts = (rng.integers(0, _FIRST_BLOCK, int(length)) for length in prompt_lens)
        return [
            cls(float(time), prompt, int(length), np.ones(int(length), np.int64))
            for time, prompt, length in zip(times, prompts, output_lens)
        ]

    @classmethod
    def of_trace(cls, trace: Trace, rng: np.random.Generator) -> "list[LoadRequest]":
        """Return the requests of a trace. Prompts share beginnings where the trace has the same blocks."""
        requests = cls.of_lengths(trace.times, trace.prompt_lens, trace.output_lens, rng)
        if trace.blocks is None:
            return requests
        texts = ((blocks[:, None] * _BLOCK + np.arange(_BLOCK)).ravel() + _FIRST_BLOCK for blocks in trace.blocks)
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
