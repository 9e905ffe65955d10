"""Drafts from what the target thought likely: new text, which no tree has seen."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_smartspec import SuffixTreeCandidates
from hf_smartspec.candidates.committed import Committed, Likeliest
from hf_smartspec.candidates.request import SourceRequest
from hf_smartspec.candidates.text.suffix.kernels.likely import NUM_LIKELY, after_one, after_two, new_lines, write_lines
from hf_smartspec.jit import compiled

CERTAIN = [0.99, 0.01]


def likeliest(before, token, following, shares=None):
    shares = shares or CERTAIN[: len(following)]
    return Likeliest(*map(np.array, ([before], [token], [following])), np.array([shares], np.float32))


def started(prompt=(1, 2, 3), namespace="", **options):
    source = SuffixTreeCandidates(max_bytes=2**20, **options)
    source.begin(SourceRequest("a", np.array(prompt), namespace=namespace))
    return source


def show(source, item, name="a"):
    source.observe(name, Committed(np.zeros(0, np.int64), likeliest=item))


def drafted(source, number=4):
    return source.propose(["a"], [number])[0]


def test_what_was_likely_behind_the_last_token_is_drafted_and_what_was_likely_behind_that():
    source = started()
    assert not len(drafted(source)), "nothing is known"
    show(source, likeliest(9, 3, [50, 51]))
    show(source, likeliest(8, 50, [60, 61]))
    tree = drafted(source)
    assert tree.tokens[:2].tolist() == [50, 60]
    assert tree.parents[:2].tolist() == [-1, 0]


@pytest.mark.parametrize("short", Likeliest._fields)
def test_arrays_of_different_lengths_are_refused(short):
    source, arrays = started(), [[9, 8], [3, 50], [[50], [60]], [[1.0], [1.0]]]
    item = Likeliest(*map(np.array, arrays))
    with pytest.raises(ValueError, match=r"must be arrays of \[n\], \[n\], \[n, k\] and \[n, k\], got .*\(1,"):
        show(source, item._replace(**{short: getattr(item, short)[:1]}))
    with pytest.raises(ValueError, match=r"got .*\(2, 0\)"):
        show(source, item._replace(shares=item.shares[:, :0]))
    show(source, item)
    assert drafted(source).tokens.tolist()[:2] == [50, 60]


def test_two_tokens_tell_more_than_one():
    source = started()
    show(source, likeliest(2, 3, [50, 51]))
    show(source, likeliest(9, 3, [70, 71]))  # the newest behind 3, but not behind 2 and 3
    tree = drafted(source)
    assert tree.tokens[0] == 50
    assert 70 in tree.tokens


def test_the_newest_counts():
    source = started()
    show(source, likeliest(2, 3, [50, 51]))
    show(source, likeliest(2, 3, [70, 71]))
    assert drafted(source).tokens.tolist()[0] == 70
    assert 50 not in drafted(source).tokens


def test_what_comes_true_is_trusted_more_and_what_does_not_less():
    def trust(came):
        source = started()
        for _ in range(30):
            show(source, likeliest(2, 3, [4, 5], [0.6, 0.4]))
            tree = drafted(source)
            source.observe("a", np.array([came, 1, 2, 3]))
        return dict(zip(tree.tokens.tolist(), tree.probs.tolist())).get(4, 0.0)

    assert trust(4) > 0.8 > 0.3 > trust(60)


def test_an_empty_text_is_drafted_from_nothing():
    assert not len(drafted(started(())))


def test_namespaces_know_nothing_of_one_another():
    source = started(namespace="mine")
    source.begin(SourceRequest("b", np.array([1, 2, 3]), namespace="other"))
    show(source, likeliest(2, 3, [50, 51]), "b")
    assert not len(drafted(source))
    assert len(source.propose(["b"], [4])[0])
    source.stop("b")
    source.remove_namespace("other")
    source.begin(SourceRequest("b", np.array([1, 2, 3]), namespace="other"))
    assert not len(source.propose(["b"], [4])[0]), "forgotten with the namespace"


def test_it_is_saved_and_loaded(tmp_path):
    source = started()
    show(source, likeliest(2, 3, [50, 51]))
    source.stop("a")
    source.save(tmp_path / "trees")
    loaded = SuffixTreeCandidates.load(tmp_path / "trees", progress=False, max_bytes=2**20)
    loaded.start("a", np.array([1, 2, 3]))
    assert drafted(loaded).tokens[0] == 50


@pytest.mark.parametrize("options", [{"likeliest": False}, {"scoring": "counts"}])
def test_it_can_be_left_out(options):
    assert SuffixTreeCandidates(max_bytes=2**20, **options).num_likeliest == 0
    assert SuffixTreeCandidates(max_bytes=2**20).num_likeliest == NUM_LIKELY


def test_a_small_vocabulary_has_fewer_tokens_to_tell_of():
    source = started((1, 0, 1, 0))
    show(source, likeliest(1, 0, [1], [1.0]))
    assert set(drafted(source).tokens.tolist()) <= {0, 1}


@given(st.lists(st.tuples(st.integers(-1, 2**30), st.integers(0, 2**30)), min_size=1, max_size=40))
def test_lines_are_found_again_by_their_tokens(pairs):
    """The last pair's lines are there; those of the others are, or hold the key of a later pair."""
    before, tokens = np.array(pairs, np.int64).T.copy()
    following = np.tile(tokens[:, None], (1, 2))
    lines = new_lines(1)[0]
    write_lines(lines, before, tokens, following, np.full(following.shape, 0.5, np.float32))
    flat, found = lines.reshape(-1), [compiled(find.py_func) for find in (after_one, after_two)]
    for place, (earlier, token) in enumerate(pairs):
        one, two = found[0](flat, token), found[1](flat, earlier, token)
        assert one != two
        for at in (one, two):
            assert at == -1 or flat[at + 2 : at + 4].tolist() == [token] * 2
        assert min(one, two) >= 0 or place < len(pairs) - 1
    assert np.count_nonzero(lines[:, 0]) <= 2 * len(pairs)
