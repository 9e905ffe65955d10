"""The cache that `generate` returns, caches that are passed in, and what goes on from them."""

import copy

import pytest
import torch
from packaging.version import Version
from transformers import DynamicCache, StaticCache

import hf_smartspec
from hf_smartspec.target_model.compat import CACHE
from hf_smartspec.target_model.private import TRANSFORMERS

from ..models import new_model
from .helpers import EOS, Oracle, Spy, check_same, draft_source, prompts
from .test_outputs import BATCH, IDS, MASK, PROMPT_LENGTH, Ends


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
    """The mask cannot be inferred where padding is EOS, and the padding's keys and values count."""
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
