"""
Which token the target picks, and with what probability.

The statistical tests have fixed seeds, so they pass or fail once and for all. Had the seeds been drawn, a right
implementation would fail any of them with a probability of 1e-6; each shows as well that it would notice a wrong one.
"""

from contextlib import nullcontext
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from transformers import LogitsProcessorList, StoppingCriteriaList
from transformers.generation import logits_process as hf
from transformers.generation.stopping_criteria import EosTokenCriteria

import hf_smartspec
from hf_smartspec import DraftModelCandidates, DraftTree, SeededGumbelLogitsProcessor, SmartSpecConfig
from hf_smartspec.candidates.models.draft_model import SharedVocabulary
from hf_smartspec.decoding import verify
from hf_smartspec.decoding.batch import DecodingBatch
from hf_smartspec.decoding.call import Place, Request
from hf_smartspec.decoding.verify import accepted_path, coupled_picks, follow, rejection_picks, typical_picks
from hf_smartspec.sampling.noise import NO_TOKEN, add_gumbel_noise, draft_seed, gumbel_noise
from hf_smartspec.sampling.top import argmax

from ..covering import exhaustive
from ..models import new_model
from ..sources import Random, Recording
from ..strategies import trees

FALSE_ALARM = 1e-6


def a_request(seed: int | None, num_generated: int = 0, tree: DraftTree | None = None, cursor: int = -1) -> Request:
    request = Request(object(), 0, torch.tensor([3, 4]), torch.tensor([True, True]), seed=seed)
    for _ in range(num_generated):
        request.append(1)
    request.tree, request.cursor = tree, cursor
    return request


def at_cursors(*requests: Request) -> list[Place]:
    return [Place.at_cursor(request) for request in requests]


def test_a_place_without_a_sample_raises_only_where_the_text_comes_to_it():
    outcomes = []
    for path in ([], [0]):
        request = a_request(5, tree=DraftTree.chain([7]))
        request.picks = [7, NO_TOKEN] if path else [8, NO_TOKEN]
        batch = DecodingBatch([request], StoppingCriteriaList(), None)
        request.call = SimpleNamespace(batch=batch)
        with pytest.raises(RuntimeError, match="No token can be sampled") if path else nullcontext():
            follow(request, path)
        outcomes.append(request.tokens)
    assert outcomes == [[8], [7]]


def test_no_sample_is_needed_after_the_end():
    request = a_request(5, tree=DraftTree.chain([7]))
    request.picks = [7, NO_TOKEN]
    batch = DecodingBatch([request], StoppingCriteriaList([EosTokenCriteria(7)]), None)
    request.call = SimpleNamespace(batch=batch)
    follow(request, [0])
    assert request.tokens == [7] and request.stopped_at == 1


