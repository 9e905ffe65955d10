"""Measurement of a model's forwards: as many sizes, and as large ones, as memory, positions and a few seconds allow."""

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
from ..forward.ranks import broadcast_from_rank0, clock_of
from ..layout.rows import CacheRow, RowInput
from ..written import packed_forward

_MIN_ROUNDS, _MAX_ROUNDS = 3, 30  # rounds of all points, after one that warms up
_SECONDS = 5.0  # limit on rounds beyond `_MIN_ROUNDS`, and on points that are not small
_FEW, _FEW_COLUMNS = 16, 1100  # tokens, and columns read, of small points, which are measured in any case
_SLOW_START = 2.0  # times a smaller forward's seconds: a slower first run may have waited for memory or kernels
_MORE_RUNS = 2  # repetitions of such a run
_SLOTS = (1, 4, 16, 64, 256)  # rows of each memory, which has room for their longest contexts
_CPU_SHARE, _SHARE = 1 / 16, 1 / 2  # of free memory, for each of these; a GPU's is freed after measuring
# Limits of a quiet machine: the share of time in which the measuring thread has a processor, and the median run over
# the fastest one. SmolLM2-135M in bfloat16 on two cores: undisturbed, a thread had a processor for 0.98 to 1.00 of a
# run, and medians were 1.02 to 1.04 times the fastest; beside six busy processes 0.3 to 0.7, and 1.01 to 3.2: work that
# never pauses shows in the share alone. Waiting for OpenMP's other threads counts as having a processor, since a thread
# spins meanwhile; with `OMP_WAIT_POLICY=passive` it sleeps, beside those processes for 0.14 of a run in the median, and
# less where the others are not held up. Linux and macOS count in microseconds, Windows in ticks of 16 ms.
_LEAST_SHARE, _MOST_SCATTER = 0.8, 1.5
_COUNTS_TICKS = os.name == "nt"
_BUSY = 0.5  # load per processor above which the machine is busy


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
        """Columns of keys and values, over all rows."""
        return self.rows * (self.context + self.width)

    @property
    def is_small(self) -> bool:
        return self.batched <= _FEW and self.num_columns <= _FEW_COLUMNS


# Sizes by powers of two, closer where GPUs have their knee; contexts short and long. Few points, each with information
# of its own: a CPU measures as many as its speed allows.
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

# Points that the fit does not use.
HELD_OUT = (
    Design(1, 256, 2), Design(1, 256, 6), Design(1, 512, 12), Design(1, 384, 24),
    Design(2, 256, 1), Design(2, 512, 5), Design(3, 128, 3), Design(6, 384, 1), Design(6, 256, 3), Design(8, 128, 2),
    Design(8, 512, 4), Design(8, 256, 12), Design(12, 128, 1), Design(12, 384, 3), Design(16, 256, 6),
    Design(2, 2048, 3), Design(1, 6000, 8), Design(24, 512, 8), Design(48, 256, 6), Design(200, 100, 5),
)  # fmt: skip


_WARM_UP = Design(1, 16, 8)  # few enough tokens for the head's copy on every CPU


class Measured(NamedTuple):
    """The points that could be measured, in the order given, and whether the machine was busy meanwhile."""

    designs: list[CostPoint]
    held_out: list[CostPoint]
    was_busy: bool = False

    def cost(self) -> CostModel:
        """Fit the cost of a forward; provisional if the machine was busy."""
        cost = CostModel.fit(self.designs)
        cost.is_provisional = self.was_busy
        return cost


class Run(NamedTuple):
    """Seconds of one forward, and of these the seconds in which the thread had a processor."""

    seconds: float
    on_processor: float


