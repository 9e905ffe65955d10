"""Which neighbouring rows attention sees together: what padding costs against what one more call costs."""

from collections.abc import Sequence
from functools import lru_cache
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from transformers import PreTrainedConfig

from .compat import shared_value
from .shared_prefix import find_leads, leads_of

if TYPE_CHECKING:
    from .rows import CacheRow, RowInput

# What one more call of attention costs, in elements of keys and values that it could have read meanwhile. Measured on
# CPUs, in float32 and bfloat16. Elsewhere estimated: the launches of a call's kernels take as long as 2**25 elements.
_CALL_ON_CPU, _CALL_ELSEWHERE = 2**17, 2**25
_QUERY = 0.1  # of what a row's first token costs, each further one, measured likewise
_MOST_BLOCKS = 32  # among which the cheapest split is searched for, in time that grows with their square

_line = attrgetter("line")
_line_of_row = attrgetter("row.line")

TYPICAL_CALL = 170  # columns of a row, for 6 key/value heads of 64 dimensions on a CPU


def call_columns(config: PreTrainedConfig, device_type: str) -> int:
    """What one more call of attention costs, in columns of a row, for a decoder's config."""
    kv_heads = shared_value(config, "num_key_value_heads") or shared_value(config, "num_attention_heads") or 1
    return (_CALL_ON_CPU if device_type == "cpu" else _CALL_ELSEWHERE) // (2 * kv_heads * head_size(config))


