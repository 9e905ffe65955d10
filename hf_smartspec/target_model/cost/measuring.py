"""Measures forwards of a model: as many sizes, and as large ones, as memory, positions and a few seconds allow."""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import torch
from transformers import PreTrainedModel
from transformers.utils.logging import tqdm

from ...drafts.tree import DraftTree
from ...goodput.cost import CostModel, CostPoint
from ..cache.free_memory import free_bytes
from ..compat import num_positions
from ..forward.packed import PackedForward
from ..forward.ranks import clock_of, told_by_first
from ..layout.rows import CacheRow, RowInput
from ..written import packed_forward

_MIN_ROUNDS, _MAX_ROUNDS = 3, 30  # of all points, after one to warm up
_SECONDS = 5.0  # more rounds than `_MIN_ROUNDS` fit into this, and so do the points that are not few tokens
_FEW, _FEW_COLUMNS = 16, 1100  # tokens, and columns read, up to which points are measured however long it takes
_SLOW_START = 2.0  # times what a smaller forward took: a first run may wait for memory, or for kernels to be found,
_MORE_RUNS = 2  # and may try again
_SLOTS = (1, 4, 16, 64, 256)  # of the memories: each holds its rows with the longest contexts that they are given
_CPU_SHARE, _SHARE = 1 / 16, 1 / 2  # of the memory that is still free, for each of them; a GPU's is given back at once
# A quiet machine: the share of its time in which the measuring thread has a processor, and the median run by the
# fastest one. SmolLM2-135M in bfloat16 on two cores: undisturbed, one thread had a processor for 0.98 to 1.00 of a run,
# and medians were 1.02 to 1.04 times the fastest; beside six busy processes 0.3 to 0.7, and 1.01 to 3.2: work that
# never pauses shows in the share alone. Waiting for OpenMP's other threads counts as having a processor, since a thread
# spins meanwhile; with `OMP_WAIT_POLICY=passive` it sleeps, beside those processes for 0.14 of a run in the median, and
# less where nothing holds the others up. Linux and macOS count in microseconds, Windows in ticks of 16 ms.
_LEAST_SHARE, _MOST_SCATTER = 0.8, 1.5
_COUNTS_TICKS = os.name == "nt"
_BUSY = 0.5  # load by processor from which on the machine is not quiet


class Design(NamedTuple):
    """One forward to be measured: `rows` rows of `context` cached tokens, each with `width` new ones."""

    rows: int
    context: int
    width: int

    @property
    def batched(self) -> int:
        return self.rows * self.width

    @property
    def num_columns(self) -> int:
        """Of keys and values, over all rows."""
        return self.rows * (self.context + self.width)

    @property
    def is_small(self) -> bool:
        return self.batched <= _FEW and self.num_columns <= _FEW_COLUMNS


# Sizes by powers of two, closer where GPUs have their knee; contexts short and long. Few points, each of which tells
# something else: a CPU gets as far as its speed allows, and never mind the rest.
DESIGN = (
    Design(1, 64, 1), Design(1, 64, 2), Design(1, 64, 4), Design(1, 64, 8), Design(1, 64, 16), Design(1, 64, 32),
    Design(1, 64, 64), Design(1, 768, 1), Design(1, 768, 16), Design(1, 4096, 1), Design(1, 4096, 16),
    Design(1, 8128, 1), Design(1, 8128, 32),
    Design(4, 64, 1), Design(4, 64, 4), Design(4, 64, 8), Design(4, 64, 64), Design(4, 768, 2), Design(4, 768, 8),
    Design(4, 4096, 1), Design(4, 4096, 16),
    Design(16, 64, 1), Design(16, 64, 2), Design(16, 64, 4), Design(16, 64, 8), Design(16, 64, 16), Design(16, 64, 32),
    Design(16, 768, 1), Design(16, 768, 4), Design(16, 4096, 1), Design(16, 4096, 8), Design(16, 4096, 32),
    Design(64, 64, 1), Design(64, 64, 3), Design(64, 64, 6), Design(64, 64, 8), Design(64, 64, 12),
    Design(64, 1216, 1), Design(64, 1216, 4), Design(64, 1216, 8), Design(64, 1216, 12), Design(64, 1216, 24),
    Design(64, 3072, 1),
    Design(256, 64, 1), Design(256, 64, 2), Design(256, 64, 4), Design(256, 64, 8),
)  # fmt: skip

