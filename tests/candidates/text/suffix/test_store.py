"""Suffix trees against a count of all substrings."""

from collections import Counter

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_smartspec.candidates.text.suffix.corpus import SuffixCorpus
from hf_smartspec.candidates.text.suffix.kernels import insert as insertion
from hf_smartspec.candidates.text.suffix.kernels import store as storage
from hf_smartspec.candidates.text.suffix.kernels.insert import insert, move_tree
from hf_smartspec.candidates.text.suffix.kernels.remove import num_labels, remove
from hf_smartspec.candidates.text.suffix.kernels.store import (
    BLOCK,
    CHILD,
    COUNT,
    END,
    ENDED,
    KIDS,
    LABEL,
    LEN,
    NODE,
    NODES_LIVE,
    NUM,
    PAIR,
    ROW,
    ROWS_LIVE,
    TOTAL,
    free_tree,
    new_root,
    new_store,
    pointers,
)
from hf_smartspec.jit import compiled
from hf_smartspec.jit.pointers import int32_at

from ....covering import examples

finish, find = (compiled(part.py_func) for part in (insertion.finish, storage.find))


@compiled
def extend(store, root, points, num_points, max_depth, end, token):
    at = int32_at(points.ctypes.data)
    return insertion.extend(pointers(store), root, at, num_points, max_depth, end, token)


def counts_of(texts, max_depth):
    """Occurrences of every substring of up to `max_depth` tokens."""
    return dict(
        Counter(
            tuple(text[i:j])
            for text in texts
            for i in range(len(text))
            for j in range(i + 1, min(len(text), i + max_depth) + 1)
        )
    )


def strings_of(store, root, max_depth):
    """The same, read off a tree, whose nodes are checked on the way."""
    found = {}

    def walk(node, prefix):
        counts = []
        kids = store.nodes[node * NODE + KIDS] * PAIR
        for entry in range(kids, kids + store.nodes[node * NODE + NUM] * ROW, ROW):
            token, count, child = store.rows[[entry, entry + COUNT, entry + CHILD]].tolist()
            counts.append(count)
            assert find(store, node, token) == entry
            label = store.nodes[child * NODE + LABEL] if child >= 0 else ~child
            length = store.nodes[child * NODE + LEN] if child >= 0 else max_depth - len(prefix)
            edge = store.text[label : label + length].tolist()
            edge = edge[: edge.index(END)] if child < 0 and END in edge else edge
            assert edge[0] == token
            for k in range(1, len(edge) + 1):
                found[(*prefix, *edge[:k])] = count
            if child >= 0:
                assert store.nodes[child * NODE + TOTAL] + store.nodes[child * NODE + ENDED] == count
                walk(child, (*prefix, *edge))
            else:
                assert count == 1
        assert sum(counts) == store.nodes[node * NODE + TOTAL]
        assert node == root or counts == sorted(counts, reverse=True), "the best come first"

    walk(root, ())
    return found


def small_store():
    store = new_store(20_000, 20_000, 80_000)
    return store, new_root(store)


def put(store, root, start, text, max_depth):
    insert(store, root, start, np.array(text, np.int32), np.zeros((max_depth + 1) * 2, np.int32))


token_lists = st.integers(1, 40).flatmap(lambda v: st.lists(st.integers(0, v - 1), min_size=1, max_size=60))


@settings(deadline=None)
@given(st.lists(st.tuples(token_lists, st.booleans(), st.integers(0, 99)), max_size=10), st.sampled_from([2, 3, 5, 40]))
def test_counts_stay_exact_while_texts_come_and_go(operations, max_depth):
    store, root = small_store()
    kept, top = [], 0
    for text, removes, choice in operations:
        if removes and kept:
            start, old = kept.pop(choice % len(kept))
            remove(store, root, start, start + len(old), max_depth)
        else:
            put(store, root, top, text, max_depth)
            kept.append((top, text))
            top += len(text) + 1
        assert strings_of(store, root, max_depth) == counts_of([text for _, text in kept], max_depth)
    for start, text in kept:
        remove(store, root, start, start + len(text), max_depth)
    assert store.heads[NODES_LIVE] == 1 and store.heads[ROWS_LIVE] == 0, "all memory is given back"


