"""Noise that can be repeated, and picks whose distribution it makes exact."""

import math
from math import inf, nan

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from hf_smartspec import SeededGumbelLogitsProcessor
from hf_smartspec.sampling import noise as module
from hf_smartspec.sampling.noise import (
    NO_TOKEN,
    add_gumbel_noise,
    add_noise,
    draft_seed,
    gumbel_noise,
    noise_keys,
    noisy_argmax,
    row_seed,
)
from hf_smartspec.sampling.top import argmax

VOCAB_SIZE = 50
seeds = st.integers(0, 2**63 - 1)

# Statistical tests have fixed seeds: they pass or fail once and for all. Had the seeds been drawn, a right
# implementation would fail one of them with a probability of at most this.
FALSE_ALARM = 1e-6


def splitmix_noise(seed: int, position: int, token: int) -> float:
    """The definition, in Python's own integers and floats."""
    mask = (1 << 64) - 1

    def mix(value: int) -> int:
        value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & mask
        value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & mask
        return value ^ (value >> 31)

    golden = 0x9E3779B97F4A7C15
    key = mix((mix((seed + golden) & mask) ^ (position + 1)) + golden & mask)
    counter = mix(((token + 1) * golden + key) & mask)
    return -math.log(-math.log(((counter >> 12) + 0.5) * 2.0**-52))


@given(seeds, st.integers(0, 100_000), st.integers(0, 300_000))
def test_noise_follows_its_definition(seed, position, token):
    actual = float(gumbel_noise(seed, position, torch.tensor([token])))
    assert actual == pytest.approx(splitmix_noise(seed, position, token), rel=1e-5, abs=1e-6)


@given(seeds, st.integers(0, 1000), st.integers(0, 2**64 - 1))
def test_devices_agree_on_the_uniform_variates(key, first, offset):
    """numpy on the CPU, torch elsewhere: bit for bit, with keys and counters that overflow."""
    tokens = torch.arange(first, first + 20)
    key = (key + offset) % 2**64
    expected = module._uniform_numpy(np.uint64(key), tokens.numpy())
    assert module._uniform_torch(module._signed(key), tokens).numpy().tolist() == expected.tolist()


@given(seeds, st.integers(0, 1000), st.lists(st.integers(0, 1000), min_size=1, max_size=30))
def test_noise_of_a_token_does_not_depend_on_the_tokens_beside_it(seed, position, tokens):
    together = gumbel_noise(seed, position, torch.tensor(tokens))
    alone = [float(gumbel_noise(seed, position, torch.tensor([[token]]))) for token in tokens]
    assert together.tolist() == alone and together.dtype == torch.float32


def unmix(value: int) -> int:
    """The counter from which the generator's finaliser makes `value`; it is a bijection."""
    mask = (1 << 64) - 1
    value = value ^ (value >> 31) ^ (value >> 62)
    value = value * pow(0x94D049BB133111EB, -1, 1 << 64) & mask
    value = value ^ (value >> 27) ^ (value >> 54)
    value = value * pow(0xBF58476D1CE4E5B9, -1, 1 << 64) & mask
    return value ^ (value >> 30) ^ (value >> 60)


@pytest.mark.parametrize("hashed", [0, 1, (1 << 64) - 1, (1 << 64) - (1 << 11), 1 << 63])
def test_noise_is_finite_at_both_ends_of_the_generator(hashed):
    """The largest and the smallest variates there are must lie within (0, 1), or a token's noise is infinite."""
    counter = unmix(hashed)
    for uniform in (
        module._uniform_numpy(np.uint64(counter), np.array([-1])),  # the token whose counter is the key itself
        module._uniform_torch(module._signed(counter), torch.tensor([-1])).numpy(),
    ):
        assert abs(uniform[0] - hashed / 2**64) < 2**-51, "the finaliser was not inverted"
        noise = -np.log(-np.log(uniform[0]))
        assert np.isfinite(noise) and noise <= module._LARGEST_NOISE


def test_noise_has_the_gumbel_distribution():
    """Kolmogorov-Smirnov over tokens, over positions and over seeds."""
    samples = {
        "tokens": gumbel_noise(1, 2, torch.arange(100_000)),
        "positions": torch.cat([gumbel_noise(1, position, torch.tensor([3])) for position in range(5_000)]),
        "seeds": torch.cat([gumbel_noise(seed, 2, torch.tensor([3])) for seed in range(5_000)]),
        "rows": torch.cat([gumbel_noise(row_seed(5, row), 2, torch.tensor([3])) for row in range(5_000)]),
    }
    for name, sample in samples.items():
        assert stats.kstest(sample.numpy(), stats.gumbel_r.cdf).pvalue > FALSE_ALARM / 4, name


