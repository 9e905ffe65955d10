"""Memory of suffix trees: places that grow, the bound, what is forgotten first, and what failures leave behind."""

import ctypes
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_smartspec import SuffixTreeCandidates
from hf_smartspec.candidates.request import SourceRequest
from hf_smartspec.candidates.text.suffix import corpus as corpus_module
from hf_smartspec.candidates.text.suffix.corpus import SuffixCorpus
from hf_smartspec.candidates.text.suffix.kernels import store as storage
from hf_smartspec.candidates.text.suffix.kernels.store import BLOCK, NODE, NODES_TOP, ROW, ROWS_TOP, Store, new_store

from ....covering import examples
from .test_source import SENTENCE, ids, run, small
from .test_store import token_lists


def test_long_outputs_move_to_larger_places():
    source, rng = SuffixTreeCandidates(max_bytes=2**22), np.random.default_rng(0)
    output = np.concatenate([SENTENCE, rng.integers(100, 2000, 3000), SENTENCE[:4]])
    source.start("a", ids(1))
    for first in range(0, len(output), 37):
        source.observe("a", output[first : first + 37])
    assert source.propose(["a"], [4])[0].best_chain().tokens.tolist() == [15, 16, 17, 18]
    source.stop("a")
    assert source.num_cached_tokens() == len(output) + 1


def test_long_commits_stay_in_their_own_place():
    """All at once, far more than the place has room for: the neighbour's text must not be touched."""
    source, rng = small(max_bytes=2**22), np.random.default_rng(0)
    secret, long = rng.integers(5000, 6000, 600), rng.integers(100, 2000, 5000)
    source.start("a", ids(1, 2, 3))
    source.start("b", secret)
    source.observe("a", long)
    for name, text in (("a", [1, 2, 3, *long.tolist()]), ("b", secret.tolist())):
        source.propose([name], [1])
        start, end = source._slots.span(source._requests[name].slot)
        assert source._corpus.store.text[start:end].tolist() == text
    source.start("c", rng.integers(7000, 8000, 300))
    source.observe("a", long[-9:-5])
    assert source.propose(["a"], [4])[0].best_chain().tokens.tolist() == long[-5:-1].tolist()


def test_more_outputs_than_there_was_room_for_at_first():
    """The arrays that the compiled code knows by address are replaced on the way."""
    source = small(max_bytes=2**22)
    for k in range(1100):
        run(source, k, [1], [50 + k % 7, 60, 61])
    for k in range(30):  # more running requests, and namespaces, than there was room for at first
        source.begin(SourceRequest(("r", k), ids(1, 60), namespace=f"tenant {k % 5}"))
    assert [len(tree) for tree in source.propose([("r", k) for k in range(30)], [4] * 30)] == [0] * 30
    source.start("x", ids(9, 60))
    assert source.propose(["x"], [1])[0].tokens.tolist() == [61]


def test_requests_without_output_leave_nothing():
    source = small()
    for length in (3, 10, 30):
        source.begin(SourceRequest(length, np.arange(length), references=[SENTENCE]))
        source.stop(length)
    assert source.num_cached_tokens() == 0 and source.num_bytes() == 0


def test_forgotten_namespaces_are_learnt_anew():
    source, fresh = small(), small()
    for k in range(30):
        run(source, k, [1, 2], [*SENTENCE, k])
    source.remove_namespace("")
    for one in (source, fresh):
        one.start("x", ids(11, 12, 13, 11, 12))
    trees = [one.propose(["x"], [8])[0] for one in (source, fresh)]
    assert trees[0].probs.tolist() == trees[1].probs.tolist()


def test_running_requests_count_towards_the_bound():
    source, refused = small(max_bytes=300_000), 0
    source.add_outputs([np.arange(500)], progress=False)
    rng = np.random.default_rng(0)
    for k in range(20):
        try:
            source.start(k, rng.integers(0, 9000, 1000))
        except MemoryError:
            refused += 1
        assert source.num_bytes() <= source.max_bytes
    assert 0 < refused < 20
    for k in range(20):
        source.stop(k)
    assert source.num_bytes() == 0


def test_memory_can_be_used_again_in_other_pieces():
    source = small(max_bytes=300_000)
    for length in range(20, 1500, 60):
        source.add_outputs([np.arange(length) % 7] * 10, progress=False)
        assert source.num_bytes() <= source.max_bytes
    source.remove_namespace("")
    assert source.num_bytes() == 0
    assert source.add_outputs([np.arange(2000)], progress=False) != [None]