def head_size(config: PreTrainedConfig) -> int:
    """Dimensions of a head, for a decoder's config."""
    heads = shared_value(config, "num_attention_heads") or 1
    return shared_value(config, "head_dim") or max(config.hidden_size // heads, 1)


def arrange(rows: Sequence["RowInput"], call: int) -> "list[list[RowInput]]":
    """The rows of each part, in ascending order of their lines; `call` is what one more part costs (`call_columns`)."""
    if len(rows) == 1:
        return [list(rows)]
    rows = sorted(rows, key=_line_of_row)
    columns = [item.row.own + item.first_node + item.num_tokens for item in rows]
    runs = runs_of([item.row for item in rows], columns, [item.num_tokens for item in rows], call)
    return [rows[run] for run in runs]


def padded_context(rows: Sequence["CacheRow"], call: int) -> int:
    """
    N_context of a step in which each row brings one token: the committed tokens that its parts read, padding included,
    and `call` for every part but the first. What several rows share is read once, by a call of its own.
    """
    if not rows:
        return 0
    if len(rows) == 1 and rows[0].base is None:
        return rows[0].length
    find_leads(rows)
    rows = sorted(rows, key=_line)
    lengths = [row.own for row in rows]
    runs = runs_of(rows, [length + 1 for length in lengths], [1] * len(rows), call)
    context = sum([(rows[run.stop - 1].slot - rows[run.start].slot + 1) * max(lengths[run]) for run in runs])
    leads = leads_of(rows)
    return context + sum(length for _, length in leads) + call * (len(runs) + len(leads) - 1)


def runs_of(rows: Sequence["CacheRow"], columns: list[int], widths: list[int], call: int) -> list[slice]:
    """As `split`, for rows in the order of their lines: those of a slab that start alike by themselves."""
    slots = [row.slot for row in rows]
    if rows[0].origin == rows[-1].origin and not any([row.lead for row in rows]):
        return split(slots, columns, widths, call)
    origins, runs = [row.origin for row in rows], []
    starts = [number for number in range(len(rows)) if not number or origins[number] != origins[number - 1]]
    for start, end in zip(starts, [*starts[1:], len(rows)]):
        own = split(slots[start:end], columns[start:end], widths[start:end], call)
        runs += [slice(start + run.start, start + run.stop) for run in own]
    return runs


def split(slots: Sequence[int], columns: Sequence[int], widths: Sequence[int], call: int) -> list[slice]:
    """
    Cuts rows into runs of neighbours, so that attention costs least. A run reads as many columns of every slot, from
    its first row's to its last's, as its longest row has, with as many queries as its widest row has:

        cost = call + slots * columns * (1 + 0.1 * (width - 1))

    Of up to 32 rows the cheapest split is found. Of more, neighbours that cost less together than apart are joined
    first, those that waste least before others: that takes time in proportion to the rows, and finds a cheap one.

    Args:
        slots, columns, widths (sequences of `int`): Of every row, at least one, in ascending order of slots.
        call (`int`): See `call_columns`.

    Returns:
        list of `slice`: The rows of each run, in order.
    """
    if len(slots) == 1:
        return [slice(0, 1)]
    # A step asks twice, for what it will cost and for how it is run: with the same answer where nothing is drafted.
    ends = _ends(tuple(slots), tuple(columns), tuple(widths), call)
    return [slice(start, end) for start, end in zip((0, *ends), ends)]


@lru_cache(maxsize=64)  # several slabs have splits of their own
def _ends(slots: tuple[int, ...], columns: tuple[int, ...], widths: tuple[int, ...], call: int) -> tuple[int, ...]:
    """Where the runs end, of at least two rows."""
    num = len(slots)
    rows = _Blocks.of_rows(np.array(slots), np.array(columns), np.array(widths))
    whole = (slots[-1] - slots[0] + 1) * max(columns) * (1 + _QUERY * (max(widths) - 1))
    if whole - rows.costs().sum() <= call:  # without any padding, two calls would cost as much
        return (num,)
    blocks = rows
    while len(blocks.ends) > _MOST_BLOCKS:
        joined = blocks.joined(call)
        if joined is blocks:  # nothing pays; all in one run may
            total = call * len(blocks.ends) + blocks.costs().sum()
            return (num,) if whole + call <= total else tuple(blocks.ends.tolist())
        blocks = joined
    return blocks.cheapest(call)


class _Blocks(NamedTuple):
    """Runs of neighbouring rows, `[blocks]` int64 each: what joins them, they share."""

    ends: np.ndarray  # the number of the row behind the last one
    first_slots: np.ndarray
    last_slots: np.ndarray
    columns: np.ndarray  # of the longest row
    widths: np.ndarray  # of the widest row

    @classmethod
    def of_rows(cls, slots: np.ndarray, columns: np.ndarray, widths: np.ndarray) -> "_Blocks":
        return cls(np.arange(1, len(slots) + 1), slots, slots, columns, widths)

    def costs(self) -> np.ndarray:
        """Of each block as a run, without its call, `[blocks]` float64."""
        return _cost(self.last_slots - self.first_slots + 1, self.columns, self.widths)

    def joined(self, call: int) -> "_Blocks":
        """Pairs of neighbours as one block where that costs less: the half of them that waste least."""
        costs = self.costs()
        columns = np.maximum(self.columns[1:], self.columns[:-1])
        widths = np.maximum(self.widths[1:], self.widths[:-1])
        waste = _cost(self.last_slots[1:] - self.first_slots[:-1] + 1, columns, widths) - costs[1:] - costs[:-1]
        joins = _least(waste, waste < call)
        if not joins.any():
            return self
        is_first = np.append(True, ~joins)
        starts, is_last = np.flatnonzero(is_first), np.append(~joins, True)
        return _Blocks(
            self.ends[is_last],
            self.first_slots[is_first],
            self.last_slots[is_last],
            np.maximum.reduceat(self.columns, starts),
            np.maximum.reduceat(self.widths, starts),
        )

    def cheapest(self, call: int) -> tuple[int, ...]:
        """Where the runs of the cheapest split end that cuts between these blocks only."""
        num = len(self.ends)
        spans = self.last_slots - self.first_slots[:, None] + 1  # [first block of the run, last block]
        is_run = np.tri(num, dtype=bool).T
        longest = np.maximum.accumulate(np.where(is_run, self.columns, 0), axis=1)
        widest = np.maximum.accumulate(np.where(is_run, self.widths, 1), axis=1)
        costs = np.ascontiguousarray((call + _cost(spans, longest, widest)).T)
        best, firsts = np.zeros(num + 1), []  # of the first blocks; the last run of the best split of them
        for last in range(num):
            totals = best[: last + 1] + costs[last, : last + 1]
            firsts.append(int(totals.argmin()))
            best[last + 1] = totals[firsts[-1]]
        ends, end = [], num
        while end:
            ends.append(int(self.ends[end - 1]))
            end = firsts[end - 1]
        return tuple(ends[::-1])


def _cost(slots: np.ndarray, columns: np.ndarray, widths: np.ndarray) -> np.ndarray:
    """Of runs over so many slots, without their calls."""
    return slots * columns * (1 + _QUERY * (widths - 1))


def _least(waste: np.ndarray, pays: np.ndarray) -> np.ndarray:
    """
    Which borders between blocks go (`[borders]` bool): of those where that `pays`, the half that wastes least, and no
    two neighbours at once. So a quarter of them goes at least.
    """
    wastes = waste[pays]
    if not len(wastes):
        return pays
    middle = (len(wastes) - 1) // 2
    goes = pays & (waste <= np.partition(wastes, middle)[middle])
    place = np.arange(len(goes))
    staying = np.maximum.accumulate(np.where(goes, -1, place))  # the last border before each that stays
    return goes & ((place - staying) % 2 == 1)
