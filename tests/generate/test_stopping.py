"""Where rows stop: limits, EOS, stop strings and stopping criteria, the user's own included."""

import pytest
import torch
from transformers import GenerationConfig, StoppingCriteria, StoppingCriteriaList
from transformers.generation import EosTokenCriteria, MaxLengthCriteria, MaxTimeCriteria, StopStringCriteria

import hf_smartspec

from .helpers import EOS, PAD, VOCAB_SIZE, Oracle, Spy, check_same, draft_source, prompts, tiny_llama

BATCH = prompts([5, 9, 2, 7])
IDS, MASK = BATCH["input_ids"], BATCH["attention_mask"]
PROMPT_LENGTH = IDS.shape[1]


@pytest.fixture(scope="module")
def known():
    """What follows without any end, 40 tokens a row."""
    return tiny_llama().generate(**BATCH, max_new_tokens=40, eos_token_id=None)


# Limits and EOS


@pytest.mark.parametrize("eos", [None, 18, [18], [18, 26, 30], [EOS, 39]])
def test_eos(model, eos):
    output, _ = check_same(model, BATCH | {"max_new_tokens": 25, "eos_token_id": eos})
    if eos == [18, 26, 30]:
        assert output.shape[1] < PROMPT_LENGTH + 25


@pytest.mark.parametrize("position", range(6))
def test_eos_at_every_place_of_an_accepted_block(model, known, position):
    eos = int(known[1, PROMPT_LENGTH + position])
    output, _ = check_same(model, BATCH | {"max_new_tokens": 30, "eos_token_id": eos}, source=Oracle(known, MASK))
    first = known[1, PROMPT_LENGTH:].tolist().index(eos)
    assert (output[1, PROMPT_LENGTH + first + 1 :] == PAD).all()


def test_eos_as_the_first_token_of_every_row(model, known):
    eos = known[:, PROMPT_LENGTH].tolist()
    expected = model.generate(**BATCH, max_new_tokens=9, eos_token_id=eos)
    with hf_smartspec.enabled(model):
        output = model.generate(**BATCH, max_new_tokens=9, eos_token_id=eos, assistant=Oracle(known, MASK))
    assert torch.equal(output, expected)
    assert output.shape[1] == PROMPT_LENGTH + 1


@pytest.mark.parametrize(
    "limit",
    [{"max_length": PROMPT_LENGTH + 11}, {"max_new_tokens": 11}, {"max_new_tokens": 11, "min_new_tokens": 11}],
)
def test_length_limits(model, known, limit):
    output, _ = check_same(model, BATCH | limit | {"eos_token_id": None}, source=Oracle(known, MASK))
    assert output.shape[1] == PROMPT_LENGTH + 11


def test_length_limits_of_the_users_own(model, known):
    for criterion in (MaxLengthCriteria(PROMPT_LENGTH + 6), MaxLengthCriteria(PROMPT_LENGTH - 3)):
        settings = {"stopping_criteria": [criterion], "max_new_tokens": 12, "eos_token_id": None}
        expected = model.generate(**BATCH, **settings)
        with hf_smartspec.enabled(model):
            output = model.generate(**BATCH, **settings, assistant=Oracle(known, MASK))
        assert torch.equal(output, expected)


def test_no_time_left(model):
    """One token is always generated; no clock is waited for."""
    for settings in ({"max_time": 1e-9}, {"stopping_criteria": [MaxTimeCriteria(1e-9)]}):
        with hf_smartspec.enabled(model):
            output = model.generate(**BATCH, max_new_tokens=9, **settings, assistant="prompt_lookup")
        assert torch.equal(output, model.generate(**BATCH, max_new_tokens=1))


def test_enough_time(model):
    check_same(model, BATCH | {"max_new_tokens": 12, "max_time": 3600.0})


def test_time_runs_out_between_tokens(model, known, monkeypatch):
    """The clock ticks once per look at it: plain decoding looks once per token."""
    ticks = iter(range(10**6))
    monkeypatch.setattr("transformers.generation.stopping_criteria.time.time", lambda: next(ticks))
    settings = {"max_time": 6.5, "max_new_tokens": 30, "eos_token_id": None}
    output, _ = check_same(model, BATCH | settings, source=Oracle(known, MASK))
    assert output.shape[1] == PROMPT_LENGTH + 7


