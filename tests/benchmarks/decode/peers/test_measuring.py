"""Turns of the peers, and what is made of them."""

import pytest

from benchmarks.decode.peers.measuring import Measuring, agreeing, finish
from benchmarks.decode.peers.processes import Answer, PeerError
from benchmarks.decode.peers.texts import Group

SQL, BATCH = Group("sql", 1, [[0], [1]]), Group("sql", 4, [[0, 1, 2, 3]])


class FakeProcess:
    """A peer that takes `seconds` per call, the first time ten times as long."""

    def __init__(self, name, calls, seconds=1.0, tokens=(5, 6, 7), failing=()):
        self.name, self.calls, self.seconds, self.tokens, self.failing = name, calls, seconds, list(tokens), failing
        self.ways = {"plain": True, "lookup": False}
        self.known = set()

    def decode(self, way, rows):
        self.calls.append((self.name, way, rows))
        if way in self.failing:
            raise PeerError("no kernel")
        seconds = self.seconds if (way, tuple(rows)) in self.known else 10 * self.seconds
        self.known.add((way, tuple(rows)))
        return Answer(seconds, [self.tokens] * len(rows))


def measured(processes, groups, repeats=2, rows=None, failures=None):
    rows = {} if rows is None else rows
    measuring = Measuring(
        processes, [[5, 6, 7]] * 4, repeats, rows, {} if failures is None else failures, lambda _: None
    )
    measuring.run(groups)
    finish(rows)
    return rows


def test_peers_take_turns_and_the_first_turn_warms_up():
    calls = []
    peers = {"transformers": FakeProcess("a", calls), "llama.cpp": FakeProcess("b", calls, seconds=0.5)}
    rows = measured(peers, [SQL, BATCH])
    turn = [(peer, way, call) for peer in "ab" for way in ("plain", "lookup") for call in SQL.calls]
    assert calls == turn * 3 + [(peer, "plain", BATCH.calls[0]) for peer in "ab"] * 3  # lookup takes one row only
    assert {name: row["seconds"] for name, row in rows.items() if row["batch_size"] == 4} == {
        "transformers, plain, sql, batch 4": [1.0, 1.0],
        "llama.cpp, plain, sql, batch 4": [0.5, 0.5],
    }
    assert [row["ratio"] for row in rows.values()] == [1.0, 1.0, 2.0, 2.0, 1.0, 2.0]
    assert rows["llama.cpp, lookup, sql, batch 1"]["tokens_per_second"] == 6.0


def test_a_way_that_fails_is_named_and_left_out_and_tried_again_the_next_time():
    calls, failures = [], {}
    peers = {"a": FakeProcess("a", calls, failing=["lookup"]), "b": FakeProcess("b", calls, tokens=[5, 6])}
    rows = measured(peers, [SQL], failures=failures)
    assert list(rows) == ["a, plain, sql, batch 1"] and rows["a, plain, sql, batch 1"]["ratio"] is None
    assert failures["a, lookup, sql, batch 1"] == "no kernel"
    assert "decoded [2] tokens in place of 3" in failures["b, plain, sql, batch 1"]
    assert calls.count(("a", "lookup", [0])) == 1
    peers["a"].failing = ()
    measured(peers, [SQL], rows=rows, failures=failures)
    assert "a, lookup, sql, batch 1" in rows and "a, lookup, sql, batch 1" not in failures


def test_tokens_count_up_to_the_first_that_differs():
    rows = measured({"a": FakeProcess("a", [], tokens=[5, 9, 7])}, [BATCH])
    row = rows["a, plain, sql, batch 4"]
    assert (row["num_rows"], row["num_tokens"], row["num_same_rows"], row["num_same_tokens"]) == (4, 12, 0, 4)
    assert agreeing([1, 2, 3], [1, 2, 3]) == 3 and agreeing([1], [2]) == 0


@pytest.mark.parametrize(("peer", "way"), [("transformers", "plain"), ("smartspec", "generate on it")])
def test_ratios_are_to_plain_generate_turn_by_turn(peer, way):
    row = {"text": "sql", "batch_size": 1, "num_tokens": 6}
    rows = {
        "own": row | {"peer": "smartspec", "way": "auto", "seconds": [1.0, 4.0, 1.0]},
        "plain": row | {"peer": peer, "way": way, "seconds": [2.0, 12.0, 2.5]},
        "other": row | {"peer": peer, "way": way, "seconds": [9.0, 9.0, 9.0], "text": "chat"},
    }
    finish(rows)
    assert rows["own"]["ratio"] == 2.5
