"""Calibration of draft probabilities, outcomes of drafts, and the entropy of texts."""

from collections import Counter
from dataclasses import replace
from threading import Thread

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_smartspec import DraftTree
from hf_smartspec.goodput import Calibrator, expected_calibration_error, outcomes
from hf_smartspec.goodput.papers.entropy import empirical_entropy


def learn(calibrator, score, depth, match_length, rate, num, seed=0, source="a"):
    """Shows `num` nodes of one kind that come true at `rate`, one by one."""
    rng = np.random.default_rng(seed)
    for hit in rng.random(num) < rate:
        calibrator.update(source, [score], [depth], [match_length], [hit])


# --- Calibrator -------------------------------------------------------------------------------------------------------


def test_without_data_the_raw_score_is_returned():
    scores = [0.0, 0.3, 1.0]
    assert Calibrator().calibrate("a", scores, [1, 2, 3], 0) == pytest.approx(scores)
    other = Calibrator()
    learn(other, 0.9, 1, 3, rate=0.0, num=100)
    assert other.calibrate("b", scores, [1, 2, 3], 0) == pytest.approx(scores), "sources are kept apart"


def test_converges_to_the_frequency_of_every_cell():
    calibrator = Calibrator(half_life=1e6)
    rates = {(0.5, 1, 0): 0.8, (0.5, 4, 0): 0.3, (0.95, 1, 3): 0.6, (0.95, 1, 20): 0.99, (1.0, 1, 3): 0.1}
    for index, ((score, depth, match_length), rate) in enumerate(rates.items()):
        learn(calibrator, score, depth, match_length, rate, num=3000, seed=index)
    probs = calibrator.calibrate("a", *np.array(list(rates)).T)
    # Four standard deviations of 3000 draws are at most 0.037; the seeds are fixed.
    assert probs == pytest.approx(list(rates.values()), abs=0.04)
    assert probs.dtype == np.float32


def test_empty_cells_borrow_from_coarser_ones():
    calibrator = Calibrator()
    learn(calibrator, 0.9, 1, 2, rate=0.5, num=1000)
    near, far, other = calibrator.calibrate("a", [0.9, 0.9, 0.3], [1, 9, 9], [30, 30, 30])
    assert near == pytest.approx(0.5, abs=0.06), "the same score and depth, another match length"
    assert far == pytest.approx(0.5, abs=0.06), "the same score"
    assert other == pytest.approx(0.3 * 0.5 / 0.9, abs=0.03), "another score: the source is off by 5 / 9"


def test_trees_are_calibrated_by_their_match_lengths():
    calibrator = Calibrator()
    tree = replace(DraftTree.chain([5, 6], [0.5, 0.5]), match_lengths=np.array([1, 8]))
    other = DraftTree.chain([7], [0.5], match_lengths=8)
    for _ in range(200):
        calibrator.learn("a", tree, [9])
        calibrator.learn("a", other, [7])
    assert calibrator.calibrated("a", tree).probs[0] < 0.1 and calibrator.calibrated("a", other).probs[0] > 0.9


def test_few_observations_move_little():
    calibrator = Calibrator(strength=8)
    calibrator.update("a", [0.5], [1], [1], [True])
    assert 0.5 < calibrator.calibrate("a", [0.5], [1], [1])[0] < 0.75
    calibrator.update("a", [0.5], [1], [1], [False])
    calibrator.update("a", [0.5], [1], [1], [False])
    assert calibrator.calibrate("a", [0.5], [1], [1])[0] < 0.5


def test_decay_adapts_to_another_text():
    quick, slow = Calibrator(half_life=100), Calibrator(half_life=1e9)
    for calibrator in (quick, slow):
        learn(calibrator, 0.5, 1, 1, rate=1.0, num=2000)
        learn(calibrator, 0.5, 1, 1, rate=0.0, num=500)
    assert quick.calibrate("a", [0.5], [1], [1])[0] < 0.05
    assert slow.calibrate("a", [0.5], [1], [1])[0] == pytest.approx(0.8, abs=0.01)


def test_nodes_of_one_update_count_alike():
    calibrator = Calibrator(half_life=1e9)
    calibrator.update("a", [0.5] * 400, [1] * 400, 1, [True, False, False, False] * 100)
    assert calibrator.calibrate("a", [0.5], [1], 1)[0] == pytest.approx(0.25, abs=0.01)
    calibrator.update("a", [], [], 0, [])