def fits(counts: np.ndarray, probabilities: np.ndarray) -> float:
    """p-value of a chi-square test; cells too rare for it (expected below 5) are counted as one."""
    expected = probabilities / probabilities.sum() * counts.sum()
    rare = expected < 5
    assert counts[probabilities == 0].sum() == 0, "something impossible came out"
    counts = np.append(counts[~rare], counts[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    if expected[-1] < 5:  # too rare together as well
        assert counts[-1] < 40
        counts, expected = counts[:-1], expected[:-1] * (counts[:-1].sum() / expected[:-1].sum())
    return float(stats.chisquare(counts, expected * (counts.sum() / expected.sum())).pvalue)


# --- The accepted path ------------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(trees(vocab_size=3), st.lists(st.integers(0, 2), min_size=20, max_size=20)), max_size=9))
def test_paths_of_many_rows_are_those_of_each(rows):
    drafts, picks = [tree for tree, _ in rows], [line[: len(tree) + 1] for tree, line in rows]
    expected = [accepted_path(tree, line) for tree, line in zip(drafts, picks)]
    for least in (0, 10**9):  # all at once, and one by one
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(verify, "_FEW_NODES", least)
            assert verify.accepted_paths(drafts, picks) == expected


@given(trees(vocab_size=3), st.data())
def test_the_accepted_path_is_that_of_one_look_up_after_the_other(tree, data):
    picks = data.draw(st.lists(st.integers(0, 2), min_size=len(tree) + 1, max_size=len(tree) + 1))
    expected, node = [], -1
    while (node := tree.child(node, picks[node + 1])) is not None:
        expected.append(node)
    assert accepted_path(tree, picks) == expected


# --- One pick ---------------------------------------------------------------------------------------------------------


def test_greedy_rows_take_the_highest_score_and_sampling_rows_the_highest_with_noise():
    scores = torch.randn(3, 20, generator=torch.Generator().manual_seed(0))
    requests = [a_request(None), a_request(7, num_generated=3), a_request(8)]
    noisy = add_gumbel_noise(scores, [None, 7, 8], [0, 3, 0])
    assert coupled_picks(at_cursors(*requests), scores) == argmax(noisy)
    assert coupled_picks(at_cursors(*requests), scores)[0] == int(scores[0].argmax())


def test_a_coupled_pick_does_not_depend_on_the_draft():
    scores = torch.randn(1, 20, generator=torch.Generator().manual_seed(0))
    trees = [None, DraftTree.chain([3]), DraftTree.chain([4, 5], distributions=torch.full((2, 20), 0.05))]
    assert len({coupled_picks(at_cursors(a_request(5, 2, tree)), scores)[0] for tree in trees}) == 1


def test_scores_of_all_nodes_are_processed_as_many_rows_at_a_time_as_there_is_room_for(monkeypatch):
    requests = [a_request(None, tree=DraftTree.chain([3] * size)) for size in (1, 2, 0, 4, 1)]
    for request in requests:
        request.logits = torch.zeros(1 + len(request.tree), 10)
    monkeypatch.setattr(verify, "_MOST_AHEAD", 50)
    parts = list(verify._in_parts(requests))
    assert [[len(request.tree) for request in part] for part in parts] == [[1, 2], [0], [4], [1]]


def test_uniform_variates_are_those_of_the_places_noise():
    places = [Place(a_request(seed), -1, position) for seed in (3, 4, 2**40) for position in range(20)]
    first = torch.zeros(1, dtype=torch.long)
    noise = [gumbel_noise(place.request.seed ^ verify._ACCEPT_STREAM, place.position, first) for place in places]
    expected = torch.exp(-torch.exp(-torch.cat(noise).double())).numpy()
    assert np.abs(verify._uniform(places) - expected).max() < 1e-6, "whose single precision they do not share"
    assert len(np.unique(verify._uniform(places))) == len(places)


def distribution(*weights: float) -> np.ndarray:
    return np.array(weights) / sum(weights)


PAIRS = {
    "like": (distribution(5, 3, 1, 1, 4, 2), distribution(4, 4, 1, 2, 3, 2)),
    "unlike": (distribution(8, 1, 1, 1, 1, 1), distribution(1, 1, 1, 1, 1, 8)),
    "equal": (distribution(3, 1, 2, 2, 1, 1), distribution(3, 1, 2, 2, 1, 1)),
    "filtered": (distribution(3, 2, 1, 0, 0, 0), distribution(1, 2, 3, 2, 1, 0)),
    "disjoint": (distribution(3, 2, 1, 0, 0, 0), distribution(0, 0, 0, 1, 2, 3)),
}


def one_by_one(places, scores) -> list[int]:
    """As on a CPU."""
    return rejection_picks(places, scores)


def at_once(places, scores) -> list[int]:
    """As on a device that has to be waited for."""
    return coupled_picks(places, verify._kept_or_residual(places, scores))


@pytest.mark.parametrize("picks", [one_by_one, at_once])
@pytest.mark.parametrize("name", PAIRS)
def test_rejection_picks_have_the_targets_distribution(name, picks):
    """2,500 draws from q, each kept or replaced. Kept are as many as the theory says: the overlap of p and q."""
    target, draft = PAIRS[name]
    size, num_draws = len(target), 2500
    scores = torch.from_numpy(target).log().float()
    proposals = torch.from_numpy(draft).log().float().expand(num_draws, size)
    tokens = argmax(add_gumbel_noise(proposals, [draft_seed(seed) for seed in range(num_draws)], [4] * num_draws))
    distributions = torch.from_numpy(draft).float()[None]
    trees = [DraftTree.chain([token], distributions=distributions) for token in tokens]
    requests = [a_request(seed, 4, tree) for seed, tree in enumerate(trees)]
    picked = np.array(picks(at_cursors(*requests), scores.expand(num_draws, size)))
    counts, num_kept = np.bincount(picked, minlength=size), int((picked == tokens).sum())
    assert fits(counts, target) > FALSE_ALARM
    if name in ("like", "unlike", "filtered"):
        assert fits(np.ceil(counts), np.where(draft > 0, draft, 1e-12)) < 1e-12, "the draft's own must be told apart"
    overlap = np.minimum(target, draft).sum()
    low, high = stats.binom.interval(1 - FALSE_ALARM, num_draws, min(overlap, 1.0))
    assert low <= num_kept <= high


def test_rejection_without_distributions_is_coupled():
    scores = torch.randn(1, 6, generator=torch.Generator().manual_seed(0))
    for seed, tree, cursor in (
        (None, DraftTree.chain([1], distributions=torch.full((1, 6), 1 / 6)), -1),  # greedy
        (5, None, -1),
        (5, DraftTree.chain([1]), -1),
        (5, DraftTree.chain([1], distributions=torch.full((1, 6), 1 / 6)), 0),  # behind the draft's end
    ):
        places = at_cursors(a_request(seed, 2, tree, cursor))
        assert rejection_picks(places, scores) == coupled_picks(places, scores)


# --- Whole generations ------------------------------------------------------------------------------------------------

SIZE = 5  # of the vocabulary
NUM_TOKENS = 3
NUM_ROWS = 800
PROMPT = (3, 1, 4, 2)
SETTINGS = {
    "plain": {},
    "temperature": {"temperature": 0.6},
    "top_k": {"top_k": 3},
    "top_p": {"temperature": 1.4, "top_p": 0.8},
}


@pytest.fixture(scope="module")
def target():
    return new_model("llama", seed=3, vocab_size=SIZE, std=0.25)


@pytest.fixture(scope="module")
def draft():
    """Another model altogether: its guesses are often wrong."""
    return new_model("llama", seed=4, vocab_size=SIZE, std=0.25)


def warpers(settings: dict) -> LogitsProcessorList:
    made = {"temperature": hf.TemperatureLogitsWarper, "top_k": hf.TopKLogitsWarper, "top_p": hf.TopPLogitsWarper}
    return LogitsProcessorList([made[name](value) for name, value in settings.items()])


def exact_probabilities(model, settings: dict) -> np.ndarray:
    """Of every text of `NUM_TOKENS` tokens behind the prompt, `[SIZE] * NUM_TOKENS`."""
    texts = torch.tensor([[*PROMPT, *text] for text in product(range(SIZE), repeat=NUM_TOKENS)])
    logits = model.double()(input_ids=texts).logits[:, len(PROMPT) - 1 : -1]
    model.float()
    scores = warpers(settings)(None, logits.flatten(0, 1)).unflatten(0, logits.shape[:2])
    chosen = scores.softmax(-1).gather(2, texts[:, len(PROMPT) :, None]).squeeze(2)
    return chosen.prod(dim=1).numpy().reshape((SIZE,) * NUM_TOKENS)


def sample(target, settings: dict, num_rows: int = NUM_ROWS, **options):
    """Counts of texts over many rows of one prompt, and the output of `generate`."""
    ids = torch.tensor([PROMPT] * num_rows)
    everything = {"temperature": 1.0, "top_k": 0, "top_p": 1.0} | settings
    with hf_smartspec.enabled(target):
        output = target.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NUM_TOKENS,
            do_sample=True,
            return_dict_in_generate=True,
            **everything,
            **options,
        )
    counts = np.zeros((SIZE,) * NUM_TOKENS)
    np.add.at(counts, tuple(output.sequences[:, len(PROMPT) :].T.numpy()), 1)
    return counts, output


@pytest.mark.parametrize("name", ["plain", "top_p"])
def test_coupled_sampling_has_the_targets_distribution(target, draft, name):
    settings = SETTINGS[name]
    counts, output = sample(target, settings, seed=11, assistant=draft)
    assert 0 < output.statistics.accepted_tokens < output.statistics.drafted_tokens
    assert fits(counts.ravel(), exact_probabilities(target, settings).ravel()) > FALSE_ALARM
    assert fits(counts.ravel(), exact_probabilities(draft, {}).ravel() + 1e-12) < 1e-12

    plain = target.generate(
        input_ids=output.sequences[:, : len(PROMPT)],
        attention_mask=torch.ones(NUM_ROWS, len(PROMPT), dtype=torch.long),
        max_new_tokens=NUM_TOKENS,
        logits_processor=[*warpers(settings), SeededGumbelLogitsProcessor(11)],
    )
    assert torch.equal(output.sequences, plain)


@pytest.mark.parametrize(
    ("name", "num_nodes"),
    [("plain", 4), ("top_p", 4), *exhaustive(("temperature", 4), ("top_k", 4), ("plain", 1))],
)
def test_rejection_sampling_has_the_targets_distribution(target, draft, name, num_nodes):
    """The joint distribution of three tokens: dependence between positions would show, too."""
    settings = SETTINGS[name]
    config = SmartSpecConfig(draft, num_nodes=num_nodes, verification="rejection")
    counts, output = sample(target, settings, seed=12, assistant=config)
    statistics = output.statistics
    assert 0 < statistics.accepted_tokens < statistics.drafted_tokens
    assert fits(counts.ravel(), exact_probabilities(target, settings).ravel()) > FALSE_ALARM
    assert fits(counts.ravel(), exact_probabilities(draft, {}).ravel() + 1e-12) < 1e-12


@pytest.mark.parametrize("size", [SIZE - 1, SIZE + 3])
def test_rejection_is_exact_where_the_draft_has_fewer_tokens_or_more(target, size):
    """What it does not have, it never draws; what it has beyond, it draws no more than the target."""
    draft = new_model("llama", seed=4, vocab_size=size, std=0.25)
    source = Recording(DraftModelCandidates(draft, samples=True, vocabulary=SharedVocabulary(size, SIZE)))
    config = SmartSpecConfig(source, num_nodes=3, verification="rejection")
    counts, output = sample(target, {}, seed=17, assistant=config)
    assert 0 < output.statistics.accepted_tokens < output.statistics.drafted_tokens and not source.errors
    assert fits(counts.ravel(), exact_probabilities(target, {}).ravel()) > FALSE_ALARM


def test_rejection_accepts_first_drafts_as_often_as_the_distributions_overlap(target, draft):
    config = SmartSpecConfig(draft, num_nodes=1, verification="rejection")
    ids = torch.tensor([PROMPT] * NUM_ROWS)
    source = Recording(DraftModelCandidates(draft, samples=True))
    config = SmartSpecConfig(source, num_nodes=1, verification="rejection")
    with hf_smartspec.enabled(target):
        # Two tokens: one draft for each row, at its first step.
        target.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=2,
            do_sample=True,
            top_k=0,
            seed=13,
            assistant=config,
        )
    first = [exact_probabilities(model, {}).sum(axis=(1, 2)) for model in (target, draft)]
    overlap = float(np.minimum(*first).sum())
    low, high = stats.binom.interval(1 - FALSE_ALARM, NUM_ROWS, overlap)
    assert source.drafted == NUM_ROWS
    assert low <= source.accepted <= high
    assert 0.2 < overlap < 0.9, "the example must be neither hopeless nor trivial"


