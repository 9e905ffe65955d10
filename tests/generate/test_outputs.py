"""What `return_dict_in_generate` brings: scores, logits, the cache, statistics; and caches that are passed in."""

import copy

import pytest
import torch
from packaging.version import Version
from transformers import DynamicCache, StaticCache
from transformers.generation import GenerateDecoderOnlyOutput, StoppingCriteria

import hf_smartspec
from hf_smartspec.target_model.compat import CACHE
from hf_smartspec.target_model.private import TRANSFORMERS

from ..models import new_model
from .helpers import EOS, VOCAB_SIZE, Oracle, Spy, check_same, draft_source, noisy_copy, prompts

BATCH = prompts([5, 9, 2, 7])
IDS, MASK = BATCH["input_ids"], BATCH["attention_mask"]
PROMPT_LENGTH = IDS.shape[1]
EVERYTHING = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}


class Ends(StoppingCriteria):
    """Every row at a length of its own."""

    def __call__(self, input_ids, scores, **kwargs):
        return input_ids.shape[1] - PROMPT_LENGTH >= torch.tensor([3, 14, 8, 1])


def check_records(model, make, source=None, **ours):
    """Scores and logits of every row and step, those of finished rows included, are plain decoding's."""
    build = make if callable(make) else lambda: make
    plain = model.generate(**build())
    output, _ = check_same(model, make, source=source, **ours)
    assert isinstance(output, GenerateDecoderOnlyOutput)
    for name in ("scores", "logits"):
        expected, actual = getattr(plain, name), getattr(output, name)
        assert len(actual) == len(expected) == output.sequences.shape[1] - PROMPT_LENGTH
        for step, (line, wanted) in enumerate(zip(actual, expected)):
            assert line.dtype == torch.float32 and line.shape == (len(plain.sequences), VOCAB_SIZE)
            torch.testing.assert_close(line, wanted, atol=2e-5, rtol=1e-5, msg=f"{name} of step {step}")
    return output


@pytest.mark.parametrize("eos", [None, EOS, [EOS, 8, 12, 26]], ids=["no_eos", "eos", "many_eos"])
@pytest.mark.parametrize("rows", [slice(None), slice(1, 2)], ids=["batch", "one"])
def test_scores_and_logits(model, eos, rows):
    batch = {"input_ids": IDS[rows], "attention_mask": MASK[rows]}
    check_records(model, batch | EVERYTHING | {"max_new_tokens": 25, "eos_token_id": eos})


@pytest.mark.parametrize(
    "settings",
    [
        {"repetition_penalty": 1.6, "no_repeat_ngram_size": 2},
        {"suppress_tokens": [18], "renormalize_logits": True},
        {"min_new_tokens": 8, "bad_words_ids": [[26, 9]]},
        {"guidance_scale": 1.5},
    ],
)
def test_scores_are_processed_and_logits_are_not(model, settings):
    model.generation_config.eos_token_id = [EOS, 8, 12, 26]
    output = check_records(model, BATCH | EVERYTHING | {"max_new_tokens": 25} | settings)
    assert not torch.equal(torch.stack(output.scores), torch.stack(output.logits))


def test_scores_of_finished_rows_under_processors_with_state(model):
    """Plain decoding goes on showing finished rows to the processors."""
    model.generation_config.eos_token_id = [EOS, 8, 12, 26]

    class Falling:
        def __init__(self):
            self.total = torch.zeros(VOCAB_SIZE)

        def __call__(self, input_ids, scores):
            self.total = self.total + scores.softmax(-1).sum(0)
            return scores - 0.1 * self.total

    def make():
        return BATCH | EVERYTHING | {"max_new_tokens": 25, "logits_processor": [Falling()]}

    output = check_records(model, make)
    known = Oracle(output.sequences, MASK)
    output = check_records(model, make, source=known)
    assert output.statistics.mean_accepted_length > 1.5


def test_scores_of_rows_that_a_criterion_stops(model):
    for eos in (EOS, None):
        settings = {"max_new_tokens": 20, "stopping_criteria": [Ends()], "eos_token_id": eos}
        known = model.generate(**BATCH, max_new_tokens=20, eos_token_id=None)
        check_records(model, BATCH | EVERYTHING | settings, source=Oracle(known, MASK))


@pytest.mark.parametrize("name", ["output_scores", "output_logits"])
def test_one_of_them_alone(model, name):
    settings = BATCH | {"return_dict_in_generate": True, name: True, "max_new_tokens": 12}
    plain = model.generate(**settings)
    output, _ = check_same(model, settings)
    for field in ("scores", "logits"):
        assert (getattr(output, field) is None) == (getattr(plain, field) is None)


