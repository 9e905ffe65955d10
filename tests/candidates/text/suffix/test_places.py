"""Lookups that go on from where the text led before, against lookups from the root."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_smartspec import SuffixTreeCandidates
from hf_smartspec.candidates.text.suffix.kernels import places
from hf_smartspec.jit import compiled

MAX_MATCH = 32  # a power of two: there are as many walks
place_of = compiled(places.place_of.py_func)

texts = st.lists(st.integers(0, 2), min_size=1, max_size=30)
events = st.one_of(
    st.tuples(st.just("add"), texts),
    st.tuples(st.just("remove"), st.integers(0, 5)),
    st.tuples(st.just("observe"), st.lists(st.integers(0, 2), min_size=1, max_size=6)),
)


def new_source(**options):
    return SuffixTreeCandidates(max_depth=40, max_match=MAX_MATCH, **options)


def check_places(source, name):
    """Right after a draft. Returns how many of the text's last strings the namespace's tree has."""
    slots, slot = source._slots._slots, source._requests[name].slot
    start, end = source._slots.span(slot)
    for depth in range(1, min(end - start, MAX_MATCH) + 1):
        known, fresh = (
            place_of(source._corpus.store, slots.trees[slot], 1, slots.points[slot], walks, MAX_MATCH, end, depth)
            for walks in (slots.walks[slot].copy(), np.full_like(slots.walks[slot], -1))
        )
        assert known == fresh if fresh[0] else not known[0]
        if not fresh[0]:
            return depth - 1
    return depth


@settings(deadline=None)
@given(st.lists(texts, max_size=3), texts, st.lists(events, max_size=30))
def test_places_are_those_of_a_lookup_from_the_root(outputs, prompt, events):
    source = new_source(max_bytes=2**20)
    numbers = source.add_outputs(outputs, progress=False)
    source.start("a", np.array(prompt))
    for kind, value in events:
        if kind == "add":
            numbers += source.add_outputs([value], progress=False)
        elif kind == "observe":
            source.observe("a", np.array(value))
        elif numbers:
            source.remove_output(numbers.pop(value % len(numbers)))
        source.propose(["a"], [4])
        check_places(source, "a")


@pytest.mark.parametrize("piece", [1, 5, 40])
def test_places_while_outputs_come_and_go_and_the_text_moves(piece):
    source, rng = new_source(max_bytes=2**19), np.random.default_rng(0)
    text, matched = rng.integers(0, 50, 1500), []
    source.start("a", text[:10])
    first_place = source._requests["a"].start
    for end in range(10 + piece, len(text), piece):
        source.observe("a", text[end - piece : end])
        near = text[max(end - 30, 0) : end + 30]
        changed = np.where(rng.random(len(near)) < 0.05, rng.integers(0, 50, len(near)), near)
        source.add_outputs([changed], progress=False)  # as memory fills up, others go
        source.propose(["a"], [4])
        matched.append(check_places(source, "a"))
    assert max(matched) > 10 and source._requests["a"].start != first_place
