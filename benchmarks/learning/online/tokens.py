"""Tokens that a drafter has learnt (Online Speculative Decoding, section 5.5: figure 7 and table 6)."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import nn

from hf_smartspec.online.samples import Sample
from hf_smartspec.online.students import student_of

from .streams import shadow

NUM_FREQUENT = 100


def frequent_tokens(before: nn.Module, after: nn.Module, samples: Sequence[Sample], tokenizer: Any) -> dict[str, Any]:
    """
    Return the most frequent tokens of the target's answers, most frequent first: their `texts`, the `share` of all
    tokens that they are, and, of the drafter before and after learning, each token's precision and recall.
    """
    counts = Counter(int(token) for item in samples for token in item.response)
    tokens = [token for token, _ in counts.most_common(NUM_FREQUENT)]
    return {
        "texts": [tokenizer.decode([token]) for token in tokens],
        "share": sum(counts[token] for token in tokens) / counts.total(),
        "original": _rates(before, samples, tokens),
        "online": _rates(after, samples, tokens),
    }


def _rates(module: nn.Module, samples: Sequence[Sample], tokens: Sequence[int]) -> dict[str, list[float | None]]:
    """
    Return each token's precision, the times that it is accepted over the times that it is proposed, and its recall,
    over the times that it comes; None where these are 0.
    """
    drafted, came, *_ = (np.concatenate(parts) for parts in zip(*shadow(student_of(module), samples)))
    right = drafted == came
    of = {"precision": drafted, "recall": came}
    return {name: [_mean(right[values == token]) for token in tokens] for name, values in of.items()}


def _mean(values: np.ndarray) -> float | None:
    return float(values.mean()) if len(values) else None


def most_improved(row: dict[str, Any], what: str, number: int) -> list[str]:
    """Return the tokens whose "precision" or "recall" has risen most, first the one that has most (table 6)."""
    pairs = [(before or 0.0, after or 0.0) for before, after in zip(row["original"][what], row["online"][what])]
    order = sorted(range(len(pairs)), key=lambda place: pairs[place][0] - pairs[place][1])
    return [row["texts"][place] for place in order[:number] if pairs[place][1] > pairs[place][0]]
