"""Noise that can be repeated, and processors that see of every row what plain decoding would show them."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from transformers import LogitsProcessor, LogitsProcessorList
from transformers.generation import logits_process as hf

from hf_smartspec import SeededGumbelLogitsProcessor
from hf_smartspec.decoding.request import Request
from hf_smartspec.sampling import processors as module
from hf_smartspec.sampling.noise import add_gumbel_noise, draft_seed, gumbel_noise, row_seed
from hf_smartspec.sampling.processors import TokenPicker
from hf_smartspec.sampling.top import argmax, top_tokens

VOCAB_SIZE = 50
EOS = 7
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
    expected = module._uniform_numpy(key, tokens.numpy())
    assert module._uniform_torch(key, tokens).numpy().tolist() == expected.tolist()


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
        module._uniform_numpy(counter, np.array([-1])),  # the token whose counter is the key itself
        module._uniform_torch(counter, torch.tensor([-1])).numpy(),
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


@given(st.lists(st.lists(st.integers(-3, 3), min_size=5, max_size=5), min_size=1, max_size=4))
def test_argmax_takes_the_lowest_of_equal_tokens(lines):
    expected = [line.index(max(line)) for line in lines]
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        assert argmax(torch.tensor(lines, dtype=dtype)) == expected


def test_argmax_rounds_to_float32_as_plain_decoding_does():
    assert argmax(torch.tensor([[1.0, 1.0 + 1e-12]], dtype=torch.float64)) == [0]


# --- The noise as a logits processor ---------------------------------------------------------------------------------


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

PROMPT_LENGTH = 6


def processors(name: str) -> LogitsProcessorList:
    """As `generate` would prepare them for a prompt of `PROMPT_LENGTH` tokens."""
    eos = torch.tensor([EOS])
    return LogitsProcessorList(
        {
            "temperature": lambda: [hf.TemperatureLogitsWarper(0.6)],
            "top_k": lambda: [hf.TopKLogitsWarper(5)],
            "top_p": lambda: [hf.TopPLogitsWarper(0.7)],
            "top_h": lambda: [hf.TopHLogitsWarper(0.4)],
            "min_p": lambda: [hf.MinPLogitsWarper(0.1)],
            "typical": lambda: [hf.TypicalLogitsWarper(0.8)],
            "epsilon": lambda: [hf.EpsilonLogitsWarper(0.02)],
            "eta": lambda: [hf.EtaLogitsWarper(0.1)],
            "remove": lambda: [hf.InfNanRemoveLogitsProcessor()],
            "normalise": lambda: [hf.LogitNormalization()],
            "suppress": lambda: [hf.SuppressTokensLogitsProcessor([3, 4, 5])],
            "repetition": lambda: [hf.RepetitionPenaltyLogitsProcessor(1.7)],
            "repetition of the output": lambda: [
                hf.RepetitionPenaltyLogitsProcessor(1.7, prompt_ignore_length=PROMPT_LENGTH)
            ],
            "repetition behind padding": lambda: [
                hf.RepetitionPenaltyLogitsProcessor(1.7, prompt_ignore_length=torch.tensor([2, 3, 0]))
            ],
            "n-grams": lambda: [hf.NoRepeatNGramLogitsProcessor(2)],
            "bias": lambda: [hf.SequenceBiasLogitsProcessor({(3,): 2.0, (1, 2): -5.0, (2, 3): 5.0})],
            "bad words": lambda: [hf.NoBadWordsLogitsProcessor([[4], [1, 2], [2, 5]], eos)],
            "min length": lambda: [hf.MinLengthLogitsProcessor(9, eos)],
            "min new": lambda: [hf.MinNewTokensLengthLogitsProcessor(PROMPT_LENGTH, 3, eos)],
            "forced bos": lambda: [hf.ForcedBOSTokenLogitsProcessor(1)],
            "forced eos": lambda: [hf.ForcedEOSTokenLogitsProcessor(9, eos)],
            "decay": lambda: [hf.ExponentialDecayLengthPenalty((2, 1.5), eos, PROMPT_LENGTH)],
            "suppress first": lambda: [hf.SuppressTokensAtBeginLogitsProcessor([3, 4], PROMPT_LENGTH)],
            "noise": lambda: [SeededGumbelLogitsProcessor(5)],
            "several": lambda: [
                hf.RepetitionPenaltyLogitsProcessor(1.3),
                hf.NoRepeatNGramLogitsProcessor(3),
                hf.TemperatureLogitsWarper(0.8),
                hf.TopPLogitsWarper(0.9),
                SeededGumbelLogitsProcessor(5),
            ],
        }[name]()
    )


SCORE_ONLY = "temperature top_k top_p top_h min_p typical epsilon eta remove normalise suppress".split()
ROW_ONLY = [
    *("repetition", "repetition of the output", "repetition behind padding", "n-grams", "bias", "bad words"),
    *("min length", "min new", "forced bos", "forced eos", "decay", "suppress first", "noise", "several"),
]
PADDING = (2, 0, 5)  # columns before each row's prompt


def a_batch(num_generated: int) -> list[Request]:
    """Three rows of few different tokens, each with the given number of generated ones."""
    rng = np.random.default_rng(0)
    requests = []
    for row, padding in enumerate(PADDING):
        ids = torch.from_numpy(rng.integers(1, 6, PROMPT_LENGTH))
        ids[:padding] = 0
        request = Request(object(), row, ids, torch.arange(PROMPT_LENGTH) >= padding)
        for token in rng.integers(1, 6, 8)[:num_generated].tolist():
            request.append(token)
        requests.append(request)
    return requests


class Columns:
    """The padded batch, as the picker asks for it."""

    def __init__(self, requests):
        self.requests = requests

    def padded_batch(self, num_generated: int) -> torch.Tensor:
        return torch.stack([request.padded_ids(num_generated) for request in self.requests])


def logits_at(length: int) -> torch.Tensor:
    """Different for every length, as a model's would be; one entry is infinite."""
    logits = torch.randn(3, VOCAB_SIZE, generator=torch.Generator().manual_seed(length)) * 2
    logits[1, 9] = -torch.inf
    return logits


