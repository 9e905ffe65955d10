"""Requests of a load: arrival times, prompts, and the target's answers."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

NUM_TOKENS = 2**40  # token ids of random prompts are below


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
        prompts = (rng.integers(0, NUM_TOKENS, int(length)) for length in prompt_lens)
        return [
            cls(float(time), prompt, int(length), np.ones(int(length), np.int64))
            for time, prompt, length in zip(times, prompts, output_lens)
        ]
