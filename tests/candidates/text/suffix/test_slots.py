"""The memory of running requests: growth that fails or is interrupted, and drafts that outlive what they came from."""

from types import SimpleNamespace

import numpy as np
import pytest

from hf_smartspec import SuffixTreeCandidates
from hf_smartspec.candidates.request import SourceRequest
from hf_smartspec.candidates.text.suffix import slots as suffix_slots


def fail_once(monkeypatch, name, error):
    """The next call of a function that `suffix_slots` calls raises; those behind it do not."""
    is_numpy = name.startswith("np.")
    if is_numpy:
        monkeypatch.setattr(suffix_slots, "np", SimpleNamespace(**vars(np)))
    owner, attribute = (suffix_slots.np, name[3:]) if is_numpy else (suffix_slots, name)
    function, calls = getattr(owner, attribute), []

    def failing(*args, **kwargs):
        calls.append(args)
        if len(calls) == 1:
            raise error
        return function(*args, **kwargs)

    monkeypatch.setattr(owner, attribute, failing)


def prompt(k):
    return np.array([10 * k + 1, 10 * k + 2, 10 * k + 3, 5, 10 * k + 1])


def check_drafts(source, names):
    for name, tree in zip(names, source.propose(names, [2] * len(names))):
        assert tree.best_chain().tokens.tolist() == [10 * name + 2, 10 * name + 3]


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("new_slots", MemoryError()),
        ("new_scratch", MemoryError()),
        ("new_model", MemoryError()),
        ("np.array", KeyboardInterrupt()),  # the table of addresses is about to be made
    ],
)
def test_growth_that_fails_is_done_by_the_next_start(monkeypatch, name, error):
    source = SuffixTreeCandidates(max_bytes=2**20)
    for k in range(8):  # as many as there is room for at first
        source.start(k, prompt(k))
    fail_once(monkeypatch, name, error)
    with pytest.raises(type(error)):
        source.begin(SourceRequest(8, prompt(8), namespace="another namespace"))
    check_drafts(source, range(8))
    for k in range(8, 40):
        source.begin(SourceRequest(k, prompt(k), namespace=f"namespace {k % 5}"))
    check_drafts(source, range(40))
    for k in range(40):
        source.stop(k)
    assert source.num_bytes() == 0, "the start that failed left nothing"


def test_an_interrupted_draft_can_be_asked_for_again(monkeypatch):
    source = SuffixTreeCandidates(max_bytes=2**20)
    for k in range(40):
        source.start(k, prompt(k))
    fail_once(monkeypatch, "np.array", KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        check_drafts(source, range(40))
    check_drafts(source, range(3))
    check_drafts(source, range(40))


def test_learning_from_a_draft_whose_texts_are_gone_marks_no_foreign_memory():
    source = SuffixTreeCandidates(max_bytes=2**20, min_probability=0.0)
    corpus = source._corpus
    fenced = np.zeros(len(corpus.owners) + 1, np.int32)
    fenced[0] = 777  # what lies before `owners`
    corpus.owners = fenced[1:]
    source._slots.refresh()
    numbers = source.add_outputs([[5, 6, 7, 8, 9, 10, 11 + k, 12, 13] for k in range(3)], progress=False)
    source.start("a", np.array([1, 2, 3, 5, 6]))
    assert source.propose(["a"], [8])[0].tokens[:4].tolist() == [7, 8, 9, 10]
    for number in numbers:  # as room for another request's text asks for
        source.remove_output(number)
    source.observe("a", np.array([7, 8, 9, 10]))
    source.propose(["a"], [8])
    assert corpus.used[777] == 0


def test_large_drafts_take_memory_that_is_counted_apart():
    """It grows with the next power of two of their nodes, and with the number of requests, and then stays."""
    source = SuffixTreeCandidates(max_bytes=2**20, num_nodes=300)
    source.start(0, prompt(0))
    sizes = [source.draft_bytes()]
    for num_nodes in (2, 63, 64, 100, 300, 500, 2):
        source.propose([0], [num_nodes])
        sizes.append(source.draft_bytes())
    assert sizes[0] == sizes[1] == sizes[2] < sizes[3] == sizes[4] < sizes[5] == sizes[6] == sizes[7]
    assert sizes[5] > 512 * 8 * 100, "eight slots, of some hundred bytes for each node"
    kept = source.num_bytes()
    for k in range(1, 9):
        source.start(k, prompt(k))
    assert 1.5 * sizes[7] < source.draft_bytes() < 2.5 * sizes[7], "nine requests have 16 slots"
    for k in range(9):
        source.stop(k)
    assert source.num_bytes() <= kept
