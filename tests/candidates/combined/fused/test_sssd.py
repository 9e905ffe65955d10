"""SSSD as published, against its formulas and its algorithm 1 in plain Python."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import hf_smartspec
from hf_smartspec import DraftTree, SmartSpecConfig
from hf_smartspec.candidates import Datastore, DatastoreCandidates, FusedCandidates, InputTreeCandidates, SSSDCandidates
from hf_smartspec.candidates.text.datastore.search import MOST_PLACES
from hf_smartspec.drafts.merge import Draft, PathDiscount, merge

from ....generate.helpers import tiny_llama
from ...text.datastore.test_source import nodes, twin

P, BRANCH_LEN = 3, 3
text_tokens = st.integers(0, 2)
texts = st.lists(text_tokens, min_size=1, max_size=24)
documents = st.lists(st.lists(text_tokens, max_size=20), max_size=4)
factors = st.sampled_from([1.0, 0.9, 0.55])


def input_tree(text, prefix, branch_len):
    """Section 3.1.1: occurrences of (prefix, path) over those of the prefix, by path; the end is no occurrence."""
    if len(text) <= prefix:
        return {}
    places = [at for at in range(len(text) - prefix) if text[at : at + prefix] == text[-prefix:]]
    counts = {}
    for place in places:
        following = text[place + prefix :][:branch_len]
        for depth in range(1, len(following) + 1):
            path = tuple(following[:depth])
            counts[path] = counts.get(path, 0) + 1
    return {path: count / len(places) for path, count in counts.items()}


def algorithm_1(trees, discounts, num_candidates):
    """The paper's pseudo-code; returns the draft's nodes as paths, with the probabilities that they were taken at."""
    queue, draft = [], {}

    def push_children(source, path):
        for child, prob in trees[source].items():
            if child[:-1] == path:
                queue.append((prob * discounts[source][len(child) - 1], source, child))

    for source in range(len(trees)):
        push_children(source, ())
    while queue and len(draft) < num_candidates:
        prob, source, path = queue.pop(max(range(len(queue)), key=lambda place: queue[place][0]))
        draft.setdefault(path, prob)  # insert returns the child that exists
        push_children(source, path)
    return draft


def proposed(source, text, limit):
    source.start("one", np.array(text, np.int64))
    (tree,) = source.propose(["one"], [limit])
    source.stop("one")
    return tree


@given(texts, st.integers(1, P))
def test_the_input_s_trees_count_occurrences(text, prefix):
    """Section 3.1.1."""
    tree = proposed(InputTreeCandidates(prefix, branch_len=BRANCH_LEN), text, 100)
    tree.check_integrity(3)
    expected = input_tree(text, prefix, BRANCH_LEN)
    paths = [path for path, _ in nodes(tree)]
    assert dict(zip(paths, tree.path_probs.tolist())) == {path: pytest.approx(prob) for path, prob in expected.items()}
    assert set(np.broadcast_to(tree.match_lengths, len(tree)).tolist()) <= {prefix}


def test_the_latest_places_of_a_frequent_token_count():
    """A step's time must not grow with the square of the text."""
    text = [1, 2] * (MOST_PLACES // 2) + [1, 0] * MOST_PLACES + [1]
    tree = proposed(InputTreeCandidates(1, branch_len=1), text, 100)
    assert tree.tokens.tolist() == [0] and tree.probs.tolist() == [1.0]


@given(texts, st.lists(st.integers(1, 5), max_size=5))
def test_the_input_may_come_in_pieces(text, sizes):
    source = InputTreeCandidates(2)
    source.start("pieces", np.array([], np.int64))
    rest = text
    for size in [*sizes, len(text)]:
        source.observe("pieces", np.array(rest[:size], np.int64))
        rest = rest[size:]
    assert nodes(source.propose(["pieces"], [9])[0]) == nodes(proposed(InputTreeCandidates(2), text, 9))


@given(documents, texts, st.integers(0, 10), st.tuples(factors, factors, factors))
def test_drafts_are_those_of_algorithm_1(docs, text, limit, weights):
    """Algorithm 1, over the datastore's tree (section 3.1.2) and one input tree per prefix of 1 to P tokens (3.1.1)."""
    scale, short, deep = weights
    store = Datastore.from_documents(docs, vocab_size=3) if any(docs) else None
    source = SSSDCandidates(
        store, max_prefix=P, scale=scale, short=short, deep=deep, num_continuations=6, min_continuations=2,
        branch_len=BRANCH_LEN, breadth=1,
    )  # fmt: skip
    trees = [input_tree(text, prefix, BRANCH_LEN) for prefix in range(1, P + 1)]
    discounts = [[scale * short ** (P - prefix) * deep**d for d in range(BRANCH_LEN)] for prefix in range(1, P + 1)]
    if store is not None:
        branch_len = min(BRANCH_LEN, max(limit, 1))
        found, paths = twin(docs, text, 100, P, 6, 2, branch_len, False), {}
        for path, ratio, _ in found:
            paths[path] = ratio * paths.get(path[:-1], 1.0)
        trees, discounts = [paths, *trees], [[1.0] * BRANCH_LEN, *discounts]
    expected = algorithm_1(trees, discounts, limit)
    tree = proposed(source, text, limit)
    tree.check_integrity(3)
    assert len(tree) == len(expected)
    # Of equally probable nodes at the cut, either may be taken.
    np.testing.assert_allclose(sorted(tree.path_probs), sorted(expected.values()), rtol=1e-5)
    whole = algorithm_1(trees, discounts, 10**6)
    for (path, _), prob in zip(nodes(tree), tree.path_probs):
        assert prob == pytest.approx(whole[path], rel=1e-5)


def test_discounts_do_not_compound_along_the_path():
    """Algorithm 1, `prob = child.prob * discount(source, depth)`: 0.8 of 0.9, of 0.81 and of 0.729."""
    chain = Draft.of(DraftTree.chain([5, 6, 7], [0.9, 0.9, 0.9]))
    tree = merge([chain.discounted(PathDiscount([[0.8]]))], 3)
    assert tree.path_probs.tolist() == pytest.approx([0.72, 0.648, 0.5832])
    by_depth = merge([chain.discounted(PathDiscount([[0.8, 0.5]]))], 3)
    assert by_depth.path_probs.tolist() == pytest.approx([0.72, 0.405, 0.3645]), "the last one counts further down"


def test_no_node_is_likelier_than_its_parent_and_factors_are_positive():
    chain = Draft.of(DraftTree.chain([5, 6, 7], [0.5, 0.9, 0.9]))
    raised = chain.discounted(PathDiscount([[0.5, 1.0, 2.0]]))
    assert max(raised.probs) <= 1.0
    for factors in ([], [[]], [[-0.1]], [[0.5, float("nan")]], [[float("inf")]]):
        with pytest.raises(ValueError, match="`discounts`"):
            FusedCandidates([InputTreeCandidates(1)], [PathDiscount(factors)])


def test_short_matches_count_less():
    """Section 3.1.3: probabilities of the input are dampened by the size of the prefix match."""
    source = SSSDCandidates(max_prefix=2, scale=0.5, short=0.6, deep=1.0)
    tree = proposed(source, [1, 2, 3, 8, 2, 4, 1, 2], 8)
    found = {path: prob for (path, _), prob in zip(nodes(tree), tree.path_probs.tolist())}
    assert found[3,] == pytest.approx(0.5), "after (1, 2), which is longer"
    assert found[4,] == pytest.approx(0.5 * 0.6 / 2), "after (2,), and one of two"
    assert source.drafted_by("one", tree) == ["sssd"] * len(tree), "ended, nothing is known"


def test_small_drafts_are_broad_rather_than_deep():
    """Section 4.3: the branches from the datastore are the shorter the fewer nodes are verified."""
    store = Datastore.from_documents([[1, 2, 3, 4, 5, 6, 7, 8, 9, 10]] * 3 + [[1, 11], [1, 12]])
    source = SSSDCandidates(store, min_continuations=1, branch_len=8, breadth=3)
    deepest = {limit: int(proposed(source, [1], limit).depths.max()) for limit in (1, 3, 6, 9, 30)}
    assert deepest == {1: 1, 3: 1, 6: 2, 9: 3, 30: 8}
    assert {12, 11} <= set(proposed(source, [1], 3).tokens.tolist())
    deep = DatastoreCandidates(store, min_continuations=1)
    assert proposed(deep, [1], 3).depths.max() == 3, "by default, branches are of one length"


def test_every_node_names_its_source():
    store = Datastore.from_documents([[1, 2, 7]] * 20)
    source = SSSDCandidates(store)
    source.start("a", np.array([1, 2, 5, 9, 1, 2]))
    (tree,) = source.propose(["a"], [8])
    drafters = dict(zip(tree.tokens.tolist(), source.drafted_by("a", tree)))
    assert drafters[7] == "datastore" and drafters[5] == "input"


@pytest.mark.parametrize("sampling", [{}, {"do_sample": True, "temperature": 0.7, "seed": 3}])
@pytest.mark.parametrize("options", [{}, {"num_nodes": 5}])
def test_presets_generate_the_plain_tokens(tmp_path, sampling, options):
    model = hf_smartspec.enable(tiny_llama())
    prompts = torch.tensor([[0, 0, 5, 6, 7], [8, 9, 8, 9, 8], [0, 11, 12, 13, 14]])
    inputs = {"input_ids": prompts, "attention_mask": (prompts > 0).long(), "max_new_tokens": 24, **sampling}
    expected = model.generate(**inputs, assistant="none")
    Datastore.from_documents(expected[:2].tolist()).save(path := tmp_path / "answers.datastore")
    for name in ("sssd", f"sssd:{path}"):
        config = SmartSpecConfig(name, **options)
        output = model.generate(**inputs, assistant=config, return_dict_in_generate=True)
        assert torch.equal(output.sequences, expected)
    assert output.statistics.accepted_tokens > 20


def test_a_datastore_of_another_vocabulary_is_refused(tmp_path):
    model = hf_smartspec.enable(tiny_llama())
    Datastore.from_documents([[10**6]]).save(path := tmp_path / "large.datastore")
    with pytest.raises(ValueError, match="build one with the target's tokenizer"):
        model.generate(torch.tensor([[5, 6]]), assistant=f"sssd:{path}", max_new_tokens=2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"scale": 0.0}, r"`scale` must lie in \(0, 1\]"),
        ({"short": 1.5}, "`short`"),
        ({"deep": -1}, "`deep`"),
        ({"max_prefix": 0}, "max_prefix"),
        ({"num_nodes": 0}, "num_nodes"),
        ({"branch_len": 0}, "branch_len"),
    ],
)
def test_bad_arguments_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        SSSDCandidates(**arguments)


