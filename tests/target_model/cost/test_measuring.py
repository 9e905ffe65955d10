"""What is measured of a model: as much as positions, memory and time allow."""

import weakref

import numpy as np
import pytest
import torch

from hf_smartspec.goodput import CostModel
from hf_smartspec.target_model.cost import measuring
from hf_smartspec.target_model.cost.measuring import DESIGN, HELD_OUT, Design, Run, is_busy, measure

from ...models import new_model

FEW = (Design(1, 8, 1), Design(1, 8, 4), Design(3, 8, 1), Design(3, 16, 2), Design(2, 30, 3))


@pytest.fixture
def seconds(monkeypatch):
    """Forwards take what the test says, which is called with the point; what is run is noted."""
    runs = []

    def set_seconds(of):
        def run(bench, item):
            runs.append(item)
            took = of(item)
            return took if isinstance(took, Run) else Run(took, took)

        monkeypatch.setattr(measuring._Bench, "run", run)
        monkeypatch.setattr(measuring, "_MIN_ROUNDS", 3)
        monkeypatch.setattr(measuring, "_MAX_ROUNDS", 3)
        monkeypatch.setattr(measuring, "free_bytes", lambda device: 64 * 2**30)  # this machine may have less free
        return runs

    return set_seconds


def long_model():
    return new_model("llama", max_position_embeddings=10_000)


def points_of(items):
    return [(item.rows * item.context, item.rows * item.width, item.width) for item in items]


def test_measures_every_point_that_the_model_has_positions_for(monkeypatch):
    monkeypatch.setattr(measuring, "_SECONDS", 0.0)
    model = new_model("llama")
    longest = model.config.max_position_embeddings
    designs, held_out = (*FEW, Design(1, longest, 1)), (Design(2, 8, 2), Design(2, 16, 9))
    points, others, _ = measure(model, designs, held_out, progress=False)
    assert [point[:3] for point in points] == points_of(FEW)
    assert [point[:3] for point in others] == [(16, 4, 2)], "no further than the others"
    assert all(0 < point.seconds < 60 for point in points)
    with pytest.raises(ValueError, match="too short"):
        measure(model, [Design(1, longest, 1)], progress=False)


def test_memory_is_given_back_when_nobody_holds_it_any_more(monkeypatch):
    benches, alive = [], []
    make = measuring._Bench.__init__

    def made(bench, *args):
        benches.append(weakref.ref(bench))
        make(bench, *args)

    monkeypatch.setattr(measuring._Bench, "__init__", made)
    monkeypatch.setattr(measuring, "_SECONDS", 0.0)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: alive.extend(bench() is not None for bench in benches))
    measure(new_model("llama"), FEW, progress=False)
    assert alive == [False]


def test_a_fast_machine_is_measured_up_to_2048_tokens_and_contexts_of_8k(seconds):
    runs = seconds(lambda item: 1e-3 + 1e-6 * item.batched)
    points, others, _ = measure(long_model(), DESIGN, HELD_OUT, progress=False)
    assert len(points) == len(DESIGN) and len(others) == len(HELD_OUT)
    assert max(point.batched for point in points) == 2048 and max(point.context for point in points) > 100_000
    assert {runs.count(item) for item in DESIGN[1:]} == {4} and runs.count(DESIGN[0]) == 6, "to warm up, and thrice"


def test_a_slow_machine_is_measured_as_far_as_seconds_go(seconds):
    """200 M parameters on two CPU cores: 2,048 tokens would take seconds."""
    runs = seconds(lambda item: 20e-3 + 0.8e-3 * item.batched + 2e-6 * item.rows * item.context)
    points, others, _ = measure(long_model(), DESIGN, HELD_OUT, progress=False)
    sizes = {point.batched for point in points}
    assert {1, 2, 4, 8, 16, 32, 64} <= sizes and max(sizes) <= 256 and max(point.context for point in points) > 4000
    assert sum(point.seconds for point in points) < 1.3 * measuring._SECONDS / 4
    assert 0 < len(others) < len(HELD_OUT) and max(point.batched for point in others) <= max(sizes)
    assert max(item.batched for item in runs) <= 256, "nothing larger has even been tried"


