"""What a simulated forward is said to read."""

import numpy as np

from hf_smartspec import DraftTree
from hf_smartspec.goodput import CostModel
from hf_smartspec.simulator.clock import EventClock
from hf_smartspec.simulator.forward import ForwardSize, SimulatedForward
from hf_smartspec.target_model.layout.rows import CacheRow, RowInput


def inputs_of(lengths, widths):
    rows = [CacheRow(slot, length) for slot, length in enumerate(lengths)]
    return [RowInput(row, np.arange(1), DraftTree.chain(range(width - 1))) for row, width in zip(rows, widths)]


def test_similar_rows_are_padded_to_the_longest_and_widest():
    assert ForwardSize.of(inputs_of([90, 100, 95], [1, 2, 3])) == (300, 6, 3)


def test_parts_are_padded_apart_and_every_further_call_is_worth_some_columns():
    size = ForwardSize.of(inputs_of([1000, 990, 100, 90], [1, 3, 2, 1]), call=300)
    assert size.context == 2 * 1000 + 2 * 100 + 300
    assert size.batched == 7
    assert size.width == (2 * 1000 * 3 + 2 * 100 * 2 + 300) / size.context


def test_prompts_do_not_widen_other_rows():
    inputs = [*inputs_of([400, 400], [1, 1]), RowInput(CacheRow(2), np.arange(300))]
    assert ForwardSize.of(inputs, call=100) == (2 * 400 + 0 + 100, 302, 1)


def test_policies_are_told_what_the_forward_will_read():
    forward = SimulatedForward(CostModel(alpha=1e-6, gamma=1e-3, delta=1e-2), EventClock(), end_id=0, call=70)
    rows = [forward.add() for _ in range(5)]
    for row, length in zip(rows, [500, 40, 30, 450, 460]):
        row.length = length
    inputs = [RowInput(row, np.arange(1)) for row in rows]
    assert forward.padded_context(rows) == ForwardSize.of(inputs, call=70).context == 500 + 80 + 920 + 140
