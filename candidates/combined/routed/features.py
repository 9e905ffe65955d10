"""Texts as sets of hashed strings: of bytes, or of tokens."""

import numpy as np

Text = str | np.ndarray

_LENGTHS_OF_TEXT, _LENGTHS_OF_IDS = range(1, 6), range(1, 4)  # of the strings of bytes, or of tokens, that count
_MOST_UNITS = 4096  # bytes or tokens of a text: half of them its first, half its last
_PRIME, _MIX = np.uint64(0x100000001B3), np.uint64(0x9E3779B97F4A7C15)


def features_of(text: Text, num_features: int) -> np.ndarray:
    """
    Return which strings occur in a text (a string, or token ids `[length]`), hashed to numbers below `num_features`, a
    power of two: int64 `[n]`, each once, in order.
    """
    if isinstance(text, str):
        units, lengths = np.frombuffer(text.encode("utf-8", "replace"), np.uint8), _LENGTHS_OF_TEXT
    else:
        units, lengths = np.asarray(text), _LENGTHS_OF_IDS
    if len(units) > _MOST_UNITS:
        units = np.concatenate([units[: _MOST_UNITS // 2], units[-_MOST_UNITS // 2 :]])
    values = units.astype(np.uint64) + np.uint64(1)
    hashed, shift = np.zeros(len(values), np.uint64), np.uint64(65 - num_features.bit_length())
    found = []
    for length in lengths:
        if len(values) < length:
            break
        hashed = hashed[: len(values) - length + 1] * _PRIME + values[length - 1 :]
        found.append((hashed + np.uint64(length)) * _MIX >> shift)
    return np.unique(np.concatenate(found)).astype(np.int64) if found else np.zeros(0, np.int64)
