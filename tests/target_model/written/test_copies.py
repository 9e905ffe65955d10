"""When copies of weights are made, compared with the weights, and dropped."""

import pytest

from hf_smartspec.target_model.written import copies
from hf_smartspec.target_model.written.copies import KeptCopy


class Weights:
    """Weights whose copies are made in three uses, and how often they were copied and compared thoroughly."""

    def __init__(self, num_unread=0):
        self.value = self.num_copies = self.num_comparisons = 0
        self.error = None
        self.copy = KeptCopy(self._make, self._is_current, num_unread)

    def _make(self):
        found = self.value
        self.num_copies += 1
        yield None
        if self.error is not None:
            raise self.error
        yield None
        yield [found]

    def _is_current(self, copy, thoroughly):
        self.num_comparisons += thoroughly
        return not thoroughly or copy == [self.value]

    def uses(self, num):
        return [self.copy.current() for _ in range(num)]


def interrupt():
    raise KeyboardInterrupt


@pytest.fixture(autouse=True)
def _wait(monkeypatch):
    monkeypatch.setattr(copies, "_LEAST_WAIT", 2)


def test_a_copy_is_made_over_several_uses():
    weights = Weights()
    assert weights.uses(5) == [None, None, [0], [0], [0]] and weights.num_copies == 1


def test_changes_while_it_is_made_are_noticed():
    """Those, too, that are not counted, and that a check in between cannot see."""
    weights = Weights()
    weights.uses(1)
    weights.value = 1
    weights.copy.look(True)
    assert weights.uses(7) == [None] * 6 + [[1]]  # the first is dropped, two wait, and two others go on without one


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError("no room")])
def test_making_that_fails_begins_anew(error):
    weights = Weights()
    weights.uses(1)
    weights.error = error
    if error is KeyboardInterrupt:
        with pytest.raises(KeyboardInterrupt):
            weights.copy.current()
        weights.error = None
        assert weights.uses(3) == [None, None, [0]]
    else:
        assert weights.copy.current() is None
        weights.error = None
        assert weights.uses(5) == [None, None, None, None, [0]]  # it waits first


@pytest.mark.parametrize("num_unread", [0, 3])
def test_a_check_compares_the_copy_once_it_is_used_enough(num_unread):
    weights = Weights(num_unread)
    weights.uses(3)
    before = weights.num_comparisons
    weights.copy.look(True)
    assert weights.uses(num_unread) == [None] * num_unread
    assert weights.num_comparisons - before == (num_unread == 0)
    assert weights.uses(2) == [[0], [0]] and weights.num_comparisons == before + 1
    weights.value = 1
    weights.copy.look(True)
    assert weights.uses(num_unread + bool(num_unread) + 5)[-2:] == [None, [1]]


def test_a_comparison_that_is_interrupted_is_made_again(monkeypatch):
    weights = Weights()
    weights.uses(3)
    weights.value, compare = 1, weights.copy._is_current
    monkeypatch.setattr(weights.copy, "_is_current", lambda copy, thoroughly: not thoroughly or interrupt())
    with pytest.raises(KeyboardInterrupt):
        weights.copy.look(True)
    monkeypatch.setattr(weights.copy, "_is_current", compare)
    assert weights.copy.current() is None, "the old one"


def test_short_runs_after_a_check_compare_nothing():
    weights = Weights(num_unread=3)
    weights.uses(3)
    before = weights.num_comparisons
    for _ in range(4):
        weights.copy.look(True)
        assert weights.uses(2) == [None, None]
    assert weights.num_comparisons == before