def test_nothing_is_recorded_without_return_dict(model):
    output, _ = check_same(model, BATCH | EVERYTHING | {"max_new_tokens": 8, "return_dict_in_generate": False})
    assert isinstance(output, torch.Tensor)


def test_transition_scores(model):
    settings = BATCH | EVERYTHING | {"max_new_tokens": 12}
    plain = model.generate(**settings)
    output, _ = check_same(model, settings)
    expected, actual = (
        model.compute_transition_scores(item.sequences, item.scores, normalize_logits=True) for item in (plain, output)
    )
    torch.testing.assert_close(actual, expected)


def test_the_output_is_transformers_own_with_statistics(model):
    settings = BATCH | {"return_dict_in_generate": True, "max_new_tokens": 12}
    plain = model.generate(**settings)
    output, _ = check_same(model, settings)
    assert isinstance(output, type(plain))
    assert set(output.keys()) - set(plain.keys()) == {"statistics"}
    assert output["sequences"] is output.sequences is output[0]
    assert output.attentions is None and output.hidden_states is None


def test_statistics(model):
    model.generation_config.eos_token_id = None
    known = model.generate(**BATCH, max_new_tokens=20)
    hf_smartspec.enable(model)
    kwargs = BATCH | {"max_new_tokens": 20, "return_dict_in_generate": True}
    statistics = model.generate(**kwargs, assistant=Oracle(known, MASK), num_assistant_tokens=4).statistics
    assert (statistics.steps, statistics.forwards) == (16, 4)  # 4 rows, blocks of 5
    assert statistics.drafted_tokens == statistics.accepted_tokens == 64
    assert statistics.generated_tokens == 80
    assert statistics.acceptance_rate == 1 and statistics.mean_accepted_length == 5
    wrong = model.generate(**kwargs, assistant=Oracle(known, MASK, is_right=False)).statistics
    assert (wrong.steps, wrong.forwards, wrong.accepted_tokens) == (80, 20, 0)
    assert wrong.acceptance_rate == 0 and wrong.mean_accepted_length == 1
    none = model.generate(**kwargs, assistant="none").statistics
    assert (none.steps, none.drafted_tokens, none.acceptance_rate) == (80, 0, 0)
    parts = [getattr(statistics, f"seconds_{name}") for name in ("draft", "select", "forward", "verify", "observe")]
    assert all(part >= 0 for part in parts) and 0 < sum(parts) <= statistics.seconds_total
    assert statistics.goodput == pytest.approx(80 / statistics.seconds_total)
    total = statistics + wrong
    assert total.generated_tokens == 160 and total.steps == 96
    names = {"steps", "drafted_tokens", "accepted_tokens", "generated_tokens", "acceptance_rate", "goodput"}
    assert names | {"mean_accepted_length"} <= statistics.as_dict().keys()


def test_generated_tokens_are_counted_up_to_each_rows_end(model):
    model.generation_config.eos_token_id = [EOS, 8, 12]
    output, _ = check_same(model, BATCH | {"max_new_tokens": 30, "return_dict_in_generate": True})
    new = output.sequences[:, PROMPT_LENGTH:]
    ends = torch.isin(new, torch.tensor([EOS, 8, 12]))
    expected = sum(int(row.nonzero()[0]) + 1 if row.any() else len(row) for row in ends)
    assert output.statistics.generated_tokens == expected


def test_statistics_of_plainly_served_calls(model):
    """Whoever reads statistics finds them, whichever way the call was served."""
    model.generation_config.eos_token_id = [EOS, 8, 12]
    settings = BATCH | {"max_new_tokens": 20, "return_dict_in_generate": True}
    served, _ = check_same(model, settings)
    with hf_smartspec.enabled(model):
        plainly = model.generate(**settings, output_hidden_states=True, assistant="prompt_lookup")
    assert torch.equal(plainly.sequences, served.sequences)
    assert plainly.statistics.generated_tokens == served.statistics.generated_tokens
    assert plainly.statistics.drafted_tokens == 0
    assert plainly.statistics.steps == plainly.statistics.generated_tokens
    assert plainly.statistics.forwards == served.sequences.shape[1] - PROMPT_LENGTH


# The cache


def layers_of(cache):
    return [(layer.keys, layer.values) for layer in cache.layers]