def test_few_tokens_are_measured_however_slow_the_machine_is(seconds):
    runs = seconds(lambda item: 0.5 + 0.05 * item.batched)
    points, *_ = measure(long_model(), DESIGN, progress=False)
    assert {1, 2, 4, 8, 16} == {point.batched for point in points} and len(points) < 12
    assert max(item.num_columns for item in runs) <= measuring._FEW_COLUMNS
    assert {64, 768} <= {point.context for point in points}, "what contexts cost is told, too"
    CostModel.fit(points)


def test_a_slow_first_run_ends_nothing(seconds):
    """Kernels are looked for, and memory is touched for the first time."""
    seen = set()

    def take(item):
        is_first = item not in seen
        seen.add(item)
        return 1.0 if is_first else 1e-3

    seconds(take)
    assert len(measure(long_model(), DESIGN, progress=False).designs) == len(DESIGN)


def test_points_that_find_no_room_are_left_out(seconds, monkeypatch):
    runs = seconds(lambda item: 1e-3)
    model = long_model()
    column = measuring._Bench(model, FEW)._bytes_per_column()
    num_columns = 16 * (64 + 8)
    monkeypatch.setattr(measuring, "free_bytes", lambda device: int(num_columns * column / measuring._CPU_SHARE))
    points, others, _ = measure(model, DESIGN, HELD_OUT, progress=False)
    found = {point[:3] for point in points}
    assert max(point.context + point.batched for point in (*points, *others)) <= num_columns
    assert {(64, 1, 1), (64, 2, 2), (64, 16, 16)} <= found and (768, 1, 1) in found and (64 * 16, 16, 1) in found
    assert max(item.rows * (item.context + item.width) for item in runs) <= num_columns and others


def test_rows_of_one_memory_are_cut_to_their_contexts():
    bench = measuring._Bench(new_model("llama"), FEW)
    for item in FEW:
        run = bench.run(item)
        assert min(run) > 0
    (forward, rows), (_, single) = bench._forwards[4], bench._forwards[1]
    assert {row.stride for row in forward.cache.rows} == {33} and len(rows) == 4 and len(single) == 1
    assert len(forward.cache.rows) == 4 and not any(row.length for row in rows)
    assert np.unique([item.rows for item in FEW]).tolist() == [1, 2, 3], "two and three rows have four slots"


@pytest.mark.parametrize(
    ("take", "was_busy"),
    [
        (lambda turn: Run(1e-3, 1e-3), False),
        (lambda turn: Run(2e-3, 1e-3) if turn % 3 else Run(1e-3, 1e-3), True),  # the median run takes twice as long
        (lambda turn: Run(1e-3, 0.5e-3), True),  # somebody else has the processor half of the time, evenly
        (lambda turn: Run(2e-3, 1e-3) if turn % 3 == 2 else Run(1e-3, 0.95e-3), False),  # the fastest runs count
    ],
)
def test_what_was_measured_on_a_busy_machine_is_provisional(seconds, take, was_busy):
    turns = {}

    def run(item):
        turns[item] = turns.get(item, -1) + 1
        return take(turns[item])

    seconds(run)
    measured = measure(long_model(), FEW, progress=False)
    assert measured.was_busy == was_busy == measured.cost().is_provisional


def test_who_waits_for_an_accelerator_needs_no_processor():
    runs = [[Run(1e-3, 1e-5)] * 3] * 5
    assert measuring._were_disturbed(torch.device("cpu"), runs)
    assert not measuring._were_disturbed(torch.device("cuda"), runs)


def test_ticks_that_are_longer_than_a_forward_say_nothing(monkeypatch):
    runs = [[Run(1e-3, 0.0)] * 3] * 5
    assert measuring._were_disturbed(torch.device("cpu"), runs)
    monkeypatch.setattr(measuring, "_COUNTS_TICKS", True)
    assert not measuring._were_disturbed(torch.device("cpu"), runs)


def test_a_machine_with_load_for_half_of_its_processors_is_busy(monkeypatch):
    monkeypatch.setattr(measuring.os, "cpu_count", lambda: 8)
    for load, expected in ((0.3, False), (3.9, False), (4.1, True), (14.0, True)):
        monkeypatch.setattr(measuring.os, "getloadavg", lambda load=load: (load, 0.0, 0.0))
        assert is_busy() == expected
    monkeypatch.delattr(measuring.os, "getloadavg")
    assert not is_busy(), "nothing is known"
