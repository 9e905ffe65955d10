"""Logits processors, built in and the user's own, see what they see in plain decoding and have the same effect."""

import pytest
import torch
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList
from transformers.generation import (
    EosTokenCriteria,
    MinNewTokensLengthLogitsProcessor,
    StoppingCriteria,
    TemperatureLogitsWarper,
)

import hf_smartspec

from ..covering import IS_EXHAUSTIVE
from .helpers import BOS, EOS, PAD, VOCAB_SIZE, Oracle, Spy, check_same, draft_source, prompts, tiny_llama

BATCH = prompts([5, 9, 2, 7])
IDS, MASK = BATCH["input_ids"], BATCH["attention_mask"]
PROMPT_LENGTH = IDS.shape[1]

# name -> settings; every one of them changes the output of some row
GREEDY = {
    "repetition_penalty": {"repetition_penalty": 1.8},
    "repetition_bonus": {"repetition_penalty": 0.7},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 1},
    "bad_words_ids": {"bad_words_ids": [[18], [26, 27], [12, 26, 12], [EOS]]},
    "sequence_bias": {"sequence_bias": [[[18], -8.0], [[26, 9], 6.0], [[30, 8, 18], -5.0]]},
    "min_length": {"min_length": PROMPT_LENGTH + 9},
    "min_new_tokens": {"min_new_tokens": 9},
    "forced_eos_token_id": {"forced_eos_token_id": 7},
    "suppress_tokens": {"suppress_tokens": [18, 26, 12]},
    "begin_suppress_tokens": {"begin_suppress_tokens": list(range(3, 34))},
    "exponential_decay": {"exponential_decay_length_penalty": (3, 1.5)},
    "renormalize_logits": {"renormalize_logits": True, "suppress_tokens": [18]},
    "remove_invalid_values": {"remove_invalid_values": True, "suppress_tokens": [26]},
    "guidance_scale": {"guidance_scale": 1.6},
    "encoder_repetition_penalty": {"encoder_repetition_penalty": 1.7},
    "encoder_no_repeat_ngram_size": {"encoder_no_repeat_ngram_size": 1},
    "several": {
        "repetition_penalty": 1.3,
        "no_repeat_ngram_size": 2,
        "bad_words_ids": [[18]],
        "suppress_tokens": [9],
        "min_new_tokens": 7,
        "guidance_scale": 1.3,
    },
}


@pytest.fixture
def model():
    """Rows that end early: EOS is one of the more frequent tokens."""
    model = tiny_llama()
    model.generation_config.eos_token_id = [EOS, 8]
    return model


@pytest.mark.parametrize("settings", GREEDY.values(), ids=GREEDY)
def test_greedy(model, settings):
    settings = {"max_new_tokens": 16} | settings
    output, _ = check_same(model, BATCH | settings)
    plain = model.generate(**BATCH, max_new_tokens=16)
    assert output.shape != plain.shape or not torch.equal(output, plain), "the setting has no effect on this model"
    if IS_EXHAUSTIVE or len(settings) > 2:
        check_same(model, {"input_ids": IDS[1:2]} | settings)


@pytest.mark.parametrize("name", ["repetition_penalty", "bad_words_ids", "exponential_decay", "several"])
def test_greedy_with_a_config_object_and_every_draft_right(model, name):
    config = {"generation_config": GenerationConfig(max_new_tokens=20, **GREEDY[name])}
    known = model.generate(**BATCH, **config)
    spy = Spy(Oracle(known, MASK))
    check_same(model, BATCH | config, source=spy)


def test_forced_bos(model):
    """It acts at length 1 only."""
    model.generation_config.bos_token_id = BOS
    ids = torch.tensor([[BOS], [7]])
    output, _ = check_same(model, {"input_ids": ids, "forced_bos_token_id": 11, "max_new_tokens": 16})
    assert output[:, 1].tolist() == [11, 11]
    check_same(model, {"input_ids": ids, "forced_bos_token_id": 11, "begin_suppress_tokens": [9], "max_new_tokens": 9})


def test_repetition_penalty_ignores_padding(model):
    """`generate` tells the processor where each row's padding ends; a row by itself must keep that."""
    settings = {"repetition_penalty": 1.8, "max_new_tokens": 16, "pad_token_id": 18}
    padded = IDS.masked_fill(MASK == 0, 18)
    output, _ = check_same(model, {"input_ids": padded, "attention_mask": MASK} | settings)
    for row in range(len(IDS)):
        ids = IDS[row][MASK[row] == 1][None]
        alone, _ = check_same(model, {"input_ids": ids, "attention_mask": torch.ones_like(ids)} | settings)
        tokens = alone[0, ids.shape[1] :].tolist()
        assert output[row, PROMPT_LENGTH:].tolist()[: len(tokens)] == tokens


def test_guidance_with_a_negative_prompt(model):
    negative = prompts([4, 6, 3, 6], seed=7)
    settings = {
        "negative_prompt_ids": negative["input_ids"],
        "negative_prompt_attention_mask": negative["attention_mask"],
        "guidance_scale": 2.0,
        "max_new_tokens": 14,
    }
    output, _ = check_same(model, BATCH | settings)
    assert not torch.equal(output, model.generate(**BATCH, max_new_tokens=14))