def check_cache(actual, expected, mask=None):
    """Equal keys and values in every column that holds a token."""
    assert type(actual) is type(expected) is DynamicCache
    assert actual.get_seq_length() == expected.get_seq_length()
    for ours, plain in zip(layers_of(actual), layers_of(expected), strict=True):
        for states, wanted in zip(ours, plain):
            assert states.shape == wanted.shape and states.dtype == wanted.dtype
            columns = torch.ones(states.shape[0], states.shape[2], dtype=torch.bool)
            if mask is not None:
                columns[:, : mask.shape[1]] = mask.bool()
            torch.testing.assert_close(
                states.transpose(1, 2)[columns], wanted.transpose(1, 2)[columns], atol=2e-5, rtol=1e-5
            )


@pytest.mark.parametrize("eos", [None, [EOS, 8, 12]], ids=["no_eos", "eos"])
@pytest.mark.parametrize("records", [False, True])
def test_the_cache_is_one_shorter_than_the_sequence(model, eos, records):
    settings = BATCH | {"max_new_tokens": 20, "return_dict_in_generate": True, "eos_token_id": eos}
    settings |= {"output_scores": records}
    plain = model.generate(**settings)
    output, _ = check_same(model, settings)
    assert output[CACHE].get_seq_length() == output.sequences.shape[1] - 1
    check_cache(output[CACHE], plain[CACHE], MASK)


def test_the_cache_of_rows_that_a_criterion_stops(model):
    known = model.generate(**BATCH, max_new_tokens=20, eos_token_id=None)
    for eos in (EOS, None):
        settings = BATCH | {"max_new_tokens": 20, "return_dict_in_generate": True, "eos_token_id": eos}
        settings |= {"stopping_criteria": [Ends()]}
        plain = model.generate(**settings)
        output, _ = check_same(model, settings, source=Oracle(known, MASK))
        check_cache(output[CACHE], plain[CACHE], MASK)


def continued(model, output, num_tokens, **kwargs):
    """Generates on from an output's text and cache."""
    length = output.sequences.shape[1]
    mask = torch.nn.functional.pad(MASK, (0, length - PROMPT_LENGTH), value=1)
    return model.generate(
        output.sequences,
        attention_mask=mask,
        **{CACHE: output[CACHE]},
        max_new_tokens=num_tokens,
        return_dict_in_generate=True,
        eos_token_id=None,
        **kwargs,
    )


@pytest.mark.parametrize("first", ["plain", "ours"])
@pytest.mark.parametrize("second", ["plain", "ours"])
def test_continuing_from_the_cache(model, first, second):
    hf_smartspec.enable(model)
    settings = BATCH | {"return_dict_in_generate": True, "eos_token_id": None}
    whole = model.generate(**settings, max_new_tokens=24)
    spies = [Spy(draft_source(model)) for _ in range(3)]

    def assistant(kind, spy):
        return {"assistant": spy} if kind == "ours" else {}

    output = model.generate(**settings, max_new_tokens=9, **assistant(first, spies[0]))
    output = continued(model, output, 8, **assistant(second, spies[1]))
    output = continued(model, output, 7, **assistant(first, spies[2]))
    assert torch.equal(output.sequences, whole.sequences)
    check_cache(output[CACHE], whole[CACHE], MASK)
    for spy, kind in zip(spies, (first, second, first)):
        assert (spy.accepted > 0) == (kind == "ours")


def test_continuing_behind_finished_rows(model):
    """Where padding is EOS, the mask cannot be inferred and the padding's keys and values count."""
    model.generation_config.update(eos_token_id=[EOS, 8, 12], pad_token_id=EOS)
    inputs = {"input_ids": prompts([6, 6, 6])["input_ids"]}
    settings = inputs | {"max_new_tokens": 20, "return_dict_in_generate": True}
    plain = model.generate(**settings)
    output, _ = check_same(model, settings)
    assert (output.sequences[:, -1] == EOS).any()
    for first in (plain, output):
        first[CACHE] = copy.deepcopy(first[CACHE])
    follow = {"max_new_tokens": 6, "eos_token_id": None}
    expected = model.generate(plain.sequences, **{CACHE: plain[CACHE]}, **follow)
    actual = model.generate(output.sequences, **{CACHE: output[CACHE]}, **follow)
    assert torch.equal(actual, expected)


def test_an_empty_cache_is_filled_in_place(model):
    ours, plain = DynamicCache(config=model.config), DynamicCache(config=model.config)
    expected = model.generate(**BATCH, max_new_tokens=12, **{CACHE: plain})
    spy = Spy(draft_source(model))
    with hf_smartspec.enabled(model):
        output = model.generate(**BATCH, max_new_tokens=12, **{CACHE: ours}, assistant=spy)
    assert isinstance(output, torch.Tensor) and torch.equal(output, expected)
    assert spy.accepted > 0
    check_cache(ours, plain, MASK)


