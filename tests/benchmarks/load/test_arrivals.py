"""Phases have their own rates; traces are read as they are."""

import gzip

import numpy as np
import pytest

from benchmarks.load.arrivals import alternating, read_trace
from tests.simulator.helpers import rng

AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:04.5000000,30,8\n2023-11-16 18:17:03.2500000,4808,0\n"
)
MOONCAKE = "timestamp_ms,input_length,output_length,hash_ids\n0,600,5,7 8\n1500,1024,6,7 9\n"


def test_phases_have_their_own_rates_in_turn():
    times = alternating([20.0, 2.0], 50.0, 10_000, rng())
    assert (np.diff(times) >= 0).all()
    phases = (times // 50.0).astype(int)
    counts = np.bincount(phases)[:-1]  # the last one is not full
    assert counts[0::2].mean() == pytest.approx(1000, rel=0.06)
    assert counts[1::2].mean() == pytest.approx(100, rel=0.2)
    assert len(alternating([1.0], 1.0, 0, rng())) == 0


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: alternating([], 1.0, 3, rng()), "`rates` must name"),
        (lambda: alternating([1.0, np.inf], 1.0, 3, rng()), "`rates` must be positive"),
        (lambda: alternating([1.0], 0.0, 3, rng()), "`period`"),
    ],
)
def test_bad_phases_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_traces_are_read_in_the_order_of_time(tmp_path):
    path = tmp_path / "azure.csv"
    path.write_text(AZURE)
    trace = read_trace(path)
    assert trace.times.tolist() == [0.0, 1.25] and trace.blocks is None
    assert trace.prompt_lens.tolist() == [4808, 30] and trace.output_lens.tolist() == [1, 8], "at least one token"


def test_compressed_traces_with_blocks(tmp_path):
    path = tmp_path / "mooncake.csv.gz"
    with gzip.open(path, "wt") as file:
        file.write(MOONCAKE)
    trace = read_trace(path)
    assert trace.times.tolist() == [0.0, 1.5] and [blocks.tolist() for blocks in trace.blocks] == [[7, 8], [7, 9]]
    faster = trace.at_rate(2.0).shortened(700, 5)
    assert faster.times.tolist() == [0.0, 0.5] and faster.rate == 2.0
    assert faster.prompt_lens.tolist() == [600, 700] and faster.output_lens.tolist() == [5, 5]
    assert len(read_trace(path, num_requests=1).times) == 1


@pytest.mark.parametrize(
    ("content", "message"),
    [("a,b\n1,2\n", "columns are a, b"), ("", "no trace"), (AZURE.splitlines()[0], "holds no requests"),
     (MOONCAKE + "x,1,1,1\n", "could not convert"), (AZURE + "2023-11-16 18:17:03.25\n", "no trace")],
)  # fmt: skip
def test_other_files_are_refused(tmp_path, content, message):
    path = tmp_path / "file.csv"
    path.write_text(content)
    with pytest.raises(ValueError, match=message):
        read_trace(path)
    with pytest.raises(OSError):
        read_trace(tmp_path / "missing.csv")
