"""Comparisons of the peers' answers; `test_command.py` has them measured."""

import pytest

from benchmarks.decode.peers.measuring import agreeing, compared, ratio


def test_tokens_count_up_to_the_first_that_differs():
    row = compared([[5, 9, 7], [5, 6, 7]], [[5, 6, 7]] * 2)
    assert (row["num_rows"], row["num_tokens"], row["num_same_rows"], row["num_same_tokens"]) == (2, 6, 1, 4)
    assert agreeing([1, 2, 3], [1, 2, 3]) == 3 and agreeing([1], [2]) == 0


@pytest.mark.parametrize("plain", ["transformers, plain", "smartspec, generate on it"])
def test_ratios_are_to_plain_generate_turn_by_turn(plain):
    def row(*seconds):
        return {"runs": [{"seconds": value} for value in seconds]}

    own, rows = row(1.0, 4.0, 1.0), {plain: row(2.0, 12.0, 2.5)}
    assert ratio(own, rows) == 2.5
    assert ratio({"seconds": 2.0}, {plain: {"seconds": 3.0}}) == 1.5, "of a single turn"
    assert ratio(own, {"llama.cpp, plain": own}) is None
