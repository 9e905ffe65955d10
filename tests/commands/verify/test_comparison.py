"""The parts of `smartspec verify`: would they notice?"""

import math
from copy import deepcopy

import numpy as np
import pytest
import torch
from scipy.stats import chi2

import hf_smartspec
from hf_smartspec.commands.common.exactness import (
    Difference,
    Rounding,
    find_differences,
    measure_rounding,
    without_padding,
)
from hf_smartspec.commands.common.models import PROMPTS, encode, left_padded, load_model, random_prompts
from hf_smartspec.commands.common.runs import Decoding, Run, decode_plainly
from hf_smartspec.commands.verify import comparison
from hf_smartspec.commands.verify.comparison import Comparison, TokenCheck
from hf_smartspec.commands.verify.drafts import Drafting, ReplayCandidates
from hf_smartspec.commands.verify.frequencies import (
    check_frequencies,
    chi_square_p_value,
    exact_table,
    ways_of_sampling,
)
from hf_smartspec.decoding import verify as verification
from hf_smartspec.decoding.statistics import GenerationStatistics
from hf_smartspec.sampling.noise import SeededGumbelLogitsProcessor, add_gumbel_noise, gumbel_noise

from ...folders import byte_tokenizer, save_tiny_models
from ...models import new_model


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = save_tiny_models(tmp_path_factory.mktemp("models"))
    return load_model(str(folder / "target")), load_model(str(folder / "draft"))


@pytest.mark.parametrize(
    ("gaps", "logit_error", "is_tie"),
    [
        ((0.0, 0.0), 0.0, True),
        ((0.01, 0.005), 0.01, True),
        ((0.01, 0.3), 0.01, False),  # ours preferred its token clearly
        ((0.3, 0.01), 0.01, False),
        ((math.inf, 0.5), 0.01, True),  # at the edge of a filter, and the logits agree
        ((math.inf, 0.5), 0.3, False),
        ((0.5, -0.5), 0.0, False),  # ours picked against its own scores
        ((math.inf, -math.inf), 0.0, False),
        ((math.nan, math.nan), 0.0, False),  # unknown is not excused
    ],
)
def test_what_counts_as_a_tie(gaps, logit_error, is_tie):
    item = Difference(0, 3, 11, 12, *gaps, logit_error=logit_error, tolerance=0.02)
    assert item.is_tie is is_tie


UNIT = torch.finfo(torch.bfloat16).eps


@pytest.mark.parametrize(
    ("below", "top_k", "top_p", "picked_again", "is_tie"),
    [
        (0.5 * UNIT, 2, 1.0, False, True),  # a unit less, and top-k would have kept it
        (0.5 * UNIT, 2, 1.0, True, False),  # filtered away, and picked by these very scores: a wrong pick
        (60 * UNIT, 2, 1.0, False, False),  # no rounding explains it
        (60 * UNIT, 9, 0.75, False, True),  # those before it have 0.751 of the mass
        (60 * UNIT, 9, 0.7, False, False),
    ],
)
def test_a_token_at_the_edge_of_a_filter_that_is_not_picked_again_is_a_tie(
    below, top_k, top_p, picked_again, is_tie, monkeypatch
):
    """Plain decoding filters it away, and so does speculation when it decodes the text once more, with its scores."""
    logits = torch.full((9,), -4.0)
    logits[4], logits[5], logits[6] = 1.0, 0.99, 0.99 - below
    row_seeds = [SeededGumbelLogitsProcessor(seed).seed_of(0) for seed in range(99)]
    noises = [gumbel_noise(seed, 0, torch.arange(9)) for seed in row_seeds]
    seed = next(seed for seed, noise in enumerate(noises) if noise[6] > 1 + noise[:6].max())  # wins where it is left
    decoding = Decoding(seed, temperature=1.0, top_k=top_k, top_p=top_p)
    scores = logits[None]
    for item in decoding.filters():
        scores = item(None, scores)
    assert scores[0, 6] == -torch.inf
    plain_token = int(add_gumbel_noise(scores, [row_seeds[seed]], [0]).argmax())
    plain = Run(torch.tensor([[plain_token]]), logits[None, None], scores[None], GenerationStatistics())
    own = plain._replace(tokens=torch.tensor([[6 if picked_again else plain_token]]))
    subject = Comparison(None, decoding, 1, None, Rounding("bfloat16", 0.0))
    monkeypatch.setattr(Comparison, "_scores_after", lambda *_: (scores[0].clone(), logits))
    found = subject._with_gap(Difference(0, 0, plain_token, 6), {}, plain, own)
    assert found.is_tie is is_tie and found.plain_gap == math.inf