class Grammar(LogitsProcessor):
    """
    A small automaton per row, driven by the tokens since the last call, as grammar-constrained decoders are: after an
    even token an odd one must follow unless two odd ones came in a row.
    """

    def __init__(self, prompt_length: int):
        self.prompt_length, self.states = prompt_length, {}

    def __call__(self, input_ids, scores):
        for row, ids in enumerate(input_ids):
            length, odd = self.states.get(row, (self.prompt_length, 0))
            assert len(ids) - length in (0, 1), "a token was skipped or shown twice"
            for token in ids[length:].tolist():
                odd = odd + 1 if token % 2 else 0
            self.states[row] = (len(ids), odd)
            if odd == 0:
                scores[row, 0::2] = -torch.inf
            elif odd >= 2:
                scores[row, 1::2] = -torch.inf
        return scores


class WholeBatch(LogitsProcessor):
    """State across rows: it must see lengths t, t + 1, ... once each, with all rows in their original order."""

    def __init__(self, prompts: torch.Tensor):
        self.prompts, self.length, self.seen = prompts, prompts.shape[1], []
        self.counts = torch.zeros(VOCAB_SIZE)

    def __call__(self, input_ids, scores):
        assert input_ids.shape == (len(self.prompts), self.length)
        assert torch.equal(input_ids[:, : self.prompts.shape[1]], self.prompts)
        if self.seen:
            assert torch.equal(input_ids[:, :-1], self.seen[-1])
        self.seen.append(input_ids.clone())
        self.length += 1
        if len(self.seen) > 1:  # tokens that any row has taken become unlikely for all
            self.counts += torch.bincount(input_ids[:, -1], minlength=VOCAB_SIZE)
        return scores - 0.4 * self.counts


@pytest.mark.parametrize("is_right", [True, False, None], ids=["all_accepted", "none_accepted", "draft_model"])
@pytest.mark.parametrize("rows", [slice(None), slice(1, 2)], ids=["batch", "one"])
def test_stateful_processors(model, rows, is_right):
    batch = {"input_ids": IDS[rows], "attention_mask": MASK[rows]}
    calls = []

    def make(*classes):
        processors = [Grammar(PROMPT_LENGTH), WholeBatch(IDS[rows])]
        calls.append(processors)
        return batch | {"logits_processor": LogitsProcessorList(processors), "max_new_tokens": 18}

    source = None
    if is_right is not None:
        source = Oracle(model.generate(**make()), MASK[rows], is_right)
    if is_right is False:
        spy = Spy(source)
        with hf_smartspec.enabled(model):
            output = model.generate(**make(), assistant=spy)
        assert torch.equal(output, model.generate(**make()))
        assert spy.drafted > 0 and spy.accepted == 0
    else:
        output, _ = check_same(model, make, source=source)
    plain, ours = calls[-2:]
    assert plain[0].states == ours[0].states
    assert [ids.tolist() for ids in plain[1].seen] == [ids.tolist() for ids in ours[1].seen]
    assert not torch.equal(output, model.generate(**batch, max_new_tokens=output.shape[1] - PROMPT_LENGTH))