@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning")  # from 5.24 on; until 5.40 it works
@pytest.mark.parametrize("name", dict.fromkeys([CACHE, "past_key_values"]))
def test_a_given_cache_is_continued_in_place(model, name):
    hf_smartspec.enable(model)
    settings = BATCH | {"eos_token_id": None}
    whole = model.generate(**settings, max_new_tokens=20)
    cache = DynamicCache()
    first = model.generate(**settings, max_new_tokens=8, **{name: cache})
    spy = Spy(draft_source(model))
    mask = torch.nn.functional.pad(MASK, (0, 8), value=1)
    second = model.generate(
        first, attention_mask=mask, max_new_tokens=12, **{name: cache}, eos_token_id=None, assistant=spy
    )
    assert torch.equal(second, whole) and spy.accepted > 0
    assert cache.get_seq_length() == whole.shape[1] - 1
    output = model.generate(
        whole[:, :-3],
        attention_mask=torch.nn.functional.pad(MASK, (0, 17), value=1),
        max_new_tokens=3,
        **{name: cut(cache, 5)},
        eos_token_id=None,
        return_dict_in_generate=True,
        assistant=spy,
    )
    assert torch.equal(output.sequences, whole)


def cut(cache, num_tokens):
    cache = copy.deepcopy(cache)
    cache.crop(-num_tokens)
    return cache


def test_new_tokens_alone_behind_a_cache(model):
    """Only the new turn is passed; the mask covers all. Nothing can be looked up in what is not there."""
    hf_smartspec.enable(model)
    first = model.generate(**BATCH, max_new_tokens=8, return_dict_in_generate=True, eos_token_id=None)
    turn = prompts([3, 3, 3, 3], seed=4)["input_ids"]
    mask = torch.nn.functional.pad(MASK, (0, 7 + 3), value=1)
    kwargs = {"attention_mask": mask, "max_new_tokens": 6, "eos_token_id": None}
    expected = model.generate(turn, **{CACHE: copy.deepcopy(first[CACHE])}, **kwargs)
    actual = model.generate(turn, **{CACHE: copy.deepcopy(first[CACHE])}, assistant="prompt_lookup", **kwargs)
    assert torch.equal(actual, expected)


def test_caches_of_another_kind_are_served_as_before(model):
    hf_smartspec.enable(model)
    expected = model.generate(**BATCH, max_new_tokens=8)
    cache = StaticCache(config=model.config, max_cache_len=40)
    assert torch.equal(model.generate(**BATCH, max_new_tokens=8, **{CACHE: cache}, assistant="prompt_lookup"), expected)
    assert cache.get_seq_length() == expected.shape[1] - 1
    for implementation in ("dynamic", "static"):
        kwargs = {"max_new_tokens": 8, "cache_implementation": implementation, "assistant": "prompt_lookup"}
        assert torch.equal(model.generate(**BATCH, **kwargs), expected)


def test_a_cache_for_another_batch_fails_as_in_plain_decoding(model):
    hf_smartspec.enable(model)
    cache = model.generate(IDS[1:2], max_new_tokens=4, return_dict_in_generate=True)[CACHE]
    ids = torch.cat([IDS, IDS[:, :6]], dim=1)
    for assistant in ({}, {"assistant": "prompt_lookup"}):
        with pytest.raises((RuntimeError, IndexError, ValueError)):
            model.generate(ids[:2], max_new_tokens=4, **{CACHE: copy.deepcopy(cache)}, **assistant)


