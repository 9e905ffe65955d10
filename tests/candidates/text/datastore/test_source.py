"""The datastore's proposals against a twin that sorts and searches in plain Python."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hf_smartspec.candidates.text.datastore.file import Datastore
from hf_smartspec.candidates.text.datastore.sort import sort_suffixes
from hf_smartspec.candidates.text.datastore.source import DatastoreCandidates
from hf_smartspec.drafts.price import LevelPrice

VOCAB_SIZE = 3  # few tokens: matches of all lengths
tokens = st.integers(0, VOCAB_SIZE - 1)
documents = st.lists(st.lists(tokens, max_size=30), max_size=6)
settings = st.fixed_dictionaries(
    {
        "max_prefix": st.integers(1, 5),
        "num_continuations": st.integers(3, 12),
        "min_continuations": st.integers(1, 3),
        "branch_len": st.integers(1, 4),
        "first_n": st.booleans(),
    }
)


def make_source(docs, **arguments):
    return DatastoreCandidates(Datastore.from_documents(docs, vocab_size=VOCAB_SIZE), **arguments)


def ask(source, text, limit, price=None):
    source.start("one", np.array(text, np.int64))
    tree = source.propose(["one"], [limit], price)[0]
    source.stop("one")
    return tree


def twin(docs, text, limit, max_prefix, num_continuations, min_continuations, branch_len, first_n):
    """(path, count over parent's count, longest match) of every proposed node, best first."""
    suffixes = sorted(doc[start:] for doc in docs for start in range(len(doc)))
    counts, longest = {(): 0}, {}  # by path, in the order in which they are met
    for length in range(min(max_prefix, len(text)), 0, -1):
        matches = [suffix[length:] for suffix in suffixes if suffix[:length] == text[-length:]]
        picked = matches[:num_continuations]
        if len(matches) > num_continuations and not first_n:
            picked = [matches[(2 * i + 1) * len(matches) // (2 * num_continuations)] for i in range(num_continuations)]
        for continuation in picked:
            for depth in range(len(continuation[:branch_len]) + 1):
                path = tuple(continuation[:depth])
                counts[path] = counts.get(path, 0) + 1
                longest.setdefault(path, length)
        if sum(len(continuation) > 0 for continuation in picked) >= min_continuations:
            break
    best = sorted(list(counts)[1:], key=lambda path: (-counts[path], len(path)))  # stable: older ones first
    return [(path, counts[path] / counts[path[:-1]], longest[path]) for path in best[:limit]]


def nodes(tree):
    """(path, prob) of every node."""
    paths = []
    for token, parent in zip(tree.tokens.tolist(), tree.parents.tolist()):
        paths.append((paths[parent] if parent >= 0 else ()) + (token,))
    return list(zip(paths, tree.probs.tolist()))


@given(documents, st.lists(tokens, max_size=8), st.integers(0, 12), settings)
def test_proposals_equal_the_twins(docs, text, limit, arguments):
    tree = ask(make_source(docs, **arguments), text, limit)
    expected = twin(docs, text, limit, **arguments)
    assert [path for path, _ in nodes(tree)] == [path for path, _, _ in expected]
    np.testing.assert_allclose([prob for _, prob in nodes(tree)], [prob for _, prob, _ in expected], rtol=1e-6)
    assert np.broadcast_to(tree.match_lengths, len(tree)).tolist() == [length for _, _, length in expected]
    tree.check_integrity(VOCAB_SIZE)
    assert len(tree) <= limit
    assert (np.diff(tree.path_probs) < 1e-6).all()


@given(st.lists(st.integers(-1, 2), max_size=200), st.integers(2, 70), st.integers(1, 8))
def test_suffixes_are_sorted_as_far_as_promised(text, depth, repeats):
    array = np.array(text * repeats, np.int32)  # long repetitions
    suffixes, starts = sort_suffixes(array, 3, depth)
    assert sorted(suffixes.tolist()) == np.flatnonzero(array >= 0).tolist()
    ends = [next((i for i in range(p, len(array)) if array[i] < 0), len(array)) for p in range(len(array))]
    heads = [array[p : min(ends[p], p + depth)].tolist() for p in suffixes]
    assert heads == sorted(heads)
    for token in range(3):
        assert all(head[0] == token for head in heads[starts[token] : starts[token + 1]])


def test_large_buckets_are_sorted_across_many_vocabularies():
    rng = np.random.default_rng(0)
    for vocab_size in (1, 2, 300, 200_000):  # from 31 down to 3 tokens per key
        array = rng.integers(-1, vocab_size, 4000).astype(np.int32)
        suffixes, _ = sort_suffixes(array, vocab_size, 40)
        ends = np.append(np.flatnonzero(array < 0), len(array))
        heads = [array[p : min(ends[np.searchsorted(ends, p)], p + 40)].tolist() for p in suffixes]
        assert heads == sorted(heads)


def test_a_small_example():
    #            the continuations of (1, 2):  3 4   3 5   3 4   6
    docs = [[1, 2, 3, 4], [1, 2, 3, 5], [0, 1, 2, 3, 4], [1, 2, 6]]
    store = Datastore.from_documents(docs)
    assert (store.vocab_size, store.num_tokens) == (7, 16)
    source = DatastoreCandidates(store, min_continuations=4, branch_len=2)
    tree = ask(source, [5, 1, 2], 9)
    assert nodes(tree) == [
        ((3,), 0.75),
        ((3, 4), pytest.approx(2 / 3)),
        ((6,), 0.25),  # as probable as the next one, and shallower
        ((3, 5), pytest.approx(1 / 3)),
    ]
    assert nodes(ask(source, [5, 1, 2], 2)) == nodes(tree)[:2]


def test_shorter_ends_are_tried_until_there_are_enough_continuations():
    docs = [[0, 1, 2], [2, 1, 0], [2, 1, 0]]
    few, more = make_source(docs, min_continuations=1), make_source(docs, min_continuations=2)
    assert nodes(ask(few, [0, 1], 9)) == [((2,), 1.0)]
    # The match of two tokens counts once more as a match of one.
    assert nodes(ask(more, [0, 1], 9)) == [((2,), 0.5), ((0,), 0.5)]
    # Behind (2, 1, 0) and (1, 0) there is nothing, twice each: that is no continuation, but it counts.
    assert nodes(ask(few, [2, 1, 0], 9)) == [((1,), pytest.approx(1 / 7)), ((1, 2), 1.0)]


def test_drafts_and_matches_stay_within_documents():
    source = make_source([[0, 1], [2, 2]], min_continuations=1)
    assert nodes(ask(source, [0], 9)) == [((1,), 1.0)]
    assert len(ask(source, [0, 1], 9)) == 0  # what follows is another document
    assert nodes(ask(source, [1, 2], 9)) == [((2,), 0.5)]  # (1, 2) occurs across the border only


def test_regular_intervals_show_what_the_first_ones_hide():
    docs = [[0, 0]] * 60 + [[0, 1]] * 20 + [[0, 2]] * 20
    arguments = {"num_continuations": 10, "min_continuations": 1, "max_prefix": 1}
    spread, first = make_source(docs, **arguments), make_source(docs, **arguments, first_n=True)
    # Of the 160 matches in sorted order, 60 have nothing behind them, 60 go on with 0, 20 with 1 and 20 with 2.
    # Picked are those at 8, 24, 40, 56; 72, 88, 104; 120, 136; 152.
    approx = [pytest.approx(0.3), pytest.approx(0.2), pytest.approx(0.1)]
    assert nodes(ask(spread, [0], 3)) == [((token,), prob) for token, prob in enumerate(approx)]
    assert len(ask(first, [0], 3)) == 0


def test_a_text_that_repeats_itself_is_a_chain():
    source = make_source([[0, 1, 2] * 200], min_continuations=10, branch_len=8)
    tree = ask(source, [0, 1, 2, 0], 8)
    assert tree.tokens.tolist() == [1, 2, 0, 1, 2, 0, 1, 2]
    assert tree.is_chain


@pytest.mark.parametrize("docs", [[], [[]], [[], []], [[1]]])
def test_a_datastore_with_nothing_to_say(docs):
    source = make_source(docs)
    assert len(ask(source, [1, 2], 5)) == 0
    assert len(ask(source, [], 5)) == 0


def test_tokens_outside_the_vocabulary_match_nothing():
    source = make_source([[0, 1, 2]], min_continuations=1)
    assert len(ask(source, [99], 5)) == 0
    assert len(ask(source, [-1], 5)) == 0
    assert nodes(ask(source, [99, 0], 5)) == [((1,), 1.0), ((1, 2), 1.0)]


@pytest.mark.parametrize("num_threads", [1, 2])
def test_a_batch_equals_single_calls(num_threads):
    rng = np.random.default_rng(0)
    docs = [rng.integers(0, VOCAB_SIZE, 40).tolist() for _ in range(20)]
    source = make_source(docs, num_nodes=6)
    texts = [rng.integers(0, VOCAB_SIZE, length) for length in range(40)]
    limits = [row % 10 for row in range(40)]
    single = [nodes(ask(source, text, limit)) for text, limit in zip(texts, limits)]
    torch.set_num_threads(num_threads)
    for name, text in enumerate(texts):
        source.start(name, text)
    trees = source.propose(list(range(40)), limits)
    backwards = source.propose(list(range(39, -1, -1)), limits[::-1])
    assert [nodes(tree) for tree in trees] == single
    assert [nodes(tree) for tree in reversed(backwards)] == single
    assert source.propose([], []) == []


@given(st.lists(tokens, max_size=20), st.lists(st.integers(0, 20), max_size=5))
def test_a_text_may_come_in_pieces(text, cuts):
    source = make_source([[0, 1, 2, 2, 1, 0, 1, 1, 2, 0, 2]], max_prefix=4)
    borders = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    source.start("pieces", np.array([], np.int64))
    for start, end in pairwise(borders):
        source.observe("pieces", np.array(text[start:end], np.int64))
    assert nodes(source.propose(["pieces"], [9])[0]) == nodes(ask(source, text, 9))


def test_requests_come_and_go():
    source = make_source([[0, 1, 2]], min_continuations=1)
    source.stop("never started")
    source.start("a", np.array([0]))
    source.start("b", np.array([1]))
    assert [tree.tokens.tolist() for tree in source.propose(["b", "a"], [5, 5])] == [[2], [1, 2]]
    source.stop("a")
    source.start("a", np.array([], np.int64))
    assert [tree.tokens.tolist() for tree in source.propose(["a", "b"], [5, -1])] == [[], []]


def test_it_also_drafts_inside_transformers_own_loop():
    source = make_source([[0, 1, 2]], min_continuations=1)
    ids, scores = source.get_candidates(torch.tensor([[2, 0]]))
    assert ids.tolist() == [[2, 0, 1, 2]] and scores is None


def test_a_shared_datastore_cannot_be_changed():
    store = Datastore.from_documents([[0, 1, 2]])
    for part in (store.tokens, store.suffixes, store.starts):
        with pytest.raises(ValueError, match="read-only"):
            part[0] = 1


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"num_nodes": 0}, ValueError, "`num_nodes` must be an integer in .*, got 0"),
        ({"max_prefix": 2.5}, ValueError, "max_prefix"),
        ({"branch_len": True}, ValueError, "branch_len"),
        ({"num_continuations": -1}, ValueError, "num_continuations"),
        ({"min_continuations": 101}, ValueError, "101 > 100"),
        ({"max_prefix": 60}, ValueError, "60 \\+ 8"),
        ({"first_n": 1}, TypeError, "first_n"),
    ],
)
def test_bad_arguments_are_refused(arguments, error, match):
    with pytest.raises(error, match=match):
        make_source([[0, 1]], **arguments)