@pytest.mark.parametrize("return_dict", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_rows_end_while_the_drafts_of_others_are_half_verified(model, seed, return_dict):
    """The cache moves rows into gaps; in lockstep, some of them hold draft nodes that may still be accepted."""
    model.generation_config.eos_token_id = [EOS, 8, 12]
    inputs = prompts([5, 9, 2, 7, 4, 3], seed)

    def make():
        settings = {"max_new_tokens": 30, "return_dict_in_generate": return_dict}
        return inputs | settings | {"logits_processor": [WholeBatch(inputs["input_ids"])]}

    output, _ = check_same(model, make, source=draft_source(model, num_nodes=8))
    sequences = output.sequences if return_dict else output
    assert len({int((row != PAD).sum()) for row in sequences}) > 3, "rows were to end at different lengths"


def test_a_row_wise_processor_of_ours_beside_the_users(model):
    """Known processors in the same list are called with the whole batch as well."""

    def make():
        processors = LogitsProcessorList([WholeBatch(IDS)])
        return BATCH | {"logits_processor": processors, "repetition_penalty": 1.5, "max_new_tokens": 14}

    check_same(model, make)


class Counting:
    """Allowed tokens by row, from what the row has taken: no token may follow itself or its successor."""

    def __init__(self):
        self.lengths = {}

    def __call__(self, batch_id, sent):
        assert len(sent) == self.lengths.get(batch_id, len(sent) - 1) + 1
        self.lengths[batch_id] = len(sent)
        last = int(sent[-1])
        return [token for token in range(1, VOCAB_SIZE) if token not in (last, last + 1) and (token + batch_id) % 3]


def test_prefix_allowed_tokens_fn(model):
    output, _ = check_same(model, lambda: BATCH | {"prefix_allowed_tokens_fn": Counting(), "max_new_tokens": 16})
    new = output[:, PROMPT_LENGTH:]
    assert all((token + row) % 3 for row, ids in enumerate(new.tolist()) for token in ids if token != PAD)
    check_same(
        model, {"prefix_allowed_tokens_fn": lambda row, ids: [3 + row, 20, 21, EOS], "max_new_tokens": 9} | BATCH
    )


class SharedState:
    """A processor and a criterion that talk to each other, as structured generation with a final state does."""

    def __init__(self, limit: int):
        self.limit, self.calls = limit, 0

    def processor(self):
        state = self

        class Processor(LogitsProcessor):
            def __call__(self, input_ids, scores):
                state.calls += 1
                return scores

        return Processor()

    def criterion(self):
        state = self

        class Criterion(StoppingCriteria):
            def __call__(self, input_ids, scores, **kwargs):
                assert state.calls == input_ids.shape[1] - PROMPT_LENGTH, "called out of turn"
                return torch.full((len(input_ids),), state.calls >= state.limit)

        return Criterion()


@pytest.mark.parametrize("rows", [slice(None), slice(1, 2)], ids=["batch", "one"])
@pytest.mark.parametrize("limit", [1, 2, 3, 6, 7])
def test_processors_and_criteria_take_turns(model, limit, rows):
    model.generation_config.eos_token_id = None
    states = []

    def make():
        states.append(SharedState(limit))
        return {
            "input_ids": IDS[rows],
            "attention_mask": MASK[rows],
            "logits_processor": [states[-1].processor()],
            "stopping_criteria": [states[-1].criterion()],
            "max_new_tokens": 12,
        }

    known = model.generate(input_ids=IDS[rows], attention_mask=MASK[rows], max_new_tokens=12)
    output = model.generate(**make())
    spy = Spy(Oracle(known, MASK[rows]))
    with hf_smartspec.enabled(model):
        assert torch.equal(model.generate(**make(), assistant=spy), output)
    assert spy.drafted > 0
    assert output.shape[1] == PROMPT_LENGTH + limit
    assert [state.calls for state in states] == [limit, limit]


def test_the_users_version_of_a_built_in_processor(model):
    """transformers lets the user's own object of the same class take precedence."""
    processors = LogitsProcessorList([MinNewTokensLengthLogitsProcessor(PROMPT_LENGTH, 9, torch.tensor([EOS, 8]))])
    check_same(model, BATCH | {"logits_processor": processors, "min_new_tokens": 3, "max_new_tokens": 14})


def test_subclasses_of_built_in_processors_are_not_taken_for_them(model):
    class Cooling(TemperatureLogitsWarper):
        """Looks at the text, although its parent looks at scores only."""

        def __call__(self, input_ids, scores):
            return scores.masked_fill(torch.arange(VOCAB_SIZE) == (input_ids[:, -1:] + 1) % VOCAB_SIZE, 30.0)

    output, _ = check_same(
        model, BATCH | {"logits_processor": [Cooling(1.0)], "max_new_tokens": 8, "eos_token_id": None}
    )
    assert torch.equal(output[:, -1], (output[:, -2] + 1) % VOCAB_SIZE)


def test_processors_that_change_their_input_in_place(model):
    class InPlace(LogitsProcessor):
        def __call__(self, input_ids, scores):
            scores[:, 18] = -torch.inf
            return scores

    for return_dict in (False, True):
        settings = {"logits_processor": [InPlace()], "max_new_tokens": 12, "return_dict_in_generate": return_dict}
        output, _ = check_same(model, BATCH | settings)
    assert not (output.sequences[:, PROMPT_LENGTH:] == 18).any()


def test_plain_functions_as_processors(model):
    settings = BATCH | {"logits_processor": [lambda ids, scores: scores.roll(1, -1)], "max_new_tokens": 10}
    check_same(model, settings, source=Oracle(model.generate(**settings), MASK))


def test_processors_that_raise_end_the_call_as_in_plain_decoding(model):
    def raising(ids, scores):
        if ids.shape[1] > PROMPT_LENGTH + 3:
            raise KeyError("the user's own")
        return scores

    implementation = model.config._attn_implementation
    with hf_smartspec.enabled(model), pytest.raises(KeyError, match="the user's own"):
        model.generate(**BATCH, logits_processor=[raising], max_new_tokens=10, assistant="prompt_lookup")
    assert model.config._attn_implementation == implementation
    check_same(model, BATCH | {"max_new_tokens": 10})


def test_watermarks(model):
    from transformers import WatermarkingConfig

    for scheme in ("lefthash", "selfhash"):
        config = WatermarkingConfig(bias=3.0, seeding_scheme=scheme)
        check_same(model, BATCH | {"watermarking_config": config, "max_new_tokens": 10})


def test_own_criteria_of_the_eos_kind(model):
    """A user's criterion with `eos_token_id` makes plain decoding pad finished rows."""
    model.generation_config.eos_token_id = None
    criteria = [EosTokenCriteria(eos_token_id=[18])]
    output, _ = check_same(model, BATCH | {"stopping_criteria": criteria, "max_new_tokens": 24})
    assert (output[:, -1] == PAD).any()