@pytest.mark.parametrize("eos", [None, [EOS, 8, 12]], ids=["no_eos", "eos"])
def test_static_caches_are_returned_as_such(model, eos):
    settings = BATCH | {"max_new_tokens": 16, "return_dict_in_generate": True, "cache_implementation": "static"}
    settings |= {"eos_token_id": eos}
    plain = model.generate(**settings)[CACHE]
    output, _ = check_same(model, settings)
    ours = output[CACHE]
    assert type(ours) is type(plain) is StaticCache
    assert int(ours.get_seq_length()) == int(plain.get_seq_length()) == output.sequences.shape[1] - 1
    length = output.sequences.shape[1] - 1
    columns = torch.nn.functional.pad(MASK, (0, length - PROMPT_LENGTH), value=1).bool()
    for layer, reference in zip(ours.layers, plain.layers, strict=True):
        assert layer.keys.shape == reference.keys.shape
        for states, wanted in ((layer.keys, reference.keys), (layer.values, reference.values)):
            pair = (item[:, :, :length].transpose(1, 2)[columns] for item in (states, wanted))
            torch.testing.assert_close(*pair, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("batch_size", [1, 4])
@pytest.mark.parametrize(
    "architecture", ["llama", "gemma3_text", "bloom", "gpt_neo", "gpt_oss", "t5", "bart", "t5gemma", "m2m_100"]
)
@pytest.mark.parametrize("max_new_tokens", [2, 12])  # windows that are not full, and that are
def test_static_caches_of_all_ways_to_be_served(architecture, batch_size, max_new_tokens):
    """Packed, row by row, after encoders, with windows: plain decoding's lengths, and going on gives its tokens."""
    if architecture == "bloom" and Version("5.22") > TRANSFORMERS:
        pytest.skip("Bloom takes no static caches in this release")
    model = new_model(architecture)
    ids, mask = IDS[-batch_size:, -4:].clamp(min=3), torch.ones_like(IDS[-batch_size:, -4:])
    mask[0, : batch_size // 2] = 0
    settings = {"max_new_tokens": max_new_tokens, "eos_token_id": None, "return_dict_in_generate": True}
    settings |= {"attention_mask": mask, "cache_implementation": "static", "max_cache_len": 40}
    caches, texts = [], []
    for assistant in (None, "prompt_lookup"):
        with hf_smartspec.enabled(model):
            output = model.generate(ids, **settings, **({"assistant": assistant} if assistant else {}))
        texts.append(output.sequences)
        caches.append(copy.deepcopy(output[CACHE]))
    assert torch.equal(*texts)
    plain, ours = caches
    assert type(ours) is type(plain)
    if model.config.is_encoder_decoder:
        plain, ours = plain.self_attention_cache, ours.self_attention_cache
        mask = torch.ones_like(texts[0][:, :1])
    assert type(ours) is type(plain) is StaticCache
    length = texts[0].shape[1] - 1
    mask = torch.nn.functional.pad(mask, (0, length - mask.shape[1]), value=1)
    for layer, reference in zip(ours.layers, plain.layers, strict=True):
        assert type(layer) is type(reference) and layer.keys.shape == reference.keys.shape
        assert int(layer.get_seq_length()) == int(reference.get_seq_length()) == length
        assert layer.get_mask_sizes(1) == reference.get_mask_sizes(1)
        kept = min(length, layer.keys.shape[2])
        seen = mask[:, -kept:].bool()
        if kept == layer.keys.shape[2]:
            seen[:, 0] = False  # of a full window, the next token does not see the first one
        for states, wanted in ((layer.keys, reference.keys), (layer.values, reference.values)):
            pair = (item[:, :, :kept].transpose(1, 2)[seen] for item in (states, wanted))
            torch.testing.assert_close(*pair, atol=2e-4, rtol=1e-4)
        assert not layer.keys[:, :, kept:].any()
    if not model.config.is_encoder_decoder:
        more = {"attention_mask": torch.nn.functional.pad(mask, (0, 1), value=1), "max_new_tokens": 6}
        more["eos_token_id"] = None
        going_on = [model.generate(texts[0], **{CACHE: cache}, **more) for cache in caches]
        assert torch.equal(*going_on)


# `custom_generate`, without the patch


def test_custom_generate_callable(model, draft):
    settings = BATCH | {"max_new_tokens": 16, "repetition_penalty": 1.3}
    expected = model.generate(**settings)
    for assistant in ("prompt_lookup", draft, hf_smartspec.SmartSpecConfig(draft, width=2)):
        output = model.generate(
            **settings, custom_generate=hf_smartspec.decode, assistant=assistant, return_dict_in_generate=True
        )
        assert torch.equal(output.sequences, expected)
        if assistant != "prompt_lookup":
            assert output.statistics.accepted_tokens > 0
    assert torch.equal(model.generate(**settings, custom_generate=hf_smartspec.decode), expected)


def test_custom_generate_callable_samples_with_a_seed(model, draft):
    settings = BATCH | {"max_new_tokens": 16, "do_sample": True, "seed": 3}
    output = model.generate(**settings, custom_generate=hf_smartspec.decode, assistant=draft)
    with hf_smartspec.enabled(model):
        assert torch.equal(model.generate(**settings, assistant=noisy_copy(model)), output)
