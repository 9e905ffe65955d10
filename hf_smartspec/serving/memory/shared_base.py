"""Which running request's row another one shares the beginning of, in place of a copy."""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from ...decoding.call import Request
from ...target_model.layout.rows import CacheRow
from .prefix_cache import num_shared

# Measured on CPUs: two more calls in every layer take as long as it takes to read so many columns.
LEAST_SAVED = 3072  # columns that need not be read, since they are for other running requests
LEAST_SHARED = 256  # tokens
_STEP = 64  # so that prompts that go on alike by chance share as much as others do
_JOINED = 2  # what others share already is worth so many times as much


class SharedBase(NamedTuple):
    """A row in whose slot the first `length` tokens of a prompt lie and stay; none where nothing is shared."""

    row: CacheRow | None = None
    length: int = 0


def shared_base(prompt: np.ndarray, running: Iterable[Request], is_read: bool = True) -> SharedBase:
    """
    What a prompt shares with those of these requests, as far as these are through theirs, or (not `is_read`) will be:
    rather what others share already than the beginning of one more row. At least the prompt's last token is left to be
    fed.
    """
    if len(prompt) <= LEAST_SHARED:
        return SharedBase()
    best, most, lengths = SharedBase(), 0, []
    for request in running:
        if (row := request.row) is None:  # it could not leave in order
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