def test_noise_of_neighbours_is_uncorrelated():
    """Ranks of 20,000 pairs that differ in one input only; 5.5 standard errors are one false alarm in 10 million."""
    tokens = torch.arange(20_000)
    base = gumbel_noise(1, 2, tokens)
    neighbours = {
        "token": gumbel_noise(1, 2, tokens + 1),
        "position": gumbel_noise(1, 3, tokens),
        "seed": gumbel_noise(2, 2, tokens),
        "row": gumbel_noise(row_seed(1, 1), 2, tokens),
        "draft": gumbel_noise(draft_seed(1), 2, tokens),
        "position against seed": gumbel_noise(2, 1, tokens),
    }
    for name, other in neighbours.items():
        correlation = stats.spearmanr(base.numpy(), other.numpy()).statistic
        assert abs(correlation) < 5.5 / math.sqrt(len(tokens)), name


def test_row_seeds_are_distinct_and_the_first_is_the_seed_itself():
    assert row_seed(42, 0) == 42
    assert len({row_seed(seed, row) for seed in range(100) for row in range(100)}) == 100 * 100


@st.composite
def score_lines(draw):
    """Processed scores: some tokens ruled out, the others near one another or worlds apart."""
    scale = draw(st.sampled_from([0.0, 1e-3, 1.0, 30.0, 1e4]))
    values = draw(st.lists(st.floats(-1, 1, width=32), min_size=1, max_size=40))
    kept = draw(st.lists(st.booleans(), min_size=len(values), max_size=len(values)))
    line = torch.tensor([value * scale if keep else -torch.inf for value, keep in zip(values, kept)])
    return line


@given(score_lines(), seeds, st.integers(0, 50))
def test_sparing_noise_picks_the_token_that_full_noise_picks(line, seed, position):
    """Noise is left out where it could not win; a score that is ruled out stays so."""
    sparing = add_gumbel_noise(line[None], [seed], [position])[0]
    full = line + gumbel_noise(seed, position, torch.arange(len(line)))
    assert argmax(sparing[None]) == argmax(full[None])
    assert torch.equal(sparing.isneginf(), line.isneginf())


@given(score_lines(), seeds, st.integers(0, 50), st.sampled_from([1, 60]))
def test_the_pick_of_few_tokens_is_that_of_full_noise(line, seed, position, times):
    lines = torch.stack([line, -line]).repeat(1, times)
    for scores in (lines, lines.bfloat16(), lines.where(lines.abs() < 0.5, torch.nan)):
        expected = argmax(add_gumbel_noise(scores, [seed, None], [position, 0]))
        if not scores[0].max().isfinite():
            expected[0] = NO_TOKEN
        assert noisy_argmax(scores, [seed, None], [position, 0]) == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("value", "tokens"), [(nan, slice(None)), (nan, [5]), (inf, [5]), (-inf, slice(None))])
def test_scores_without_probabilities_have_no_sample(dtype, value, tokens):
    scores = torch.randn(3, 9, dtype=dtype)
    scores[1:, tokens] = value
    with pytest.raises(RuntimeError, match="probability tensor"):
        torch.multinomial(scores[1].softmax(-1), 1)
    picks = noisy_argmax(scores, [1, 2, None], [0, 0, 0])
    assert picks[0] != NO_TOKEN == picks[1] and picks[2] == int(scores[2].argmax())