def test_what_is_no_datastore_is_refused():
    with pytest.raises(TypeError, match="got list"):
        DatastoreCandidates([[0, 1]])


def test_where_goodput_decides_further_nodes_are_proposed_as_far_as_they_are_worth_their_price():
    docs = np.random.default_rng(0).choice(VOCAB_SIZE, (40, 30), p=[0.6, 0.3, 0.1]).tolist()
    source, text = make_source(docs), [0, 1]
    most = ask(source, text, 10**6)
    sizes = []
    for node in (9.0, 0.055, 0.025, 0.015):  # no ratios of counts, which float32 rounds
        tree = ask(source, text, source.most_nodes, LevelPrice(0.0, 0.0, node))
        sizes.append(len(tree))
        assert tree.tokens.tolist() == most.tokens[: len(tree)].tolist()
        worth = int((most.path_probs >= node).sum())
        assert len(tree) == min(max(worth, 16), 63)
    assert sizes[0] == 16 < sizes[1] < sizes[2]
    assert len(ask(source, text, 63, LevelPrice(0.0, 0.0, 0.025, trust=0.5))) < sizes[2]
    assert len(ask(source, text, 10**6)) == len(most)
    named = make_source(docs, num_nodes=4)
    assert named.most_nodes == named.default_num_nodes == 4
    assert len(ask(named, text, 30, LevelPrice(0.0, 0.0, 0.01))) == 30