# Points that the fit does not see.
HELD_OUT = (
    Design(1, 256, 2), Design(1, 256, 6), Design(1, 512, 12), Design(1, 384, 24),
    Design(2, 256, 1), Design(2, 512, 5), Design(3, 128, 3), Design(6, 384, 1), Design(6, 256, 3), Design(8, 128, 2),
    Design(8, 512, 4), Design(8, 256, 12), Design(12, 128, 1), Design(12, 384, 3), Design(16, 256, 6),
    Design(2, 2048, 3), Design(1, 6000, 8), Design(24, 512, 8), Design(48, 256, 6), Design(200, 100, 5),
)  # fmt: skip


class Measured(NamedTuple):
    """Those of the points that could be measured, in the order given, and whether the machine was busy meanwhile."""

    designs: list[CostPoint]
    held_out: list[CostPoint]
    was_busy: bool = False

    def cost(self) -> CostModel:
        """Fit the cost of a forward; provisional if the machine was busy."""
        cost = CostModel.fit(self.designs)
        cost.is_provisional = self.was_busy
        return cost


class Run(NamedTuple):
    """Seconds of one forward, and those of them in which the thread had a processor."""

    seconds: float
    on_processor: float


def measure(
    model: PreTrainedModel, designs: Sequence[Design], held_out: Sequence[Design] = (), progress: bool = True
) -> Measured:
    """
    Seconds of the packed forward at every point that the model has positions for, the machine memory, and that a few
    seconds have time for: points are tried from the smallest to the largest, and where a round of all of them would
    take too long, no larger ones follow. `held_out` are measured as far as the `designs` reach.

    All points take turns, so that a change in the machine's load meets all of them, and the fastest run of each counts:
    what else the machine does meanwhile is not the model's cost. Where even the fastest runs had to wait for a
    processor, or runs of one point differ much, the machine was busy. Leaves the model, and the global random states,
    as they are.

    Raises:
        ValueError: if the model has too few positions for any of them.
    """
    config = model.config.get_text_config(decoder=True)
    longest = num_positions(config) or float("inf")
    designs, held_out = (
        [item for item in items if item.context + item.width <= longest] for items in (designs, held_out)
    )
    if not designs:
        raise ValueError(f"A model of {longest} positions is too short to be measured.")
    with torch.no_grad(), _inference_mode(model), _undisturbed_memory():
        runs = _measured(model, designs, held_out, progress)
    points, others = ([_point(item, runs[item]) for item in items if item in runs] for items in (designs, held_out))
    was_busy = told_by_first(model, lambda: _were_disturbed(model.device, list(runs.values())))
    return Measured(points, others, was_busy)


def _measured(
    model: PreTrainedModel, designs: Sequence[Design], held_out: Sequence[Design], progress: bool
) -> dict[Design, list[Run]]:
    """Every run of each point. All memories are gone when this returns."""
    clock = clock_of(model)
    start = clock()
    bench = _Bench(model, [*designs, *held_out])
    runs = bench.explore(designs, held_out)
    for turn in tqdm(_rounds(start, clock), desc="Measuring the model's speed", leave=False, disable=not progress):
        items = list(runs)
        for index in np.random.default_rng(turn).permutation(len(items)):  # what ran before leaves its mark
            runs[items[index]].append(bench.run(items[index]))
    return runs


def _point(item: Design, runs: Sequence[Run]) -> CostPoint:
    return CostPoint(item.rows * item.context, item.batched, item.width, min(runs).seconds)


def _were_disturbed(device: torch.device, points: Sequence[Sequence[Run]]) -> bool:
    """Whether the fastest runs of most points had to wait for a processor, or their runs differ much."""
    fastest = [min(runs) for runs in points]
    medians = [float(np.median([run.seconds for run in runs])) for runs in points]
    scatter = np.median([median / best.seconds for median, best in zip(medians, fastest)])
    share = np.median([run.on_processor / run.seconds for run in fastest])
    # Who waits for an accelerator may do so without a processor.
    tells = device.type == "cpu" and not _COUNTS_TICKS
    return bool(scatter > _MOST_SCATTER or (tells and share < _LEAST_SHARE))


def is_busy() -> bool:
    """Whether the machine has lately had other work for many of its processors, as far as it says."""
    try:
        return os.getloadavg()[0] > _BUSY * (os.cpu_count() or 1)
    except (AttributeError, OSError):  # Windows; unobtainable
        return False


def _rounds(start: float, clock: Callable[[], float]) -> Iterator[int]:
    """Numbers of rounds, as long as there is time."""
    for turn in range(_MAX_ROUNDS):
        if turn >= _MIN_ROUNDS and clock() - start > _SECONDS:
            return
        yield turn