def test_many_children_are_found_and_sorted():
    """More than 16 children have an index, which must follow every exchange, insertion and removal."""
    store, root = small_store()
    rng = np.random.default_rng(0)
    texts = [[7, int(token)] for token in rng.zipf(1.3, 600) % 200]
    for k, text in enumerate(texts):
        put(store, root, 3 * k, text, 4)
    assert strings_of(store, root, 4) == counts_of(texts, 4)
    for k in rng.permutation(600)[:590]:
        remove(store, root, 3 * k, 3 * k + 2, 4)
        texts[k] = []
    assert strings_of(store, root, 4) == counts_of(texts, 4)


@settings(deadline=None)
@given(token_lists, st.integers(0, 5))
def test_points_are_the_repeated_ends_of_the_text(text, extra):
    store, root = small_store()
    points = np.zeros(9 * 2, np.int32)
    points[:2] = root, 0
    num_points = 0
    for end, token in enumerate(text):
        num_points = extend(store, root, points, num_points, 8, end, token)
        seen = counts_of([text[: end + 1]], 8)
        longest = max(
            (d for d in range(1, min(8, end + 1) + 1) if seen[tuple(text[end + 1 - d : end + 1])] > 1), default=0
        )
        assert num_points == longest
    finish(store, root, points, num_points, 8, len(text))
    assert strings_of(store, root, 8) == counts_of([text], 8)


def test_moved_text_leaves_the_tree_as_it_was():
    store, root = small_store()
    text = [1, 2, 1, 2, 3, 1, 2, 1, 2, 3, 1]
    put(store, root, 0, text, 6)
    before = strings_of(store, root, 6)
    move_tree(store, root, 0, len(text), 100)
    store.text[: len(text)] = 99  # nothing may lie there any more
    assert strings_of(store, root, 6) == before


def test_freed_tree_gives_all_memory_back_and_spares_others():
    store, root = small_store()
    other = new_root(store)
    put(store, root, 0, [1, 2, 1, 2, 3], 6)
    put(store, other, 10, [1, 2, 1, 2, 4], 6)
    free_tree(store, root)
    assert strings_of(store, other, 6) == counts_of([[1, 2, 1, 2, 4]], 6)
    free_tree(store, other)
    assert store.heads[NODES_LIVE] == 0 and store.heads[ROWS_LIVE] == 0


def test_text_without_labels_may_be_overwritten():
    """What `num_labels` says decides whether a removed text's memory is used again."""
    store, root = small_store()
    text = [1, 2, 3, 1, 2, 4]
    put(store, root, 0, text, 6)
    put(store, root, 10, text, 6)
    remove(store, root, 0, 6, 6)
    assert num_labels(store, root, 0, 6, 6) == 0, "edges lie in the latest text"
    store.text[:6] = 99
    assert strings_of(store, root, 6) == counts_of([text], 6)
    put(store, root, 20, text, 3)
    store, root = small_store()
    put(store, root, 0, [5, 6], 2)
    put(store, root, 10, [5, 6], 2)
    remove(store, root, 10, 12, 2)  # the latest: no child tells where else the strings are
    assert num_labels(store, root, 10, 12, 2) > 0


@settings(deadline=None, max_examples=examples(40))
@given(st.lists(st.tuples(token_lists, st.integers(0, 9)), max_size=30), st.integers(3_000, 30_000))
def test_freed_texts_hold_no_edges(operations, max_bytes):
    """A corpus whose free text is overwritten after every step still counts right."""
    corpus = SuffixCorpus(max_bytes, 8)
    for text, choice in operations:
        if choice < 3 and corpus.outputs:
            corpus.remove(list(corpus.outputs)[choice % len(corpus.outputs)])
        else:
            corpus.add(np.array(text, np.int32), "")
        kept = [corpus.tokens(number).tolist() for number in corpus.outputs]
        for size, starts in corpus._free_texts.items():
            for start in starts:
                corpus.store.text[start * BLOCK : (start + size) * BLOCK] = 77
        assert strings_of(corpus.store, corpus.root(""), 8) == counts_of(kept, 8)
        assert corpus.num_bytes <= max_bytes + 32, "a root is left"