@given(
    st.lists(st.tuples(st.floats(-1, 2), st.integers(1, 99), st.integers(0, 99), st.booleans()), max_size=40),
    st.floats(1, 1e6),
)
def test_probabilities_stay_probabilities(nodes, half_life):
    calibrator = Calibrator(half_life=half_life)
    scores, depths, match_lengths, hits = zip(*nodes) if nodes else ((), (), (), ())
    for _ in range(3):
        calibrator.update("a", scores, depths, match_lengths, hits)
        probs = calibrator.calibrate("a", scores, depths, match_lengths)
        assert probs.shape == (len(nodes),) and ((probs >= 0) & (probs <= 1)).all()


def test_scores_that_are_no_numbers_count_as_even_chances():
    calibrator = Calibrator()
    assert calibrator.calibrate("a", [np.nan, -1.0, 5.0], [1, 1, 1], 0).tolist() == [0.5, 0.0, 1.0]
    calibrator.update("a", [np.nan], [1], 0, [True])
    assert np.isfinite(calibrator.calibrate("a", [0.5], [1], 0)).all()


def test_the_sources_that_learnt_last_are_known():
    calibrator = Calibrator()
    for source in ("a", "b"):
        learn(calibrator, 0.9, 1, 3, rate=0.0, num=100, source=source)
    for other in range(511):
        calibrator.update("b", [0.9], [1], 3, [False])
        calibrator.update(other, [0.9], [1], 3, [True])
    assert calibrator.calibrate("a", [0.9], [1], 3)[0] == pytest.approx(0.9), "forgotten"
    assert calibrator.calibrate("b", [0.9], [1], 3)[0] < 0.2


def test_updates_of_several_threads_are_all_counted():
    calibrator = Calibrator(half_life=1e12)
    threads = [Thread(target=learn, args=(calibrator, 0.5, 1, 1, rate, 300)) for rate in (1.0, 0.0, 0.0, 0.0)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert calibrator.calibrate("a", [0.5], [1], [1])[0] == pytest.approx(0.25, abs=0.01)


@pytest.mark.parametrize(
    ("arguments", "name"),
    [({"half_life": 0}, "half_life"), ({"half_life": float("inf")}, "half_life"), ({"strength": -1}, "strength")],
)
def test_bad_settings_are_refused(arguments, name):
    with pytest.raises(ValueError, match=name):
        Calibrator(**arguments)


def test_arrays_of_unequal_length_are_refused():
    calibrator = Calibrator()
    with pytest.raises(ValueError, match="one length"):
        calibrator.calibrate("a", [0.5], [1, 2], [1])
    with pytest.raises(ValueError, match="one length"):
        calibrator.update("a", [0.5], [1], [1, 2], [True])
    with pytest.raises(ValueError, match="hits"):
        calibrator.update("a", [0.5], [1], [1], [True, False])


# --- Outcomes ---------------------------------------------------------------------------------------------------------


def test_outcomes_of_a_chain():
    chain = DraftTree.chain([5, 6, 7, 8])
    # All true; wrong from the third on; unknown beyond the second; nothing known.
    for tokens, nodes, hits in (
        ([5, 6, 7, 8, 9], [0, 1, 2, 3], [True] * 4),
        ([5, 6, 1, 8], [0, 1, 2], [True, True, False]),
        ([5, 6], [0, 1], [True, True]),
        ([], [], []),
    ):
        found = outcomes(chain, tokens)
        assert (found.nodes.tolist(), found.hits.tolist()) == (nodes, hits)
    assert len(outcomes(DraftTree.empty(), [1, 2]).nodes) == 0


def test_outcomes_of_a_tree():
    #  root - 0:(5) - 2:(6) - 4:(8)
    #       \ 1:(9) - 3:(6)
    #               \ 5:(7)
    tree = DraftTree(np.array([5, 9, 6, 6, 8, 7]), np.array([-1, -1, 0, 1, 2, 1]), np.ones(6, np.float32))
    found = outcomes(tree, [9, 7, 8])
    assert found.nodes.tolist() == [0, 1, 3, 5]
    assert found.hits.tolist() == [False, True, False, True]
    assert outcomes(tree, [9]).nodes.tolist() == [0, 1]


@given(st.data())
def test_outcomes_by_brute_force(data):
    num_nodes = data.draw(st.integers(0, 12))
    parents = np.array([data.draw(st.integers(-1, node - 1)) for node in range(num_nodes)], np.int64)
    tokens = np.array([data.draw(st.integers(0, 2)) for _ in range(num_nodes)], np.int64)
    truth = data.draw(st.lists(st.integers(0, 2), max_size=6))
    tree = DraftTree(tokens, parents, np.ones(num_nodes, np.float32))

    def path(node):
        return [*path(parents[node]), int(tokens[node])] if node >= 0 else []

    expected = {
        node: path(node) == truth[: len(path(node))]
        for node in range(num_nodes)
        if len(path(node)) <= len(truth) and path(parents[node]) == truth[: len(path(parents[node]))]
    }
    found = outcomes(tree, truth)
    assert dict(zip(found.nodes.tolist(), found.hits.tolist())) == expected


# --- Expected calibration error ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("probs", "hits", "error"),
    [
        ([1.0, 1.0, 0.0], [1, 1, 0], 0.0),
        ([0.5, 0.5], [1, 0], 0.0),
        ([0.5, 0.5], [1, 1], 0.5),
        ([0.9, 0.9, 0.1, 0.1], [0, 0, 1, 1], 0.9),  # a mean over everything would see nothing
        ([0.8] * 3 + [0.2], [1, 1, 0, 0], 0.75 * (0.8 - 2 / 3) + 0.25 * 0.2),
        ([], [], 0.0),
    ],
)
def test_expected_calibration_error_of_known_cases(probs, hits, error):
    assert expected_calibration_error(probs, hits, num_bins=10) == pytest.approx(error)