@pytest.mark.parametrize("decoding", [Decoding(), Decoding(3)], ids=["greedy", "sampled"])
@pytest.mark.parametrize("architecture", ["llama", "t5"])
def test_what_is_decoded_otherwise_once_more_is_compared_after_the_text_in_question(
    architecture, decoding, monkeypatch
):
    """Drafts of the second time are others, where a source has learnt, and so is rounding."""
    model, runs = new_model(architecture), []
    inputs = left_padded([[5, 6, 7, 8], [9, 3]], 0, model.device)
    plain = decode_plainly(model, inputs, decoding, 6, records=True)
    row, at = 1, 3
    own_token = (int(plain.tokens[row, at]) + 1) % 90

    def differing(*args, records=False):
        runs.append(records)
        tokens = plain.tokens.clone()
        tokens[row, at if len(runs) == 1 else at - 1] = own_token
        return plain._replace(tokens=tokens)

    once = comparison.decode_speculatively
    decode = lambda *args, **kwargs: (differing if len(runs) < 2 else once)(*args, **kwargs)  # noqa: E731
    monkeypatch.setattr(comparison, "decode_speculatively", decode)
    check = TokenCheck(decoding.name, "replayed", 2)
    way = Drafting("replayed", lambda continuations: "none")
    Comparison(model, decoding, 6, way, Rounding("float32", 0.0)).check_batch(inputs, plain.tokens, check, False)
    (found,) = check.differences
    assert (found.row, found.position, found.own_token) == (row, at, own_token)
    assert found.logit_error < 1e-4 and found.plain_gap > 0 and not found.is_tie
    assert found.own_gap == pytest.approx(-found.plain_gap, abs=1e-4)


def test_first_difference_of_every_row_with_unequal_lengths():
    plain = torch.tensor([[5, 6, 7], [5, 6, 7], [5, 6, 7]])
    own = torch.tensor([[5, 6, 7, 8], [5, 9, 7, 8], [5, 6, 7, 8]])
    found = [(item.row, item.position, item.plain_token, item.own_token) for item in find_differences(plain, own)]
    assert found == [(0, 3, -1, 8), (1, 1, 6, 9), (2, 3, -1, 8)]
    assert find_differences(plain, plain) == []


@pytest.mark.parametrize("kind", ["float32", "int8"])
def test_a_token_at_another_level_counts_as_rounding_in_int8_only(kind):
    model = new_model("llama")
    if kind == "int8":
        hf_smartspec.quantize(model)
    prompt, tokens = [5, 6, 7], torch.tensor([[8, 9]])
    plain = model(input_ids=torch.tensor([[*prompt, 8]])).logits[:, -2:].detach()
    largest = float(plain.abs().max())
    rounding = measure_rounding(model, [prompt], tokens, plain + 0.1 * largest)
    assert (rounding.tolerance(1.0) > 0.1) == (kind == "int8")


def test_rounding_is_measured_up_to_the_end_of_a_text():
    model = new_model("llama")
    model.generation_config.eos_token_id = 9
    logits = model(input_ids=torch.tensor([[5, 6, 7, 8, 9, 0]])).logits[:, -4:].detach()
    logits[:, 2:] += 100.0  # after the token that ends the text
    assert measure_rounding(model, [[5, 6, 7]], torch.tensor([[8, 9, 0, 0]]), logits).measured < 1e-5


def test_padding_of_rows_that_had_ended_is_no_difference():
    """The other row goes on for longer on one side: at a tie, where it picks another token."""
    plain, own = torch.tensor([[5, 2, 2, 2], [5, 6, 7, 8]]), torch.tensor([[5, 2, 2], [5, 9, 2]])
    found = find_differences(without_padding(plain, [2]), without_padding(own, [2]))
    assert [(item.row, item.position) for item in found] == [(1, 1)]