def test_what_is_sampled_does_not_depend_on_who_drafts(target, draft):
    outputs = [
        sample(target, {}, num_rows=200, seed=14, assistant=assistant)[1]
        for assistant in (
            draft,
            "prompt_lookup",
            "none",
            SmartSpecConfig(DraftModelCandidates(draft, width=3), num_nodes=7),
            SmartSpecConfig(_RandomOfSize(SIZE), num_nodes=4),
        )
    ]
    drafted = [output.statistics.drafted_tokens for output in outputs]
    assert all(torch.equal(outputs[0].sequences, other.sequences) for other in outputs[1:])
    assert drafted[2] == 0 and all(number > 0 for number in (*drafted[:2], *drafted[3:]))


class _RandomOfSize(Random):
    """Random trees over a small vocabulary."""

    def __init__(self, size: int):
        super().__init__(seed=0, is_tree=True)
        self.size = size

    def draft(self, text, limit):
        tree = super().draft(text, limit)
        return DraftTree(tree.tokens % self.size, tree.parents, tree.probs)


# --- Typical acceptance -----------------------------------------------------------------------------------------------


@given(
    st.lists(st.tuples(trees(vocab_size=6), st.sampled_from([None, 5, 6]), st.integers(0, 99)), min_size=1, max_size=5)
)
def test_typical_acceptance_keeps_what_the_criterion_says(rows):
    places, scores = [], []
    for tree, seed, number in rows:
        request = a_request(seed, tree=tree)
        places += Place.all_of(request)
        generator = torch.Generator().manual_seed(number)
        scores.append(torch.randn(len(tree) + 1, 9, generator=generator) * 3)
    scores = torch.cat(scores)
    own = coupled_picks(places, scores)
    for place, line, pick, expected in zip(places, scores, typical_picks(places, scores), own):
        tree, probs = place.request.tree, line.softmax(-1).double()
        drafted = [int(token) for token, parent in zip(tree.tokens, tree.parents) if parent == place.node]
        least = min(0.09, 0.3 * float((probs * probs.log()).sum().exp()))
        typical = [token for token in drafted if probs[token] > least]
        if place.request.seed is not None and expected not in drafted and typical:
            expected = max(typical, key=lambda token: float(probs[token]))
        assert pick == expected