def test_crowded_contexts_are_cut_off():
    """More followers than a draft can look at: still a tree within its limit."""
    source = SuffixTreeCandidates(max_bytes=2**24, min_probability=0.0)
    rng = np.random.default_rng(0)
    source.add_outputs(list(rng.integers(0, 12, (300, 40))), progress=False)
    source.start("a", rng.integers(0, 12, 200))
    for limit in (60, 64, 1000, 5000, 60):
        tree = source.propose(["a"], [limit])[0]
        tree.check_integrity(12)
        assert len(tree) == min(limit, 4096)


def test_failed_start_leaves_nothing():
    source = small()
    with pytest.raises(TypeError, match="unhashable"):
        source.begin(SourceRequest("x", ids(1), namespace=["list"]))
    with pytest.raises(TypeError, match="unhashable"):
        source.add_outputs([SENTENCE], namespace=["list"], progress=False)
    with pytest.raises(ValueError, match="started already"):
        source.start("b", ids(1)) or source.start("b", ids(1))
    source.stop("b")
    assert source.num_bytes() == 0 and len(source._slots._free_slots) == 8


def test_memory_is_bounded_and_the_unused_go_first():
    source, rng = small(max_bytes=100_000), np.random.default_rng(0)
    useful = [300, 301, 302, 303, 304, 305, 306, 307]
    run(source, "useful", [1], useful)
    for k in range(200):
        run(source, k, [2], rng.integers(1000, 9000, 30))
        if k % 5 == 0:
            _, accepted = run(source, ("again", k), [3], useful[:-1])
            assert accepted > 0, "what is of use is kept"
        assert source.num_bytes() <= source.max_bytes
    assert 500 < source.num_cached_tokens() < 200 * 30


@settings(deadline=None, max_examples=examples(30))
@given(st.lists(st.tuples(st.lists(st.integers(0, 5), min_size=1, max_size=80), st.integers(0, 9)), max_size=40))
def test_bound_holds_through_additions_and_removals(operations):
    source = small(max_bytes=20_000)
    kept = []
    for tokens, action in operations:
        if action < 3 and kept:
            number = kept.pop(action % len(kept))
            if number in source._corpus.outputs:
                source.remove_output(number)
        else:
            kept += [number for number in source.add_outputs([tokens], progress=False) if number is not None]
        assert source.num_bytes() <= source.max_bytes
    for number in list(source._corpus.outputs):
        source.remove_output(number)
    source.start("a", ids(*range(6)))
    assert len(source.propose(["a"], [8])[0]) == 0, "nothing is left"


def test_removed_outputs_are_not_drafted():
    source = small()
    first, second = source.add_outputs([SENTENCE, [21, 22, 23]], progress=False)
    source.remove_output(first)
    source.start("a", ids(1, 11, 12))
    source.start("b", ids(1, 21))
    trees = source.propose(["a", "b"], [4, 4])
    assert len(trees[0]) == 0 and trees[1].best_chain().tokens.tolist() == [22, 23]
    with pytest.raises(KeyError):
        source.remove_output(first)
    with pytest.raises(ValueError, match="in use by a running request"):
        source.remove_namespace("")
    source.stop("a")
    source.stop("b")
    source.remove_namespace("")
    assert source.num_cached_tokens() == 0 and second not in source._corpus.outputs


def test_prompt_that_does_not_fit_is_refused_and_others_go_on():
    source = small(max_bytes=50_000)
    source.start("a", ids(*SENTENCE, 11, 12))
    with pytest.raises(MemoryError, match="max_bytes=50000"):
        source.start("b", np.arange(10_000_000))
    assert len(source.propose(["a"], [3])[0]) == 3
    source.stop("b")


texts = st.lists(st.integers(3, 40), min_size=1, max_size=60)


@settings(max_examples=examples(60), deadline=None)
@given(
    quiet=st.lists(texts, min_size=1, max_size=6),
    busy=st.lists(texts, min_size=1, max_size=6),
    times=st.integers(20, 60),
)
def test_busy_namespaces_forget_their_own_outputs_only(quiet, busy, times):
    corpus = SuffixCorpus(2**16, 8)
    kept = [corpus.add(np.array(text, np.int32), "quiet") for text in quiet]
    for k in range(times):
        text = np.array([*busy[k % len(busy)], 100 + k, *range(200 + k, 260 + k)], np.int32)
        number = corpus.add(text, "busy")
        assert number is not None and corpus.num_bytes <= corpus.max_bytes
    held = dict.fromkeys(("quiet", "busy"), 0)
    for output in corpus.outputs.values():
        held[output.namespace] += output.length
    lost = [number for number in kept if number not in corpus.outputs]
    assert not lost or held["quiet"] + max(map(len, quiet)) >= held["busy"]
    lines = [output.line for output in corpus.outputs.values()]
    assert len(set(lines)) == len(lines) and 0 not in lines