@pytest.mark.parametrize("name", [*SCORE_ONLY, *ROW_ONLY])
def test_rows_at_different_lengths_get_the_scores_of_plain_decoding(name):
    """All rows are at length 0, 1, ... in plain decoding; here they are 2, 5 and 0 tokens along."""
    lengths = (2, 5, 0)
    plain = processors(name)
    expected = {}
    for length in range(6):
        batch = Columns(a_batch(length)).padded_batch(length)
        scores = plain(batch, logits_at(length))
        expected |= {(row, length): scores[row] for row in range(3)}

    picker = TokenPicker(processors(name), batch_size=3, prompt_length=PROMPT_LENGTH)
    assert picker.is_known and not picker.needs_lockstep
    assert picker.score_only == (name in SCORE_ONLY)
    requests = [a_batch(length)[row] for row, length in enumerate(lengths)]
    for order in ([0, 1, 2], [2, 0], [1]):
        rows = [requests[row] for row in order]
        logits = torch.stack([logits_at(lengths[row])[row] for row in order])
        before = logits.clone()
        scores = picker.process(rows, logits, Columns(requests))
        for line, row in zip(scores, order):
            torch.testing.assert_close(line, expected[row, lengths[row]], rtol=0, atol=0)
        if name not in SCORE_ONLY:
            assert torch.equal(logits, before), "the logits are wanted for the output as well"


def test_every_kind_of_processor_that_is_served_row_by_row_is_tested():
    tested = {type(item) for name in (*SCORE_ONLY, *ROW_ONLY) for item in processors(name)}
    assert tested >= {*module._SCORE_ONLY, *module._ROW_ONLY}


@pytest.mark.parametrize("name", SCORE_ONLY)
def test_score_processors_ignore_the_text(name):
    scores = processors(name)(ids_of(3, 9), logits_at(0))
    for processor in processors(name):
        torch.testing.assert_close(processor(None, logits_at(0)), scores, rtol=0, atol=0)


class Stateful(LogitsProcessor):
    """Bans what it has seen most often, over all rows and calls."""

    def __init__(self):
        self.calls: list[torch.Tensor] = []

    def __call__(self, input_ids, scores):
        self.calls.append(input_ids)
        return scores + len(self.calls)


def test_unknown_processors_see_the_whole_batch_in_the_callers_order():
    processor = Stateful()
    picker = TokenPicker(LogitsProcessorList([processor]), batch_size=3, prompt_length=PROMPT_LENGTH)
    assert picker.needs_lockstep and not picker.is_known
    requests = a_batch(2)
    logits = logits_at(2)
    # The second row has finished: it has no logits, but stands in the batch as ever.
    scores = picker.process([requests[2], requests[0]], logits[[2, 0]], Columns(requests))
    assert torch.equal(processor.calls[0], Columns(requests).padded_batch(2))
    assert torch.equal(scores, logits[[2, 0]] + 1)


def test_an_unknown_processor_of_a_single_row_needs_no_lockstep():
    picker = TokenPicker(LogitsProcessorList([Stateful()]), batch_size=1, prompt_length=PROMPT_LENGTH)
    assert not picker.needs_lockstep and not picker.is_known


def test_a_subclass_of_a_known_processor_is_unknown():
    class Own(hf.TemperatureLogitsWarper):
        def __call__(self, input_ids, scores):
            return super().__call__(input_ids, scores) / input_ids.shape[1]

    picker = TokenPicker(LogitsProcessorList([Own(0.5)]), batch_size=2, prompt_length=PROMPT_LENGTH)
    assert not picker.is_known and not picker.score_only


def test_drafters_are_told_of_score_processors_only():
    given = LogitsProcessorList([*processors("several"), *processors("top_k"), Stateful()])
    names = [type(item).__name__ for item in module.score_processors(given)]
    assert names == ["TemperatureLogitsWarper", "TopPLogitsWarper", "TopKLogitsWarper"]


@pytest.mark.parametrize("vocab_size", [5, 100, 700, 1280])
@pytest.mark.parametrize("count", [1, 3])
def test_top_tokens_are_those_of_topk(vocab_size, count):
    torch.manual_seed(vocab_size)
    scores = torch.randn(50, vocab_size)
    scores[torch.rand_like(scores) < 0.3] = -torch.inf
    scores[:, -1] = torch.randn(50)  # behind the last whole block
    assert torch.equal(top_tokens(scores, count), scores.topk(count).indices)
