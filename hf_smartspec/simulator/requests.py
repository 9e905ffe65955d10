"""Requests of a load: what is asked for, when, and what the target will answer."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from .arrivals import Trace

_BLOCK = 512  # tokens of a block of a prompt, in traces
_FIRST_BLOCK = 2**40  # token ids from here on stand for blocks of traces


@dataclass(frozen=True, eq=False)
class LoadRequest:
    """
    One request of a load. In a simulation, it is also the name under which sources and policies know it.

    Args:
        arrival (`float`): Seconds from the beginning.
        prompt (`np.ndarray` of shape `[prompt_len]`, int64): Token ids.
        max_new_tokens (`int`): Tokens after which it ends.
        response (`np.ndarray` of shape `[n]`, int64): What the target answers; behind it stands the end of sequence.
            Not needed on a real engine.
        ranks (`np.ndarray` of shape `[n]`, int): For `TableCandidates`: the place of each response token among the
            drafter's candidates for it, given the text before it; 0 is the first one.
        probs (`np.ndarray` of shape `[n, k]`, float32): The probabilities that the drafter gives its candidates.
        namespace (`str`): Whose text it is: whose earlier outputs drafts come from.
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
        """Requests of given lengths, whose text means nothing: no two prompts have anything in common."""
        prompts = (rng.integers(0, _FIRST_BLOCK, int(length)) for length in prompt_lens)
        return [
            cls(float(time), prompt, int(length), np.ones(int(length), np.int64))
            for time, prompt, length in zip(times, prompts, output_lens)
        ]

    @classmethod
    def of_trace(cls, trace: Trace, rng: np.random.Generator) -> "list[LoadRequest]":
        """The requests of a trace; their prompts begin alike where the trace says so."""
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
    The same requests with made-up drafts: each of a drafter's `width` candidates for a token is right with probability
    alpha, independently (the assumption of SmartSpec's Eq. 8 for chains, and of Eq. 10 for trees of heads). Drafts
    claim just that. Whether a token is drafted right does not depend on the policy, so that all meet the same luck.

    Args:
        alphas (`float`, or one per request): In [0, 1].
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