def test_expected_calibration_error_refuses_nonsense():
    with pytest.raises(ValueError, match="one length"):
        expected_calibration_error([0.5], [1, 0])
    with pytest.raises(ValueError, match="num_bins"):
        expected_calibration_error([0.5], [1], num_bins=0)


def test_calibration_removes_the_error_on_held_out_nodes():
    rng = np.random.default_rng(0)

    def sample(num):
        scores, depths = rng.random(num), rng.integers(1, 9, num)
        return scores, depths, np.ones(num, int), rng.random(num) < scores**2 * 0.9**depths  # overconfident, and deeper

    calibrator = Calibrator(half_life=1e9)
    calibrator.update("a", *sample(20_000))
    scores, depths, match_lengths, hits = sample(20_000)
    assert expected_calibration_error(scores, hits) > 0.2
    assert expected_calibration_error(calibrator.calibrate("a", scores, depths, match_lengths), hits) < 0.02


# --- Entropy ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sequences", "max_depth", "bits"),
    [
        ([[0, 1, 2, 3]], 1, 2.0),  # four tokens, alike
        ([[7, 7, 7, 7]], 3, 0.0),  # one token
        ([[0, 1], [0, 2]], 2, (4 * 1.5 + 2 * 1.0) / 6),  # root: 2, 1, 1 of 4; behind 0: one of two
        ([[0, 1, 0, 1]], 2, 4 * 1.0 / 6),  # root: one of two, 4 times; behind 0: always 1, twice; behind 1: once
        ([[5], []], 4, 0.0),
        ([[1, 2, 3, 1, 2, 4]], 3, (6 * np.log2(6) - 4 + 2 + 2) / (6 + 2 + 2 + 2)),  # behind 2 and 1 2: 3 or 4
        ([], 4, 0.0),
    ],
)
def test_entropy_of_known_texts(sequences, max_depth, bits):
    assert empirical_entropy(sequences, max_depth) == pytest.approx(bits)


@given(st.lists(st.lists(st.integers(0, 3), max_size=9), max_size=5), st.integers(1, 5))
def test_entropy_by_brute_force(sequences, max_depth):
    followers: dict[tuple, Counter] = {}
    for ids in sequences:
        for end in range(len(ids)):
            for start in range(max(0, end - max_depth + 1), end + 1):
                followers.setdefault(tuple(ids[start:end]), Counter())[ids[end]] += 1
    counts = [np.array(list(counter.values())) for counter in followers.values() if counter.total() > 1]
    bits = sum((-count * np.log2(count / count.sum())).sum() for count in counts)
    expected = bits / sum(count.sum() for count in counts) if counts else 0.0
    assert empirical_entropy(sequences, max_depth) == pytest.approx(expected, abs=1e-9)


def test_entropy_needs_a_level():
    with pytest.raises(ValueError, match="max_depth"):
        empirical_entropy([[1]], 0)