class _Bench:
    """
    A model and memory for rows of all lengths. One memory of all rows by the longest context would be larger than any
    machine's: few rows may be long, or many short.

    Args:
        items (sequence of `Design`): What may be run.
    """

    def __init__(self, model: PreTrainedModel, items: Sequence[Design]):
        self.model, self._clock = model, clock_of(model)
        config = model.config.get_text_config(decoder=True)
        self._tokens = np.arange(max(item.width for item in items)) % config.vocab_size
        self._logit_bytes = 8 * config.vocab_size  # per token, in the model's dtype and as float32
        self._forwards: dict[int, tuple[PackedForward, list[CacheRow]]] = {}  # by rows
        self._capacities = self._shared_out(items)

    def _shared_out(self, items: Sequence[Design]) -> dict[int, int]:
        """Columns of every memory, by its rows: as many as the longest of the points needs that find room in it."""
        free, column = float(told_by_first(self.model, lambda: free_bytes(self.model.device))), self._bytes_per_column()
        share, capacities = _CPU_SHARE if self.model.device.type == "cpu" else _SHARE, {}
        for num in sorted({_slots(item.rows) for item in items}):
            own = [item for item in items if _slots(item.rows) == num]
            least = [_columns(item) for item in own if num * _columns(item) <= _FEW_COLUMNS]
            room = [_columns(item) for item in own
                    if num * _columns(item) * column + item.batched * self._logit_bytes <= share * free]  # fmt: skip
            capacities[num] = max([*least, *room], default=0)
            free -= num * capacities[num] * column
        return capacities

    def _bytes_per_column(self) -> int:
        """Of a token's keys and values, from a forward of one token."""
        forward = packed_forward(self.model, 1, 1)
        forward.forward([RowInput(forward.add(), self._tokens[:1])])
        return forward.cache.bytes_per_line

    def has_room(self, item: Design) -> bool:
        return _columns(item) <= self._capacities[_slots(item.rows)]

    def explore(self, designs: Sequence[Design], held_out: Sequence[Design]) -> dict[Design, list[Run]]:
        """What can be measured, with no runs yet; all of it has run once, or a few times."""
        found: dict[Design, float] = {}
        for item in sorted(filter(self.has_room, designs), key=lambda item: (item.batched, item.num_columns)):
            least = max([seconds for other, seconds in found.items() if _is_within(other, item)], default=0.0)
            if item.is_small or sum(found.values()) + least <= _SECONDS / (_MIN_ROUNDS + 1):
                found[item] = self._first_run(item, _SLOW_START * least)
        reached = [item for item in filter(self.has_room, held_out) if any(_is_within(item, other) for other in found)]
        for item in reached:
            self.run(item)
        return {item: [] for item in (*found, *reached)}

    def _first_run(self, item: Design, expected: float) -> float:
        """Seconds of a point's first run; of a few, where it takes longer than expected."""
        seconds = self.run(item).seconds
        for _ in range(_MORE_RUNS):
            if seconds <= expected:
                break
            seconds = min(seconds, self.run(item).seconds)
        return seconds

    def run(self, item: Design) -> Run:
        """Time one forward, of one fed token and a chain in each row. What the cache holds does not change it."""
        forward, rows = self._memory(item)
        for row in rows:
            forward.cut(row, item.context)
        chain = DraftTree.chain(self._tokens[1 : item.width])
        inputs = [RowInput(row, self._tokens[:1], chain) for row in rows]
        _synchronize(self.model.device)
        start, before = self._clock(), time.thread_time()
        forward.forward(inputs)
        _synchronize(self.model.device)
        run = Run(self._clock() - start, time.thread_time() - before)
        for row in rows:
            forward.cut(row, 0)
        return run

    def _memory(self, item: Design) -> tuple[PackedForward, list[CacheRow]]:
        num = _slots(item.rows)
        if num not in self._forwards:
            forward = packed_forward(self.model, num, self._capacities[num])
            self._forwards[num] = forward, [forward.add() for _ in range(num)]
        forward, rows = self._forwards[num]
        return forward, rows[: item.rows]


def _slots(num_rows: int) -> int:
    return min([num for num in _SLOTS if num >= num_rows], default=num_rows)


def _columns(item: Design) -> int:
    """Of each of its rows."""
    return item.context + item.width


def _is_within(small: Design, large: Design) -> bool:
    return small.batched <= large.batched and small.num_columns <= large.num_columns


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.get_device_module(device).synchronize(device)


@contextmanager
def _inference_mode(model: PreTrainedModel) -> Iterator[None]:
    """Dropout off; every module's training flag comes back, and so do the random states."""
    modes = [(module, module.training) for module in model.modules()]
    devices = [model.device] if model.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        try:
            model.eval()
            yield
        finally:
            for module, mode in modes:
                module.training = mode


@contextmanager
def _undisturbed_memory() -> Iterator[None]:
    """What the measurement has allocated on a GPU goes back."""
    try:
        yield
    finally:
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()
