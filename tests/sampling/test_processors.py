"""Processors that see of every row what plain decoding would show them."""

import numpy as np
import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList
from transformers.generation import logits_process as hf

from hf_smartspec import SeededGumbelLogitsProcessor
from hf_smartspec.decoding.call import Request
from hf_smartspec.sampling import processors as module
from hf_smartspec.sampling.processors import TokenPicker

VOCAB_SIZE = 50
EOS = 7


def ids_of(rows: int, length: int) -> torch.Tensor:
    return torch.arange(rows * length).reshape(rows, length)


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


@pytest.mark.parametrize("lengths", [(2, 5, 0), (4, 1, 4), (3, 3, 3)])
@pytest.mark.parametrize("name", [*SCORE_ONLY, *ROW_ONLY])
def test_rows_at_any_lengths_get_the_scores_of_plain_decoding(name, lengths):
    """All rows are at length 0, 1, ... in plain decoding."""
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


def test_rows_of_one_length_are_served_by_one_call(monkeypatch):
    calls, serve = [], hf.MinNewTokensLengthLogitsProcessor.__call__
    monkeypatch.setattr(
        hf.MinNewTokensLengthLogitsProcessor, "__call__", lambda *args: calls.append(args[1].shape) or serve(*args)
    )
    picker = TokenPicker(processors("min new"), batch_size=3, prompt_length=PROMPT_LENGTH)
    requests = [a_batch(length)[row] for row, length in enumerate((1, 4, 1))]
    picker.process(requests, logits_at(0), Columns(requests))
    assert calls == [(2, PROMPT_LENGTH + 1), (1, PROMPT_LENGTH + 4)]


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


def test_lines_are_processed_by_their_owners_processors_neighbours_with_equal_ones_at_once(monkeypatch):
    """Every request of an engine has processors of its own."""
    calls: list[tuple[str, int]] = []
    for warper in (hf.TemperatureLogitsWarper, hf.TopKLogitsWarper, hf.SuppressTokensLogitsProcessor):

        def noting(self, input_ids, scores, apply=warper.__call__):
            calls.append((type(self).__name__, len(scores)))
            return apply(self, input_ids, scores)

        monkeypatch.setattr(warper, "__call__", noting)
    owners = [
        (module.ScoreProcessing([hf.TemperatureLogitsWarper(0.8), hf.TopKLogitsWarper(top_k)]), 2)
        for top_k in (5, 5, 5, 6)
    ]
    # A list of tokens is more than a number: these are compared by who they are.
    owners += [(module.ScoreProcessing([hf.SuppressTokensLogitsProcessor([3])]), 1) for _ in range(2)]
    owners.append((module.ScoreProcessing([Stateful()]), 1))  # looks at more than scores: left out
    scores = torch.randn(11, VOCAB_SIZE, generator=torch.Generator().manual_seed(0))
    parts = [scores[2 * place : 2 * place + 2] / 0.8 for place in range(4)]
    expected = [hf.TopKLogitsWarper(5 + place // 3)(None, part) for place, part in enumerate(parts)]
    expected += [hf.SuppressTokensLogitsProcessor([3])(None, scores[8:10]), scores[10:]]
    calls.clear()
    assert torch.equal(module.process_lines(scores, owners), torch.cat(expected))
    warped = [("TemperatureLogitsWarper", 6), ("TopKLogitsWarper", 6), ("TemperatureLogitsWarper", 2)]
    assert calls == [*warped, ("TopKLogitsWarper", 2), *[("SuppressTokensLogitsProcessor", 1)] * 2]


@pytest.mark.parametrize("kind", module._SCORE_ONLY)
def test_scores_of_some_tokens_are_processed_as_among_all_tokens(kind):
    """Drafters with vocabularies of their own have -inf for all other tokens."""
    settings = {hf.SuppressTokensLogitsProcessor: (range(0, VOCAB_SIZE, 3),), hf.TopKLogitsWarper: (5,)}
    settings |= {hf.TemperatureLogitsWarper: (0.7,), hf.TopHLogitsWarper: (0.5,)}
    is_set = kind not in (hf.InfNanRemoveLogitsProcessor, hf.LogitNormalization)
    processor = kind(*settings.get(kind, (0.3,) if is_set else ()))
    generator = torch.Generator().manual_seed(1)
    ids = torch.randperm(VOCAB_SIZE, generator=generator)[: VOCAB_SIZE // 2]
    own = 3 * torch.randn(4, len(ids), generator=generator)
    whole = torch.full((4, VOCAB_SIZE), -torch.inf).index_copy_(1, ids, own)
    owners = [(module.ScoreProcessing([processor]), 4)]
    expected = module.process_lines(whole, owners)[:, ids]
    torch.testing.assert_close(module.process_lines(own, owners, ids), expected)
    is_changed = not torch.equal(expected, own)
    assert is_changed or kind is hf.InfNanRemoveLogitsProcessor
