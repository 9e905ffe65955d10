"""Groups of neighbouring rows for one call of attention: the cost of padding against that of one more call."""

from collections.abc import Sequence
from functools import lru_cache
from operator import attrgetter
from typing import TYPE_CHECKING

import numpy as np
from transformers import PreTrainedConfig

from ..compat import shared_value
from .kernels.groups import cheapest_split
from .shared_prefix import set_shared_reads, shared_reads_of

if TYPE_CHECKING:
    from .rows import CacheRow, RowInput

# Cost of one more call of attention, in elements of keys and values that could be read in the same time. Measured on
# CPUs, in float32 and bfloat16; estimated elsewhere: launching a call's kernels takes as long as 2**25 elements.
_CALL_ON_CPU, _CALL_ELSEWHERE = 2**17, 2**25
_QUERY = 0.1  # cost of each further token of a row, relative to its first, measured likewise

_line = attrgetter("line")
_line_of_row = attrgetter("row.line")

TYPICAL_CALL = 170  # columns of a row, for 6 key/value heads of 64 dimensions on a CPU


def call_columns(config: PreTrainedConfig, device_type: str) -> int:
    """Return the cost of one more call of attention, in columns of a row, for a decoder's config."""
    kv_heads = shared_value(config, "num_key_value_heads") or shared_value(config, "num_attention_heads") or 1
    return (_CALL_ON_CPU if device_type == "cpu" else _CALL_ELSEWHERE) // (2 * kv_heads * head_size(config))


def head_size(config: PreTrainedConfig) -> int:
    """Return the dimensions of a head, for a decoder's config."""
    heads = shared_value(config, "num_attention_heads") or 1
    return shared_value(config, "head_dim") or max(config.hidden_size // heads, 1)


def arrange(rows: Sequence["RowInput"], call: int) -> "list[list[RowInput]]":
    """
    Return the rows of each part, in ascending order of their lines; `call` is the cost of one more part
    (`call_columns`).
    """
    if len(rows) == 1:
        return [list(rows)]
    rows = sorted(rows, key=_line_of_row)
    columns = [item.row.own + item.first_node + item.num_tokens for item in rows]
    runs = runs_of([item.row for item in rows], columns, [item.num_tokens for item in rows], call)
    return [rows[run] for run in runs]


def padded_context(rows: Sequence["CacheRow"], call: int) -> int:
    """
    Return N_context of a step of one token per row: the committed tokens that its parts read, padding included, and
    `call` for every part but the first. A shared prefix is read once, in a call of its own.
    """
    if not rows:
        return 0
    if len(rows) == 1 and rows[0].prefix_row is None:
        return rows[0].length
    set_shared_reads(rows)
    rows = sorted(rows, key=_line)
    lengths = [row.own for row in rows]
    runs = runs_of(rows, [length + 1 for length in lengths], [1] * len(rows), call)
    context = sum([(rows[run.stop - 1].slot - rows[run.start].slot + 1) * max(lengths[run]) for run in runs])
    prefixes = shared_reads_of(rows)
    return context + sum(length for _, length in prefixes) + call * (len(runs) + len(prefixes) - 1)


def runs_of(rows: Sequence["CacheRow"], columns: list[int], widths: list[int], call: int) -> list[slice]:
    """Split rows, given in the order of their lines, as `split` does, but separately for every `origin`."""
    slots = [row.slot for row in rows]
    if rows[0].origin == rows[-1].origin and not any([row.shared_read_len for row in rows]):
        return split(slots, columns, widths, call)
    origins, runs = [row.origin for row in rows], []
    starts = [number for number in range(len(rows)) if not number or origins[number] != origins[number - 1]]
    for start, end in zip(starts, [*starts[1:], len(rows)]):
        own = split(slots[start:end], columns[start:end], widths[start:end], call)
        runs += [slice(start + run.start, start + run.stop) for run in own]
    return runs


def split(slots: Sequence[int], columns: Sequence[int], widths: Sequence[int], call: int) -> list[slice]:
    """
    Split rows into runs of neighbours, so that attention costs least. A run reads as many columns of every slot, from
    its first row's to its last's, as its longest row has, with as many queries as its widest row has:

        cost = call + slots * columns * (1 + 0.1 * (width - 1))

    The cheapest split is found, in time that grows with the rows and the length of runs.

    Args:
        slots, columns, widths (sequences of `int`): Values of every row, at least one, in ascending order of slots.
        call (`int`): See `call_columns`.

    Returns:
        list of `slice`: The rows of each run, in order.
    """
    if len(slots) == 1:
        return [slice(0, 1)]
    # Cached, since a step calls this twice, for its expected cost and for its layout, alike where it has no drafts.
    ends = _ends(tuple(slots), tuple(columns), tuple(widths), call)
    return [slice(start, end) for start, end in zip((0, *ends), ends)]


@lru_cache(maxsize=64)  # every slab has a split of its own
def _ends(slots: tuple[int, ...], columns: tuple[int, ...], widths: tuple[int, ...], call: int) -> tuple[int, ...]:
    """Return the ends of the runs of at least two rows."""
    num = len(slots)
    rows = np.array((slots, columns, widths))
    whole = (slots[-1] - slots[0] + 1) * max(columns) * (1 + _QUERY * (max(widths) - 1))
    if whole - float((rows[1] * (1 + _QUERY * (rows[2] - 1))).sum()) <= call:
        return (num,)  # even without padding, two calls would cost as much
    best, firsts = np.empty(num + 1), np.empty(num, np.int64)
    cheapest_split(*rows, call, _QUERY, best, firsts)
    begins, ends, end = firsts.tolist(), [], num
    while end:
        ends.append(end)
        end = begins[end - 1]
    return tuple(ends[::-1])