def test_an_end_that_is_missing_is_a_difference_though_padding_is_the_same_token():
    plain, own = torch.tensor([[5, 6, 2, 2], [5, 6, 7, 8]]), torch.tensor([[5, 6, 9, 2], [5, 6, 7, 8]])
    for longer, shorter in ((plain, own), (plain[:1, :3], plain[:1, :2])):
        found = find_differences(without_padding(longer, [2]), without_padding(shorter, [2]))
        assert [(item.row, item.position) for item in found] == [(0, 2)]


@pytest.mark.parametrize(("statistic", "degrees"), [(0.0, 3), (5.0, 5), (40.0, 11), (120.0, 35)])
def test_p_value_is_scipys(statistic, degrees):
    assert chi_square_p_value(statistic, degrees) == pytest.approx(chi2.sf(statistic, degrees), rel=1e-9)


def test_tolerance_is_twice_what_was_measured_within_bounds():
    unit = torch.finfo(torch.bfloat16).eps
    assert Rounding("bfloat16", 5 * unit).tolerance(20.0) == pytest.approx(10 * unit * 20)
    assert Rounding("bfloat16", 0.0).tolerance(20.0) == pytest.approx(2 * unit * 20)
    assert Rounding("bfloat16", 100 * unit).tolerance(20.0) == pytest.approx(16 * unit * 20)


def test_measured_rounding_grows_with_the_dtype(models):
    """Of one text: two ways of rounding in one dtype may well agree, by the CPU."""
    target, _ = models
    prompts = encode(PROMPTS[:3], byte_tokenizer(), max_len=64)
    run = decode_plainly(target, left_padded(prompts, 0, target.device), Decoding(), 8, records=True)
    in_half = deepcopy(target).bfloat16()
    exact, rounded = (measure_rounding(model, prompts, run.tokens, run.logits) for model in (target, in_half))
    assert 0 <= exact.measured < 1e-5 < rounded.measured < 0.1
    assert (exact.dtype, rounded.dtype) == ("float32", "bfloat16")


@pytest.mark.parametrize("width", [1, 3])
def test_replayed_drafts_are_trees_with_errors(width):
    source = ReplayCandidates([list(range(40))], vocab_size=100, width=width, error_rate=0.5)
    source.start("row", np.arange(4))
    source.observe("row", np.arange(10))
    hits = 0
    for _ in range(20):
        (tree,) = source.propose(["row"], [source.default_num_nodes])
        tree.check_integrity(100)
        assert len(tree) == source.default_num_nodes == 5 * width
        hits += tree.child(-1, 10) is not None
    assert 0 < hits < 20


def test_random_prompts_are_ragged_and_repeat_themselves():
    prompts = random_prompts(6, vocab_size=50, max_len=100, seed=0)
    assert len(set(map(len, prompts))) > 1
    assert all(prompt[-2:] == prompt[:2] for prompt in prompts)


def test_table_of_exact_probabilities_is_a_distribution(models):
    table = exact_table(models[0], [5, 6, 7])
    assert float(table.pairs.sum()) == pytest.approx(1.0)
    assert sorted(set(table.choices) | set(table.suppressed)) == list(range(models[0].config.vocab_size))
    table.best_tree().check_integrity(models[0].config.vocab_size)


def test_frequencies_agree_and_a_biased_verification_is_noticed(models, monkeypatch):
    target, draft = models
    table = exact_table(target, [5, 6, 7])
    way = next(way for way in ways_of_sampling(draft, table) if "rejection" in way.name)
    # The seed is fixed: this test cannot fail by chance.
    honest = check_frequencies(target, table, way, num_samples=600, seed=0)
    assert honest.is_consistent and honest.drafted_tokens > honest.accepted_tokens > 0

    greedy = lambda place, scores: _any_draft(place.request, scores) if place.request.tree else int(scores.argmax())  # noqa: E731
    monkeypatch.setattr(verification, "_rejection_pick", greedy)
    assert not check_frequencies(target, table, way, num_samples=600, seed=0).is_consistent


def _any_draft(request, scores):
    """Accepts every draft token that the processors allow."""
    node = request.cursor + 1
    if node < len(request.tree) and scores[request.tree.tokens[node]] > -torch.inf:
        return int(request.tree.tokens[node])
    return int(scores.argmax())