# Criteria of the user's own


class Recording(StoppingCriteria):
    """Stops row i after `ends[i]` tokens; asserts that it is called as plain decoding calls it."""

    def __init__(self, ends, first_length=PROMPT_LENGTH + 1):
        self.ends, self.length, self.seen = torch.tensor(ends), first_length, []

    def __call__(self, input_ids, scores, **kwargs):
        assert input_ids.shape == (len(self.ends), self.length), "a token was skipped, or rows were left out"
        self.length += 1
        self.seen.append(input_ids.clone())
        return input_ids.shape[1] - PROMPT_LENGTH >= self.ends


@pytest.mark.parametrize("acceptance", [1, 0])
@pytest.mark.parametrize("eos", [None, 18], ids=["no_eos", "eos"])
def test_custom_criteria_are_called_once_per_token_and_never_overshoot(model, known, eos, acceptance):
    """transformers' assisted decoding calls them once per accepted block: too long in 20 of 39 lengths."""
    for end in (1, 2, 3, 4, 5, 6, 7, 9, 10, 11, 16, 17):
        ends = [end, end, end, end] if end % 2 else [end, max(1, end - 3), end + 2, 1]
        criteria = []

        def make(ends=ends, criteria=criteria):
            criteria.append(Recording(ends))
            return BATCH | {
                "stopping_criteria": StoppingCriteriaList([criteria[-1]]),
                "max_new_tokens": 30,
                "eos_token_id": eos,
            }

        expected = model.generate(**make())
        spy = Spy(Oracle(known, MASK, bool(acceptance)))
        with hf_smartspec.enabled(model):
            output = model.generate(**make(), assistant=spy)
        assert torch.equal(output, expected)
        assert spy.drafted > 0 and (spy.accepted > 0 or not acceptance or max(ends) == 1)
        plain, ours = criteria
        assert [ids.tolist() for ids in ours.seen] == [ids.tolist() for ids in plain.seen]


class LastTokens(StoppingCriteria):
    """
    As lm-eval's: state per row, and a look back over the last `len(stop) + 2` tokens only, so that a stop that is not
    seen at once is never seen.
    """

    def __init__(self, stop, batch_size):
        self.stop, self.is_done = stop, [False] * batch_size

    def __call__(self, input_ids, scores, **kwargs):
        for row, ids in enumerate(input_ids[:, PROMPT_LENGTH:][:, -len(self.stop) - 2 :].tolist()):
            places = range(len(ids) - len(self.stop) + 1)
            self.is_done[row] |= any(ids[place : place + len(self.stop)] == self.stop for place in places)
        return all(self.is_done)


class LastTokensPerRow(LastTokens):
    def __call__(self, input_ids, scores, **kwargs):
        super().__call__(input_ids, scores)
        return torch.tensor(self.is_done)


@pytest.mark.parametrize("eos", [None, 26], ids=["no_eos", "eos"])
@pytest.mark.parametrize("kind", [LastTokens, LastTokensPerRow])
@pytest.mark.parametrize("rows", [slice(1, 2), slice(None)], ids=["one", "batch"])
def test_criteria_that_look_back_a_few_tokens_only(model, known, kind, rows, eos):
    """With 8 drafts, transformers' assisted decoding stops too late in 32 of 35 cases and misses the stop in 21."""
    batch = {"input_ids": IDS[rows], "attention_mask": MASK[rows]}
    for place in range(0, 24, 5 if eos else 3):
        stop = known[1, PROMPT_LENGTH + place : PROMPT_LENGTH + place + 2].tolist()

        def make(stop=stop):
            criteria = [kind(stop, len(IDS[rows]))]
            return batch | {"stopping_criteria": criteria, "max_new_tokens": 30, "eos_token_id": eos}

        source = Oracle(known, MASK)
        source.default_num_nodes = 8
        output, _ = check_same(model, make, source=source)
        if len(output) == 1 and eos is None:
            assert output[0, -2:].tolist() == stop
            assert output.shape[1] <= PROMPT_LENGTH + place + 2