def test_picks_among_scores_with_noise_that_round_to_the_same():
    """Most of these tokens round to the highest score: more than compiled code returns, and the lowest is picked."""
    scores = torch.full((1, 3000), 1e9)
    assert noisy_argmax(scores, [3], [5]) == argmax(add_gumbel_noise(scores, [3], [5]))
    scores[0, 5:] = 0.0
    assert noisy_argmax(scores, [3], [5]) == argmax(add_gumbel_noise(scores, [3], [5])) == [0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@given(data=st.data())
def test_all_rows_get_their_noise_at_once_and_devices_agree_on_it(dtype, data):
    """Value for value what every row gets by itself, whether much or little is left of the vocabulary."""
    size = data.draw(st.sampled_from([5, 300, 40_000]))  # of which several, or one, are worked on at a time
    num = data.draw(st.integers(1, 4))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    scores = torch.randn(num, size, generator=generator) * data.draw(st.sampled_from([0.5, 5.0, 50.0]))
    num_left = torch.tensor(data.draw(st.lists(st.sampled_from([1, size // 3 + 1, size]), min_size=num, max_size=num)))
    scores = scores.masked_fill(torch.arange(size) >= num_left[:, None], -torch.inf).to(dtype)
    own_seeds = data.draw(st.lists(st.none() | seeds, min_size=num, max_size=num))
    positions = data.draw(st.lists(st.integers(0, 50), min_size=num, max_size=num))

    expected = scores.clone()
    for line, seed, position in zip(expected, own_seeds, positions):
        if seed is not None:
            noise = gumbel_noise(seed, position, torch.arange(size))
            best = line.argmax(keepdim=True)
            bound = line[best] + noise[best] - module._LARGEST_NOISE
            line[:] = torch.where((line >= bound) & line.isfinite(), (line + noise).to(dtype), line)
    assert torch.equal(add_gumbel_noise(scores, own_seeds, positions), expected)
    if None not in own_seeds:
        module._add_densely(scores, module.noise_keys(own_seeds, positions).keys[:, None], torch.arange(size))
        assert torch.equal(scores, expected)


@pytest.mark.parametrize("scale", [0.5, 50.0])
@given(data=st.data())
def test_scores_of_some_tokens_get_these_tokens_noise(scale, data):
    """Value for value what they get among all tokens, of which the others have -inf, in each way to add it."""
    size, generator = 2000, torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    ids = torch.randperm(size, generator=generator)[: data.draw(st.integers(1, 400))]
    own = scale * torch.randn(3, len(ids), generator=generator)
    own_seeds = data.draw(st.lists(st.none() | seeds, min_size=3, max_size=3))
    whole = torch.full((3, size), -torch.inf).index_copy_(1, ids, own)
    expected = add_gumbel_noise(whole, own_seeds, [4, 5, 6])[:, ids]
    noise = module.noise_keys(own_seeds, [4, 5, 6])
    if noise is not None:
        assert torch.equal(add_noise(own, noise, ids), expected)
        if not len(noise.lines):
            module._add_densely(own, noise.keys[:, None], ids)
            assert torch.equal(own, expected)


@pytest.mark.parametrize("seeds", [[1, 2], [None, 2]])
def test_keys_on_the_host_are_sent_to_the_scores(seeds):
    scores = torch.zeros(2, 9, device="meta")  # of no values, but no device is mixed with another
    assert add_noise(scores, noise_keys(seeds, [3, 4])).device == scores.device


def test_noise_leaves_rows_without_a_seed_and_its_input_alone():
    scores = torch.randn(3, VOCAB_SIZE)
    before = scores.clone()
    noisy = add_gumbel_noise(scores, [1, None, 2], [0, 0, 0])
    assert torch.equal(scores, before) and torch.equal(noisy[1], scores[1])
    assert not torch.equal(noisy[0], scores[0]) and not torch.equal(noisy[2], scores[2])


def test_picks_have_the_softmax_distribution():
    """Chi-square over 8,000 picks of 12 tokens, two of which are ruled out."""
    scores = torch.tensor([0.0, 1.0, -1.0, 2.0, 0.5, -torch.inf, 1.5, -2.0, 0.3, -torch.inf, 3.0, 0.0])
    picks = np.bincount(argmax(add_gumbel_noise(scores.expand(8_000, -1), range(8_000), [3] * 8_000)), minlength=12)
    assert picks[5] == picks[9] == 0
    likely = torch.isfinite(scores).numpy()
    expected = 8_000 * scores.double().softmax(0).numpy()[likely]
    assert stats.chisquare(picks[likely], expected).pvalue > FALSE_ALARM


def ids_of(rows: int, length: int) -> torch.Tensor:
    return torch.arange(rows * length).reshape(rows, length) % VOCAB_SIZE


def test_noise_processor_counts_from_the_prompt():
    scores = torch.zeros(2, VOCAB_SIZE)
    noise = SeededGumbelLogitsProcessor(9)
    for position, length in enumerate((4, 5, 6)):
        expected = add_gumbel_noise(scores, [9, row_seed(9, 1)], [position] * 2)
        assert torch.equal(noise(ids_of(2, length), scores), expected)
    # A new prompt, of any length: positions begin anew.
    for length in (3, 12, 12):
        assert torch.equal(noise(ids_of(2, length), scores)[0], add_gumbel_noise(scores, [9, 9], [0, 0])[0])


def test_noise_processor_takes_one_seed_per_row():
    scores = torch.zeros(2, VOCAB_SIZE)
    noisy = SeededGumbelLogitsProcessor([3, 8])(ids_of(2, 4), scores)
    assert torch.equal(noisy, add_gumbel_noise(scores, [3, 8], [0, 0]))


def test_noise_of_one_row_is_bound_to_its_prompt():
    """Rows that are served by themselves are asked for any position, in any order."""
    scores = torch.zeros(1, VOCAB_SIZE)
    single = SeededGumbelLogitsProcessor(9).for_row(2, prompt_length=4)
    for position in (0, 3, 1):
        expected = add_gumbel_noise(scores, [row_seed(9, 2)], [position])
        assert torch.equal(single(ids_of(1, 4 + position), scores), expected)


@pytest.mark.parametrize("seed", ["7", 1.5, [1, "2"], None])
def test_noise_processor_refuses_what_is_no_seed(seed):
    with pytest.raises(TypeError, match="seed"):
        SeededGumbelLogitsProcessor(seed)


# --- The target's processors -----------------------------------------------------------------------------------------
