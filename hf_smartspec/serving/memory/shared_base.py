"""Choose the running row whose beginning a new request shares in place, instead of a copy."""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from ...decoding.call import Request
from ...target_model.layout.rows import CacheRow
from .prefix_cache import num_shared

# Measured on CPUs: sharing takes two more calls in every layer, which take as long as reading this many columns.
LEAST_SAVED = 3072  # columns that are read once for several running requests
LEAST_SHARED = 256  # tokens
_STEP = 64  # lengths are multiples of it: prompts with a few more tokens in common by chance share the same length
_JOINED = 2  # weight of a beginning that other requests share already


class SharedBase(NamedTuple):
    """A row whose slot holds the first `length` tokens of a prompt, to be shared in place; None for no sharing."""

    row: CacheRow | None = None
    length: int = 0


def shared_base(prompt: np.ndarray, running: Iterable[Request], is_read: bool = True) -> SharedBase:
    """
    Return the row of a running request whose beginning a prompt is to share, and its length. Beginnings that other
    requests share already are preferred. The prompt's last token is never shared, since its logits are needed.

    Args:
        is_read (`bool`): Whether only tokens count that the running requests have read; else their whole prompts.
    """
    if len(prompt) <= LEAST_SHARED:
        return SharedBase()
    best, most, lengths = SharedBase(), 0, []
    for request in running:
        if (row := request.row) is None:  # an ended request that could not be removed
            continue
        known = request.prompt[: row.length] if is_read else request.prompt
        if len(known) < LEAST_SHARED or known[LEAST_SHARED - 1] != prompt[LEAST_SHARED - 1]:
            continue
        lengths.append(length := min(num_shared(known, prompt), len(prompt) - 1))
        if row.prefix_row is not None and row.prefix_len <= length:
            base, weight = SharedBase(row.prefix_row, row.prefix_len), _JOINED * row.prefix_len
        else:
            base = SharedBase(row.prefix_row or row, length // _STEP * _STEP)
            weight = base.length
        if base.length >= LEAST_SHARED and weight > most:
            best, most = base, weight
    saved = sum(min(length, best.length) for length in lengths)
    return best if saved >= LEAST_SAVED else SharedBase()
