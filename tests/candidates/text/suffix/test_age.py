"""Which of several followers is the latest: a matter of time, not of where texts lie in memory."""

from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_smartspec import SuffixTreeCandidates
from hf_smartspec.candidates.request import SourceRequest
from hf_smartspec.candidates.text.suffix.files import write
from hf_smartspec.candidates.text.suffix.kernels.insert import move_tree
from hf_smartspec.candidates.text.suffix.kernels.mix import new_model
from hf_smartspec.candidates.text.suffix.kernels.store import CHILD, CLOCK, KIDS, LABEL, LEN, NODE, NUM, PAIR, ROW, SEEN

from .test_source import small
from .test_store import put, small_store, token_lists

_CONTEXT, _OLD, _NEW = 3, 4, 5
_FILLER = np.arange(1000, 1040)


def taught(**options) -> SuffixTreeCandidates:
    """A source that has seen in thirty cases that the later follower comes again."""
    source = small(min_probability=0.0, **options)
    for k in range(30):
        context, old, new = 100 + 3 * k + np.arange(3)
        source.add_outputs([[context, old], [context, new]], progress=False)
        source.start(k, np.array([7, context]))
        source.propose([k], [4])
        source.observe(k, np.array([new]))
        source.stop(k)
    return source


def probabilities(source):
    source.start("x", np.array([7, _CONTEXT]))
    tree = source.propose(["x"], [4])[0]
    return dict(zip(tree.tokens.tolist(), tree.probs.tolist()))


@pytest.mark.parametrize("is_used_again", [False, True])
def test_the_later_output_counts_as_later_wherever_it_lies(is_used_again):
    source = taught()
    (filler,) = source.add_outputs([_FILLER], progress=False)
    (old,) = source.add_outputs([[_CONTEXT, _OLD]], progress=False)
    if is_used_again:
        source.remove_output(filler)
    (new,) = source.add_outputs([[_CONTEXT, _NEW]], progress=False)
    outputs = source._corpus.outputs
    assert (outputs[new].start < outputs[old].start) == is_used_again, "the case at hand"
    probs = probabilities(source)
    assert probs[_NEW] > 0.8 and probs[_OLD] < 0.2


def texts_by(key, corpus):
    return [corpus.tokens(number).tolist() for number in sorted(corpus.outputs, key=partial(key, corpus))]


def test_later_outputs_are_later_after_loading_whichever_was_used_last(tmp_path):
    source, path = taught(), tmp_path / "trees"
    source.add_outputs([[_CONTEXT, _OLD, 20, 21, 22], [_CONTEXT, _NEW], [30, 31]], progress=False)
    source.start("user", np.array([_OLD]))
    source.propose(["user"], [4])
    source.observe("user", np.array([20, 21]))
    source.stop("user")
    order = sorted(source._corpus.outputs, key=source._corpus.last_use)
    assert order != sorted(order), "the case at hand"
    source.save(path)
    options = {"max_bytes": 2**20, "max_depth": 16, "max_match": 8, "min_probability": 0.0}
    loaded = SuffixTreeCandidates.load(path, progress=False, **options)
    assert probabilities(loaded) == pytest.approx(probabilities(source), abs=1e-3)
    for key in (lambda corpus, number: number, lambda corpus, number: corpus.last_use(number)):  # by age, by use
        assert texts_by(key, loaded._corpus) == texts_by(key, source._corpus)


def test_own_text_is_later_than_its_references_also_where_it_lies_before_them_and_after_a_move():
    source = taught()
    own = [_CONTEXT, _NEW]
    source.begin(SourceRequest("x", np.array([*own, 7, _CONTEXT]), references=[np.array([_CONTEXT, _OLD])]))
    first, reference = source._requests["x"].start, source._requests["x"].references[0][0]
    assert first < reference, "the case at hand"
    before = source.propose(["x"], [2])[0]
    assert before.tokens.tolist()[0] == _NEW
    source.observe("x", np.arange(2000, 2600))
    assert source._requests["x"].start != first, "it has moved"
    source.observe("x", np.array([_CONTEXT, _OLD, 8, _CONTEXT]))
    assert source.propose(["x"], [2])[0].tokens.tolist()[0] == _OLD


def latest_of(store, root):
    """When every string that ends with the first token of an edge occurred last, read off the tree."""
    found = {}

    def walk(node, prefix):
        kids = store.nodes[node * NODE + KIDS] * PAIR
        for entry in range(kids, kids + store.nodes[node * NODE + NUM] * ROW, ROW):
            token, _, child, seen = store.rows[entry : entry + ROW].tolist()
            found[(*prefix, token)] = seen
            assert entry + SEEN < len(store.rows)
            if child >= 0:
                label = store.nodes[child * NODE + LABEL]
                walk(child, (*prefix, *store.text[label : label + store.nodes[child * NODE + LEN]].tolist()))
            else:
                assert store.rows[entry + CHILD] < 0

    walk(root, ())
    return found


@settings(deadline=None)
@given(st.lists(token_lists, max_size=6), st.sampled_from([2, 5, 40]), st.sampled_from([0, 2**31 - 60, 2**32 - 60]))
def test_times_are_those_of_the_latest_occurrence(texts, max_depth, begin):
    """Texts lie in memory in the reverse order, and the clock passes the ends of 32-bit numbers on the way."""
    store, root = small_store()
    store.heads[CLOCK] = begin
    for k, text in enumerate(texts):
        put(store, root, 100 * (10 - k), text, max_depth)
    if texts:
        move_tree(store, root, 100 * (11 - len(texts)), 100 * (11 - len(texts)) + len(texts[-1]), 5000)
    tokens = [(token, number) for number, text in enumerate(texts) for token in text]
    for string, seen in latest_of(store, root).items():
        ends = [
            time
            for time in range(len(string) - 1, len(tokens))
            if tuple(token for token, _ in tokens[time - len(string) + 1 : time + 1]) == string
            and len({number for _, number in tokens[time - len(string) + 1 : time + 1]}) == 1
        ]
        assert seen == np.array(begin + max(ends)).astype(np.int32)


def test_order_survives_the_end_of_32_bit_numbers():
    for begin in (2**31 - 42, 2**32 - 42):
        source = taught()
        source._corpus.store.heads[CLOCK] = begin
        source.add_outputs([[_CONTEXT, _OLD], _FILLER, [_CONTEXT, _NEW]], progress=False)
        probs = probabilities(source)
        assert probs[_NEW] > 0.8 and probs[_OLD] < 0.2


def test_files_without_order_of_use_are_read_as_written_in_it(tmp_path):
    """Earlier files hold the longest unused first, and no more about that."""
    path, model, texts = tmp_path / "trees", new_model(), [[1, 2, 3], [4, 5], [6]]
    arrays = {"lengths": np.array([3, 2, 1]), "namespaces": np.zeros(3, np.int32), "tokens": np.arange(1, 7)}
    arrays |= {"cells": model.cells, "weights": model.weights}
    write(path, {"lines": [], "fingerprint": None, "names": [""]}, arrays)
    loaded = SuffixTreeCandidates.load(path, progress=False)._corpus
    assert [loaded.tokens(number).tolist() for number in sorted(loaded.outputs, key=loaded.last_use)] == texts