def test_a_quiet_tenant_drafts_as_if_alone():
    alone, both = small(max_bytes=2**17), small(max_bytes=2**17)
    for source in (alone, both):
        for k in range(3):
            run(source, k, [1, 2], [*SENTENCE, k], namespace="quiet")
    rng = np.random.default_rng(0)
    for _ in range(400):
        both.add_outputs([rng.integers(100, 2000, 50)], "busy", progress=False)
    assert len(both._corpus.outputs) < 300, "the bound was met"
    drafts = []
    for source in (alone, both):
        source.begin(SourceRequest("x", ids(1, 2, *SENTENCE[:3]), namespace="quiet"))
        drafts.append(source.propose(["x"], [6])[0])
    assert drafts[0].tokens.tolist() == drafts[1].tokens.tolist() and len(drafts[0])


def test_what_was_kept_once_takes_no_memory_for_ever():
    corpus = SuffixCorpus(2**16, 8)
    for k in range(5000):
        corpus.add(np.arange(k, k + 30, dtype=np.int32), k % 3)
    assert len(corpus.used) == 1024 and len(corpus._free_lines) + len(corpus.outputs) == 1023
    for name in list(corpus.roots):
        corpus.remove_namespace(name)
    assert not corpus._numbers and not corpus._held and not corpus._victims and len(corpus._free_lines) == 1023


def test_texts_at_their_limit_forget_the_longest_unused(monkeypatch):
    """Texts are bounded by 2**31 tokens, which repeated ones reach before the trees reach the bound on bytes."""

    def few_tokens(num_tokens, num_nodes, num_rows):
        return new_store(corpus_module._MARGIN + 40 * BLOCK, num_nodes, num_rows)

    monkeypatch.setattr(corpus_module, "new_store", few_tokens)
    corpus = SuffixCorpus(2**24, 8)
    numbers = [corpus.add(np.arange(60 + k % 40, dtype=np.int32), "") for k in range(200)]
    assert None not in numbers and list(corpus.outputs) == numbers[-len(corpus.outputs) :]
    assert corpus._text_blocks <= 40 < corpus._text_blocks + 3 and corpus.num_bytes < 2**17


def far_store():
    """A store of the largest size. Only its last part exists, and what is new comes there."""
    near = new_store(2**18, 2**16, 2**20)
    most = (storage._MOST_TOKENS, storage._MOST_NODES * NODE, storage._MOST_ROWS * ROW)
    firsts = [size - len(array) for size, array in zip(most, near)]
    arrays = [
        np.ctypeslib.as_array((ctypes.c_int32 * size).from_address(array.ctypes.data - 4 * first))
        for size, first, array in zip(most, firsts, near)
    ]
    near.heads[NODES_TOP], near.heads[ROWS_TOP] = firsts[1] // NODE, firsts[2] // ROW
    return near, Store(*arrays, near.heads)


@settings(deadline=None, max_examples=examples(30))
@given(st.lists(st.tuples(token_lists, st.booleans(), st.integers(0, 99)), min_size=4, max_size=12), st.booleans())
def test_drafts_at_the_ends_of_the_largest_store_are_those_of_a_small_one(operations, by_counts):
    """Numbers of nodes and blocks have 32 bits, their places more."""
    options = {"max_depth": 16, "max_match": 8, "min_probability": 0.0, "scoring": "counts" if by_counts else "learned"}
    memory, store = far_store()
    with mock.patch.object(corpus_module, "new_store", lambda *sizes: store):
        sources = [SuffixTreeCandidates(max_bytes=2**36, **options)]
    sources.append(SuffixTreeCandidates(max_bytes=2**24, **options))
    sources[0]._corpus._text_top = (len(store.text) - len(memory.text)) // BLOCK
    for source in sources:
        source.add_outputs([[1, 2, 3]], progress=False)  # a store without texts begins anew
    kept = []
    for k, (text, removes, choice) in enumerate(operations):
        for source in sources:
            source.start(k, np.array(text[:5]))
        for at in range(5, max(len(text), 6), 5):
            trees = [source.propose([k], [24])[0] for source in sources]
            for name in ("tokens", "parents", "probs"):
                assert getattr(trees[0], name).tolist() == getattr(trees[1], name).tolist()
            for source in sources:
                source.observe(k, np.array(text[at : at + 5]))
        for source in sources:
            source.stop(k)
        added = [source.add_outputs([text], progress=False) for source in sources]
        assert added[0] == added[1] != [None]
        kept += added[0]
        if removes:
            number = kept.pop(choice % len(kept))
            for source in sources:
                source.remove_output(number)
    assert sources[0].num_bytes() == sources[1].num_bytes()
    assert sources[0]._corpus.root("") > 2**31 - 2**17