def measure(
    model: PreTrainedModel, designs: Sequence[Design], held_out: Sequence[Design] = (), progress: bool = True
) -> Measured:
    """
    Measure the seconds of the packed forward at every point for which the model has positions, the machine memory, and
    a few seconds time: points are tried from the smallest to the largest, and where a round of all of them would take
    too long, larger ones are left out. `held_out` are measured as far as the `designs` reach.

    All points take turns, so that a change in the machine's load affects all of them, and the fastest run of each
    counts: other work of the machine is not part of the model's cost. Where even the fastest runs had to wait for a
    processor, or runs of one point differ much, the machine was busy. The model and the global random states stay as
    they are.

    Raises:
        ValueError: if the model has too few positions for any of the `designs`.
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
    was_busy = broadcast_from_rank0(model, lambda: _were_disturbed(model.device, list(runs.values())))
    return Measured(points, others, was_busy)


def warm_up(model: PreTrainedModel) -> None:
    """
    Run forwards that make what later ones use (the trial of a compiled program, a copy of the head, memory), so that no
    step of a model that need not be measured takes much longer than its profile says. Weights that are packed one
    by one in many forwards are left to steps.
    """
    longest = num_positions(model.config.get_text_config(decoder=True)) or float("inf")
    if _WARM_UP.context + _WARM_UP.width > longest:
        return
    with torch.no_grad(), _inference_mode(model):
        _Bench(model, [_WARM_UP]).run(_WARM_UP)  # after a forward of one token, which is the trial


def _measured(
    model: PreTrainedModel, designs: Sequence[Design], held_out: Sequence[Design], progress: bool
) -> dict[Design, list[Run]]:
    """Return every run of each point. All memories are freed when this returns."""
    clock = clock_of(model)
    start = clock()
    bench = _Bench(model, [*designs, *held_out])
    runs = bench.explore(designs, held_out)
    for turn in tqdm(_rounds(start, clock), desc="Measuring the model's speed", leave=False, disable=not progress):
        items = list(runs)
        for index in np.random.default_rng(turn).permutation(len(items)):  # since a run affects the next one
            runs[items[index]].append(bench.run(items[index]))
    return runs


def _point(item: Design, runs: Sequence[Run]) -> CostPoint:
    return CostPoint(item.rows * item.context, item.batched, item.width, min(runs).seconds)


def _were_disturbed(device: torch.device, points: Sequence[Sequence[Run]]) -> bool:
    """Return whether the fastest runs of most points had to wait for a processor, or runs of a point differ much."""
    fastest = [min(runs) for runs in points]
    medians = [float(np.median([run.seconds for run in runs])) for runs in points]
    scatter = np.median([median / best.seconds for median, best in zip(medians, fastest)])
    share = np.median([run.on_processor / run.seconds for run in fastest])
    # A thread that waits for an accelerator may have no processor meanwhile.
    is_telling = device.type == "cpu" and not _COUNTS_TICKS
    return bool(scatter > _MOST_SCATTER or (is_telling and share < _LEAST_SHARE))


def is_busy() -> bool:
    """Return whether the machine has lately had other work for many of its processors, if the system reports it."""
    try:
        return os.getloadavg()[0] > _BUSY * (os.cpu_count() or 1)
    except (AttributeError, OSError):  # Windows; unobtainable
        return False


def _rounds(start: float, clock: Callable[[], float]) -> Iterator[int]:
    """Yield numbers of rounds, as long as there is time."""
    for turn in range(_MAX_ROUNDS):
        if turn >= _MIN_ROUNDS and clock() - start > _SECONDS:
            return
        yield turn


class _Bench:
    """
    A model, and memory for rows of all lengths. One memory for all rows at the longest context would exceed any
    machine's: either few rows may be long, or many short.

    Args:
        items (sequence of `Design`): Points that may be run.
    """

    def __init__(self, model: PreTrainedModel, items: Sequence[Design]):
        self.model, self._clock = model, clock_of(model)
        config = model.config.get_text_config(decoder=True)
        self._tokens = np.arange(max(item.width for item in items)) % config.vocab_size
        self._logit_bytes = 8 * config.vocab_size  # per token, in the model's dtype and as float32
        self._forwards: dict[int, tuple[PackedForward, list[CacheRow]]] = {}  # by rows
        self._capacities = self._shared_out(items)

    def _shared_out(self, items: Sequence[Design]) -> dict[int, int]:
        """Return the columns of every memory, by its number of rows: those of the longest point that fits."""
        free = float(broadcast_from_rank0(self.model, lambda: free_bytes(self.model.device)))
        column = self._bytes_per_column()
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
        """Measure the bytes of a token's keys and values, by a forward of one token."""
        forward = packed_forward(self.model, 1, 1)
        forward.forward([RowInput(forward.add(), self._tokens[:1])])
        return forward.cache.bytes_per_line

    def has_room(self, item: Design) -> bool:
        return _columns(item) <= self._capacities[_slots(item.rows)]

    def explore(self, designs: Sequence[Design], held_out: Sequence[Design]) -> dict[Design, list[Run]]:
        """Return the points that can be measured, without runs; each has run once, or a few times, to warm up."""
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
        """
        Return the seconds of a point's first run, or of the fastest of a few, where the first was slower than expected.
        """
        seconds = self.run(item).seconds
        for _ in range(_MORE_RUNS):
            if seconds <= expected:
                break
            seconds = min(seconds, self.run(item).seconds)
        return seconds

    def run(self, item: Design) -> Run:
        """
        Time one forward of one fed token and a chain in each row. Its time does not depend on the values in the cache.
        """
        forward, rows = self._memory(item)
        for row in rows:
            forward.cut(row, item.context)
        chain = DraftTree.chain(self._tokens[1 : item.width])
        inputs = [RowInput(row, self._tokens[:1], chain, best_only=True) for row in rows]
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
    """Return the columns of each row."""
    return item.context + item.width


def _is_within(small: Design, large: Design) -> bool:
    return small.batched <= large.batched and small.num_columns <= large.num_columns


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.get_device_module(device).synchronize(device)


@contextmanager
def _inference_mode(model: PreTrainedModel) -> Iterator[None]:
    """Turn dropout off; every module's training flag and the random states are restored afterwards."""
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
    """Free the memory that the measurement has allocated on a GPU."""
    try:
        yield
    finally:
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()
