"""Sorting of the suffixes of token documents, to a bounded depth, in place: compiled multikey quicksort."""

import numpy as np
from transformers.utils.logging import tqdm

from ....jit import compiled, inner

BORDER = -1  # stands between two documents; sorts before every token

_SMALL = 12  # suffixes; so few are sorted by insertion
_CHUNK = 1 << 18  # suffixes sorted per compiled call: about a tenth of a second between looks at Ctrl-C
_STACK = 256  # the largest part waits, so at most 2 log2(2**31) + 3 wait at once


def sort_suffixes(tokens: np.ndarray, vocab_size: int, depth: int) -> tuple[np.ndarray, np.ndarray]:
    """
    Return the suffix array of documents. A suffix ends with its document, and sorts before all longer ones; suffixes
    that agree in their first `depth` tokens stand in any (but always the same) order.

    Needs 4 bytes per token besides the input, and 8 per occurrence of the most frequent token.

    Args:
        tokens (`np.ndarray` of shape `[num_tokens]`, int32): Token ids, with `BORDER` between documents.
        vocab_size (`int`): All tokens lie below.
        depth (`int`): Tokens that are compared.

    Returns:
        `np.ndarray` of shape `[num_suffixes]`, int32: the positions of all tokens but borders, sorted.
        `np.ndarray` of shape `[vocab_size + 1]`, int64: the suffixes that begin with token t lie in
        [starts[t], starts[t + 1]).
    """
    suffixes, starts = _sort_by_first_token(tokens, vocab_size)
    bits = int(vocab_size).bit_length()  # of a token plus one
    keys = np.empty(int(np.diff(starts).max(initial=0)), np.int64)
    with tqdm(total=len(suffixes), desc="sorting", unit="tok", unit_scale=True, delay=1) as progress:
        first = 0
        while first < vocab_size:
            last = max(first + 1, int(np.searchsorted(starts, starts[first] + _CHUNK)))
            last = min(last, vocab_size)
            _sort_buckets(tokens, suffixes, starts, first, last, keys, bits, depth)
            progress.update(int(starts[last] - starts[first]))
            first = last
    return suffixes, starts


@compiled
def _sort_by_first_token(tokens: np.ndarray, vocab_size: int) -> tuple[np.ndarray, np.ndarray]:
    starts = np.zeros(vocab_size + 1, np.int64)
    for token in tokens:
        if token >= 0:
            starts[token + 1] += 1
    starts = np.cumsum(starts)
    ends = starts.copy()
    suffixes = np.empty(starts[-1], np.int32)
    for position in range(len(tokens)):
        token = tokens[position]
        if token >= 0:
            suffixes[ends[token]] = position
            ends[token] += 1
    return suffixes, starts


@compiled
def _sort_buckets(
    tokens: np.ndarray,
    suffixes: np.ndarray,
    starts: np.ndarray,
    first: int,
    last: int,
    keys: np.ndarray,
    bits: int,
    max_depth: int,
) -> None:
    for token in range(first, last):
        bucket = suffixes[starts[token] : starts[token + 1]]
        if len(bucket) > 1:
            _sort_bucket(tokens, bucket, keys, bits, max_depth)


@inner
def _sort_bucket(tokens: np.ndarray, bucket: np.ndarray, keys: np.ndarray, bits: int, max_depth: int) -> None:
    """
    Sort suffixes that agree in their first token. Parts of the bucket wait on a stack as (low, high, depth, whether
    `keys` hold the tokens at that depth). Keys hold several tokens, since fetching takes most of the time.
    """
    width = 63 // bits
    stack = np.empty((_STACK, 4), np.int64)
    stack[0, 0], stack[0, 1], stack[0, 2], stack[0, 3] = 0, len(bucket), 1, 0
    waiting = 1
    while waiting:
        waiting -= 1
        low, high, depth, is_fetched = stack[waiting]
        if high - low <= _SMALL:
            _sort_by_insertion(tokens, bucket, low, high, depth, max_depth)
            continue
        if not is_fetched:
            for index in range(low, high):
                keys[index] = _key(tokens, bucket[index] + depth, width, bits)
        pivot = _median(keys[low], keys[(low + high) // 2], keys[high - 1])
        less, more = _partition(bucket, keys, low, high, pivot)
        # Suffixes that agree, and end, within this key are equal.
        goes_on = depth + width < max_depth and pivot & ((1 << bits) - 1) != 0
        equal = more - less if goes_on else 0
        # The largest part is pushed first, to wait for the smaller ones.
        for _ in range(3):
            sizes = less - low, equal, high - more
            if sizes[0] >= sizes[1] and sizes[0] >= sizes[2]:
                part = low, less, depth, 1
                low = less
            elif sizes[1] >= sizes[2]:
                part = less, more, depth + width, 0
                equal = 0
            else:
                part = more, high, depth, 1
                high = more
            if max(sizes) > 1:
                stack[waiting, 0], stack[waiting, 1], stack[waiting, 2], stack[waiting, 3] = part
                waiting += 1


@inner
def _key(tokens: np.ndarray, position: int, width: int, bits: int) -> np.int64:
    """Return the next `width` tokens as one number that sorts as they do; zeros from the document's end on."""
    key = np.int64(0)
    for index in range(position, position + width):
        if index >= len(tokens) or tokens[index] < 0:
            return key << (bits * (position + width - index))
        key = (key << bits) | (tokens[index] + 1)
    return key


@inner
def _median(a: int, b: int, c: int) -> int:
    return max(min(a, b), min(max(a, b), c))


@inner
def _partition(bucket: np.ndarray, keys: np.ndarray, low: int, high: int, pivot: int) -> tuple[int, int]:
    """Order [low, high) as keys below, at and above the pivot, and return where the latter two begin."""
    less, more, index = low, high, low
    while index < more:
        key = keys[index]
        if key < pivot:
            keys[index], keys[less] = keys[less], key
            bucket[index], bucket[less] = bucket[less], bucket[index]
            less += 1
            index += 1
        elif key > pivot:
            more -= 1
            keys[index], keys[more] = keys[more], key
            bucket[index], bucket[more] = bucket[more], bucket[index]
        else:
            index += 1
    return less, more


@inner
def _sort_by_insertion(tokens: np.ndarray, bucket: np.ndarray, low: int, high: int, depth: int, max_depth: int) -> None:
    for end in range(low + 1, high):
        suffix = bucket[end]
        index = end
        while index > low and _is_less(tokens, suffix, bucket[index - 1], depth, max_depth):
            bucket[index] = bucket[index - 1]
            index -= 1
        bucket[index] = suffix


@inner
def _is_less(tokens: np.ndarray, left: int, right: int, depth: int, max_depth: int) -> bool:
    for offset in range(depth, max_depth):
        ends = left + offset >= len(tokens), right + offset >= len(tokens)
        a = BORDER if ends[0] else tokens[left + offset]
        b = BORDER if ends[1] else tokens[right + offset]
        if a != b:
            return a < b
        if a < 0:
            return False
    return False