def test_criteria_of_one_value_for_all_rows(model, known):
    """A plain bool, as old criteria return it."""

    class Old(StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            return input_ids.shape[1] >= PROMPT_LENGTH + 7

    for eos in (None, 18):
        settings = {"stopping_criteria": [Old()], "max_new_tokens": 20, "eos_token_id": eos}
        output, _ = check_same(model, BATCH | settings, source=Oracle(known, MASK))
        assert output.shape[1] == PROMPT_LENGTH + 7


def test_several_criteria_are_all_asked(model, known):
    def make():
        criteria = [Recording([9, 99, 99, 99]), Recording([99, 4, 99, 6]), Recording([99, 99, 11, 99])]
        return BATCH | {"stopping_criteria": criteria, "max_new_tokens": 30}

    check_same(model, make, source=Oracle(known, MASK))


class Scores(StoppingCriteria):
    """Stops rows by their scores; plain decoding passes those of all steps so far."""

    def __init__(self, expects_scores=True):
        self.expects_scores, self.num_calls = expects_scores, 0

    def __call__(self, input_ids, scores, **kwargs):
        self.num_calls += 1
        if not self.expects_scores:
            assert scores is None
            return torch.zeros(len(input_ids), dtype=torch.bool)
        assert len(scores) == self.num_calls == input_ids.shape[1] - PROMPT_LENGTH
        assert all(step.shape == (len(input_ids), VOCAB_SIZE) for step in scores)
        return scores[-1].softmax(-1).amax(-1) > 0.55


@pytest.mark.parametrize("eos", [None, EOS])
def test_criteria_that_read_scores(model, known, eos):
    def make():
        settings = {"max_new_tokens": 30, "output_scores": True, "return_dict_in_generate": True, "eos_token_id": eos}
        return BATCH | settings | {"stopping_criteria": [Scores()]}

    output, _ = check_same(model, make, source=Oracle(known, MASK))
    assert output.sequences.shape[1] < PROMPT_LENGTH + 30
    check_same(model, lambda: BATCH | {"stopping_criteria": [Scores(False)], "max_new_tokens": 9})


def test_without_eos_finished_rows_go_on(model, known):
    """Plain decoding pads finished rows only where it knows an EOS token."""
    settings = {"stopping_criteria": [Recording([3, 12, 1, 8])], "max_new_tokens": 30, "eos_token_id": None}
    output, _ = check_same(
        model, lambda: BATCH | settings | {"stopping_criteria": [Recording([3, 12, 1, 8])]}, source=Oracle(known, MASK)
    )
    assert torch.equal(output, known[:, : PROMPT_LENGTH + 12])


def test_criteria_that_raise_end_the_call(model):
    class Raising(StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            raise KeyError("the user's own")

    with hf_smartspec.enabled(model), pytest.raises(KeyError, match="the user's own"):
        model.generate(**BATCH, stopping_criteria=[Raising()], max_new_tokens=9, assistant="prompt_lookup")


# Stop strings


@pytest.fixture
def strings(tokenizer, known):
    """Pieces of what the rows generate that begin and end within tokens."""

    def piece(row, start, stop, first=0, last=None):
        return tokenizer.decode(known[row, PROMPT_LENGTH + start : PROMPT_LENGTH + stop])[first:last]

    return [piece(0, 3, 7, 1, -1), piece(1, 6, 9, 1), piece(3, 11, 13), piece(2, 4, 5)]


@pytest.mark.parametrize("acceptance", ["draft_model", 1, 0])
def test_stop_strings(model, tokenizer, strings, known, acceptance):
    """transformers refuses them with a draft model, whose own `generate` inherits them without a tokenizer."""
    accepted = 0
    for stop in [*strings, strings]:
        settings = BATCH | {"stop_strings": stop, "max_new_tokens": 30, "eos_token_id": None}
        expected = model.generate(**settings, tokenizer=tokenizer)
        assert expected.shape[1] <= PROMPT_LENGTH + 30
        spy = Spy(draft_source(model) if acceptance == "draft_model" else Oracle(known, MASK, bool(acceptance)))
        with hf_smartspec.enabled(model):
            output = model.generate(**settings, tokenizer=tokenizer, assistant=spy)
        assert torch.equal(output, expected)
        assert spy.drafted > 0
        accepted += spy.accepted
    assert (accepted > 0) == (acceptance != 0)


def test_stop_strings_do_not_overshoot(model, tokenizer, strings, known):
    row = {"input_ids": IDS[:1], "attention_mask": MASK[:1]}
    settings = {"stop_strings": strings[0], "max_new_tokens": 30, "tokenizer": tokenizer, "eos_token_id": None}
    output, _ = check_same(model, row | settings, source=Oracle(known, MASK))
    text = tokenizer.decode(output[0, PROMPT_LENGTH:])
    assert strings[0] in text
    assert strings[0] not in tokenizer.decode(output[0, PROMPT_LENGTH:-1])


def test_stop_strings_with_eos_and_a_criterion(model, tokenizer, strings, known):
    def make():
        settings = {"stop_strings": strings, "tokenizer": tokenizer, "max_new_tokens": 30, "eos_token_id": [EOS, 26]}
        return BATCH | settings | {"stopping_criteria": [Recording([20, 20, 20, 2])]}

    check_same(model, make, source=Oracle(known, MASK))


def test_stop_strings_of_a_config_object(model, tokenizer, strings, known):
    config = GenerationConfig(stop_strings=strings, max_new_tokens=30, eos_token_id=EOS)
    before = config.to_dict()
    expected = model.generate(**BATCH, generation_config=config, tokenizer=tokenizer)
    with hf_smartspec.enabled(model):
        output = model.generate(**BATCH, generation_config=config, tokenizer=tokenizer, assistant=Oracle(known, MASK))
        assert torch.equal(output, expected)
        assert config.to_dict() == before
        with pytest.raises(ValueError, match="`stop_strings` need the model's tokenizer"):
            model.generate(**BATCH, generation_config=config, assistant="prompt_lookup")


def test_stop_strings_of_the_models_config(model, tokenizer, strings, known, hush):
    model.generation_config.stop_strings = strings
    before = model.generation_config.to_dict()
    settings = BATCH | {"max_new_tokens": 30, "eos_token_id": None}
    check_same(model, settings | {"tokenizer": tokenizer}, source=Oracle(known, MASK))
    with hf_smartspec.enabled(model), pytest.raises(ValueError, match="`stop_strings` need the model's tokenizer"):
        model.generate(**settings, assistant="prompt_lookup")
    assert model.generation_config.to_dict() == before
    # the call's own strings take the place of the model's, and a config object is completed by them
    check_same(model, settings | {"tokenizer": tokenizer, "stop_strings": strings[1]}, source=Oracle(known, MASK))
    config = GenerationConfig(max_new_tokens=30)
    check_same(model, BATCH | {"tokenizer": tokenizer, "generation_config": config}, source=Oracle(known, MASK))


def test_stop_strings_switched_off_for_a_call(model, tokenizer, strings, known):
    model.generation_config.stop_strings = strings
    settings = BATCH | {"max_new_tokens": 12, "eos_token_id": None, "stop_strings": None}
    output, _ = check_same(model, settings, source=Oracle(known, MASK))
    assert torch.equal(output, known[:, : PROMPT_LENGTH + 12])


def test_the_users_own_criterion_takes_the_place_of_stop_strings(model, tokenizer, strings, known):
    """As in plain decoding, where it is warned about."""

    def make():
        criteria = [StopStringCriteria(tokenizer, strings[1])]
        settings = {"stop_strings": strings[0], "stopping_criteria": criteria, "tokenizer": tokenizer}
        return BATCH | settings | {"max_new_tokens": 30, "eos_token_id": None}

    output, _ = check_same(model, make, source=Oracle(known, MASK))
    assert strings[0] in tokenizer.decode(output[0, PROMPT_LENGTH:])


def test_a_tokenizer_without_stop_strings(model, tokenizer):
    check_same(model, BATCH | {"tokenizer": tokenizer, "max_new_tokens": 9})


def test_the_users_own_criteria_take_the_place_of_built_in_ones(model, known):
    criteria = [EosTokenCriteria(eos_token_id=[18]), MaxLengthCriteria(PROMPT_LENGTH + 8)]
    settings = {"stopping_criteria": criteria, "max_new_tokens": 20, "eos_token_id": 26}
    check_same(model, BATCH | settings, source=Oracle(known, MASK))
