"""Entropy of texts in a suffix tree, which predicts whether suffix decoding pays."""

from collections.abc import Sequence

import numpy as np


def empirical_entropy(sequences: Sequence[Sequence[int] | np.ndarray], max_depth: int = 16) -> float:
    """
    Return the average entropy of the next token in a suffix tree of `sequences` (SuffixDecoding, appendix A.2: the
    lower, the better suffix decoding does; outputs of 100 requests are enough).

    Every sequence of up to `max_depth` - 1 tokens that occurs at least twice with a next token is a node; its entropy
    is that of its next tokens, and its weight their number. Sequences that occur once would add zeros, and more of them
    the deeper the tree, until the average hardly depends on the text.

    O(total tokens * max_depth) numpy work.

    Args:
        sequences (list of `[n]` integers): Outputs as token ids of at least 0.
        max_depth (`int`): Levels of the tree, that is, the longest context plus the next token.

    Returns:
        `float`: Bits; 0 if no sequence occurs twice.

    Raises:
        ValueError: if `max_depth` is less than 1.
    """
    if max_depth < 1:
        raise ValueError(f"`max_depth` must be at least 1, got {max_depth}.")
    lengths = np.array([len(sequence) for sequence in sequences], np.int64)
    if not lengths.sum():
        return 0.0
    tokens = np.unique(np.concatenate([np.asarray(ids, np.int64) for ids in sequences]), return_inverse=True)[1]
    left = np.repeat(np.cumsum(lengths), lengths) - np.arange(len(tokens))  # tokens from here to the sequence's end
    nodes = np.zeros(len(tokens), np.int64)  # the node that holds the `depth` tokens from each position on
    starts = np.arange(len(tokens))  # positions with a token after those
    bits = weight = 0.0
    for depth in range(max_depth):
        keep = left[starts] > depth
        starts, nodes = starts[keep], nodes[keep]
        if not len(starts):
            break
        # Sum over nodes of n * H = n log n - sum over children of c log c.
        edges = nodes * (tokens.max() + 1) + tokens[starts + depth]
        children, child_counts = np.unique(edges, return_inverse=True, return_counts=True)[1:]
        counts = np.bincount(nodes)
        bits += _count_log_count(counts) - _count_log_count(child_counts)
        weight += counts[counts > 1].sum()
        nodes = children
    return float(max(bits / weight, 0.0)) if weight else 0.0  # rounding may leave a negative number


def _count_log_count(counts: np.ndarray) -> float:
    counts = counts[counts > 1].astype(np.float64)  # 1 log 1 = 0: counts of 1 add nothing
    return float((counts * np.log2(counts)).sum())