# --- Calibration on the target's own text -----------------------------------------------------------------------------


@given(st.lists(st.tuples(texts, texts), min_size=1, max_size=3))
def test_calibration_is_accepted_over_expected_paths(pairs):
    """Section 3.1.3: by source, depth and prefix match length, in decoding that is played with the text."""
    source = SSSDCandidates(max_prefix=P, branch_len=BRANCH_LEN, num_nodes=6)
    expected, right = np.zeros((2, P, BRANCH_LEN))
    for prompt, answer in pairs:
        at = 0
        while at < len(answer):
            text, truth = prompt + answer[:at], tuple(answer[at:])
            for prefix in range(1, P + 1):
                own = InputTreeCandidates(prefix, branch_len=BRANCH_LEN)
                for path in [path for path, _ in nodes(proposed(own, text, 6))]:
                    if len(path) <= len(truth):
                        cell = prefix - 1, len(path) - 1
                        expected[cell] += input_tree(text, prefix, BRANCH_LEN)[path]
                        right[cell] += truth[: len(path)] == path
            at += 1 + len(proposed(source, text, 6).path_along(np.array(truth)))
    whole = (right.sum() + 8) / (expected.sum() + 8)
    factors = source.calibrate([(np.array(prompt), np.array(answer)) for prompt, answer in pairs])
    assert list(factors) == ["input"]
    np.testing.assert_allclose(factors["input"], (right + 8 * whole) / (expected + 8), atol=1e-4)


def test_calibrated_sources_order_nodes_by_what_came_true():
    """One token after short matches never comes, one from the datastore always does."""
    text, store = np.array([1, 2, 9, 5, 2]), Datastore.from_documents([[2, 7]] * 10 + [[2, 8]] * 10)
    truth = np.array([7])
    source = SSSDCandidates(store, num_nodes=1)
    assert proposed(source, text, 1).tokens.tolist() == [9]
    factors = source.calibrate([(text, truth)] * 40)
    assert factors["input"][0][0] < 0.3 < 1 < factors["datastore"][0][0]
    calibrated = SSSDCandidates(store, num_nodes=1, calibration=factors)
    assert proposed(calibrated, text, 1).tokens.tolist() == [7]


@pytest.mark.parametrize(
    "calibration", [{"datastore": [[1.0]] * 4}, {"input": [[1.0]]}, {"input": [[0.5, float("nan")]] * 4}]
)
def test_calibrations_that_do_not_fit_are_refused(calibration):
    with pytest.raises(ValueError, match="`calibration` must"):
        SSSDCandidates(calibration=calibration)
