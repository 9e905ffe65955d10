"""Which neighbouring rows attention sees together: what padding costs against what one more call costs."""

from collections.abc import Sequence

import numpy as np
from transformers import PreTrainedConfig

from .compat import shared_value

# What one more call of attention costs, in elements of keys and values that it could have read meanwhile. Measured on
# CPUs, in float32 and bfloat16. Elsewhere estimated: the launches of a call's kernels take as long as 2**25 elements.
_CALL_ON_CPU, _CALL_ELSEWHERE = 2**17, 2**25
_QUERY = 0.1  # of what a row's first token costs, each further one, measured likewise

TYPICAL_CALL = 170  # columns of a row, for 6 key/value heads of 64 dimensions on a CPU


def call_columns(config: PreTrainedConfig, device_type: str) -> int:
    """What one more call of attention costs, in columns of a row, for a decoder's config."""
    heads = shared_value(config, "num_attention_heads") or 1
    kv_heads = shared_value(config, "num_key_value_heads") or heads
    head_dim = shared_value(config, "head_dim") or max(config.hidden_size // heads, 1)
    return (_CALL_ON_CPU if device_type == "cpu" else _CALL_ELSEWHERE) // (2 * kv_heads * head_dim)


def split(slots: Sequence[int], columns: Sequence[int], widths: Sequence[int], call: int) -> list[slice]:
    """
    Cuts rows into runs of neighbours, so that attention costs least. A run reads as many columns of every slot, from
    its first row's to its last's, as its longest row has, with as many queries as its widest row has:

        cost = call + slots * columns * (1 + 0.1 * (width - 1))

    Args:
        slots, columns, widths (sequences of `int`): Of every row, at least one, in ascending order of slots.
        call (`int`): See `call_columns`.

    Returns:
        list of `slice`: The rows of each run, in order.
    """
    num = len(slots)
    whole = (slots[-1] - slots[0] + 1) * max(columns) * (1 + _QUERY * (max(widths) - 1))
    least = sum([length * (1 + _QUERY * (width - 1)) for length, width in zip(columns, widths)])
    if whole - least <= call:  # without any padding, two calls would cost as much
        return [slice(0, num)]
    spans = np.array(slots) - np.array(slots)[:, None] + 1  # [first row of the run, last row]
    is_run = np.tri(num, dtype=bool).T
    longest = np.maximum.accumulate(np.where(is_run, columns, 0), axis=1)
    widest = np.maximum.accumulate(np.where(is_run, widths, 1), axis=1)
    costs = np.ascontiguousarray((call + spans * longest * (1 + _QUERY * (widest - 1))).T)
    best, firsts = np.zeros(num + 1), []  # of the first rows; the last run of the best split of them
    for last in range(num):
        totals = best[: last + 1] + costs[last, : last + 1]
        firsts.append(int(totals.argmin()))
        best[last + 1] = totals[firsts[-1]]
    runs, end = [], num
    while end:
        runs.append(slice(firsts[end - 1], end))
        end = runs[-1].start
    return runs[::-1]
