"""
What transformers' own `GenerationTesterMixin` asserts of `generate`, with every call routed through an assistant:
going on from returned caches, inputs with masks, and rows that end or run ahead.
"""

import pytest
import torch
from transformers.generation import StoppingCriteria

import hf_smartspec
from hf_smartspec.target_model.compat import CACHE

from .helpers import EOS, PAD, Oracle, Spy, prompts, set_special_tokens
from .mixin import (
    BATCH,
    CACHED,
    MODELS,
    NEW,
    build,
    prompt_length,
    routing,
)


@pytest.fixture(params=MODELS)
def model(request):
    """Never ends a row early, as in the mixin's tests."""
    return build(request.param)


@pytest.fixture
def routed(model):
    return routing(model)


@pytest.mark.parametrize("name", CACHED)
@pytest.mark.parametrize("lengths", [[9, 9], [5, 9]], ids=["full", "padded"])
@pytest.mark.parametrize("pattern", ["ours,ours,ours", "plain,ours,plain", "ours,plain,ours"])
def test_continue_from_cache(name, lengths, pattern):
    model = build(name)
    batch = prompts(lengths, seed=2)
    whole = model.generate(**batch, max_new_tokens=3 * NEW, return_dict_in_generate=True)
    inputs, accepted = dict(batch), []
    with hf_smartspec.enabled():
        for kind in pattern.split(","):
            spy = Spy(Oracle(whole.sequences, None if name == "t5" else batch["attention_mask"]))
            kwargs = {"assistant": spy} if kind == "ours" else {}
            output = model.generate(**inputs, max_new_tokens=NEW, return_dict_in_generate=True, **kwargs)
            accepted.append(spy.accepted)
            inputs[CACHE] = output[CACHE]
            if name == "t5":
                inputs["decoder_input_ids"] = output.sequences
                inputs["decoder_attention_mask"] = torch.ones_like(output.sequences)
            else:
                inputs["input_ids"] = output.sequences
                missing = output.sequences.shape[1] - batch["attention_mask"].shape[1]
                inputs["attention_mask"] = torch.nn.functional.pad(batch["attention_mask"], (0, missing), value=1)
    assert torch.equal(output.sequences, whole.sequences)
    for index, kind in enumerate(pattern.split(",")):
        # given caches of models that are not packed are continued plainly
        assert (accepted[index] > 0) == (kind == "ours" and (name not in ("t5", "bloom") or index == 0))
    assert output[CACHE].get_seq_length() == whole[CACHE].get_seq_length()


@pytest.mark.parametrize("name", CACHED)
def test_rows_that_end_early(name):
    """Finished rows are padded, and their scores and cache are those of plain decoding, which feeds the padding."""
    model = build(name)
    whole = model.generate(**BATCH, max_new_tokens=3 * NEW)
    start = prompt_length(model, BATCH)
    set_special_tokens(model, eos=[int(whole[0, start + 4]), int(whole[1, start + 11])])
    kwargs = BATCH | {"max_new_tokens": 3 * NEW, "return_dict_in_generate": True}
    mask = None if name == "t5" else BATCH["attention_mask"]
    for extra in ({}, {"output_scores": True, "output_logits": True}):
        plain = model.generate(**kwargs, **extra)
        spy = Spy(Oracle(plain.sequences, mask))
        with hf_smartspec.enabled():
            output = model.generate(**kwargs, **extra, assistant=spy)
        assert spy.accepted > 0
        assert torch.equal(output.sequences, plain.sequences)
        assert (output.sequences[:, -1] == PAD).any()
        for field in extra:
            for ours, theirs in zip(getattr(output, field[7:]), getattr(plain, field[7:]), strict=True):
                torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
        ours, theirs = output[CACHE], plain[CACHE]
        if name == "t5":
            ours, theirs = ours.self_attention_cache, theirs.self_attention_cache
        for layer, reference in zip(ours.layers, theirs.layers, strict=True):
            torch.testing.assert_close(layer.keys, reference.keys, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2"])
def test_masks_with_holes(name):
    """Sliding windows count columns in plain decoding, holes included."""
    model = build(name)
    batch = prompts([20, 20], seed=4)
    batch["attention_mask"][0, [3, 8, 9, 14, 17]] = 0
    batch["attention_mask"][1, [0, 1, 16, 18]] = 0
    kwargs = batch | {"max_new_tokens": NEW}
    expected = model.generate(**kwargs)
    plain = model.generate(**kwargs, return_dict_in_generate=True)
    for num_rows in (2, 1):
        spy = Spy(Oracle(expected, batch["attention_mask"]))
        rows = {name: value[:num_rows] for name, value in batch.items()}
        with hf_smartspec.enabled():
            output = model.generate(**rows, max_new_tokens=NEW, return_dict_in_generate=True, assistant=spy)
        assert torch.equal(output.sequences, expected[:num_rows])
        assert spy.accepted > 0
        layers = zip(output[CACHE].layers, plain[CACHE].layers, strict=True)
        for index, (ours, theirs) in enumerate(layers):
            assert type(ours) is type(theirs) and ours.get_seq_length() == theirs.get_seq_length()
            columns = torch.nn.functional.pad(rows["attention_mask"], (0, NEW - 1), value=1).bool()
            columns = columns[:, -ours.keys.shape[2] :]
            for name in ("keys", "values"):
                states, reference = getattr(ours, name), getattr(theirs, name)[:num_rows]
                pair = (item.transpose(1, 2)[columns] for item in (states, reference))
                torch.testing.assert_close(*pair, atol=5e-5, rtol=1e-4, msg=f"{name} of layer {index}")


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2", "bloom", "mamba"])
def test_masks_of_nothing(name):
    """The mixin's masks of mamba hold zeros only."""
    model, kwargs = build(name), BATCH | {"attention_mask": torch.zeros_like(BATCH["attention_mask"])}
    for extra in ({}, {"output_scores": True, "return_dict_in_generate": True}):
        expected = model.generate(**kwargs, **extra, max_new_tokens=NEW)
        with hf_smartspec.enabled():
            output = model.generate(**kwargs, **extra, max_new_tokens=NEW, assistant="auto")
        sequences = [item.sequences if extra else item for item in (output, expected)]
        assert torch.equal(*sequences)


@pytest.mark.parametrize("name", ["gemma3", "gpt2"])
def test_position_ids_do_not_matter_where_they_are_the_default(name):
    model = build(name)
    positions = (BATCH["attention_mask"].cumsum(1) - 1).clamp(min=0)
    with hf_smartspec.enabled():
        kwargs = BATCH | {"max_new_tokens": NEW, "assistant": "prompt_lookup"}
        assert torch.equal(model.generate(**kwargs), model.generate(**kwargs, position_ids=positions))


@pytest.mark.parametrize("name", ["t5"])
def test_encoder_decoder_inputs(name):
    model = build(name)
    start = torch.tensor([[PAD, 5, 6], [PAD, 7, 8]])
    encoder_outputs = model.get_encoder()(**BATCH)
    for kwargs in (
        BATCH | {"decoder_input_ids": start},
        BATCH | {"decoder_input_ids": start, "decoder_attention_mask": torch.tensor([[1, 1, 1], [1, 0, 1]])},
        {"encoder_outputs": encoder_outputs, "attention_mask": BATCH["attention_mask"]},
        {"inputs": BATCH["input_ids"]},
    ):
        expected = model.generate(**kwargs, max_new_tokens=NEW)
        spy = Spy(Oracle(expected))
        with hf_smartspec.enabled():
            assert torch.equal(model.generate(**kwargs, max_new_tokens=NEW, assistant=spy), expected)
        assert spy.accepted > 0


def test_criteria_and_processors_of_the_user(model):
    """Whichever way a model is served, they see what plain decoding shows them."""

    def make():
        log = []

        def processor(ids, scores):
            log.append(("processor", ids.tolist()))
            return scores

        class Criterion(torch.nn.Identity):
            def __call__(self, ids, scores, **kwargs):
                log.append(("criterion", ids.tolist()))
                return torch.full((len(ids),), len(log) >= 10)

        return log, {"logits_processor": [processor], "stopping_criteria": [Criterion()], "max_new_tokens": NEW}

    plain_log, kwargs = make()
    expected = model.generate(**BATCH, **kwargs)
    log, kwargs = make()
    mask = None if model.config.is_encoder_decoder else BATCH["attention_mask"]
    with hf_smartspec.enabled():
        output = model.generate(**BATCH, **kwargs, assistant=Oracle(expected, mask))
    assert torch.equal(output, expected)
    assert log == plain_log and len(log) == 10


@pytest.mark.parametrize("name", CACHED)
@pytest.mark.parametrize("eos", [EOS, None], ids=["eos", "no_eos"])
def test_the_cache_of_rows_that_ran_ahead_of_a_criterion(name, eos):
    """They have to be taken back, sliding windows included."""

    class Ends(StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            return input_ids.shape[1] - start >= torch.tensor([12, 7])

    model = build(name)
    start = prompt_length(model, BATCH)
    whole = model.generate(**BATCH, max_new_tokens=20)
    set_special_tokens(model, eos)
    settings = BATCH | {"max_new_tokens": 20, "stopping_criteria": [Ends()], "return_dict_in_generate": True}
    plain = model.generate(**settings)
    source = Oracle(whole, None if name == "t5" else BATCH["attention_mask"])
    source.default_num_nodes = 15
    spy = Spy(source)
    with hf_smartspec.enabled():
        output = model.generate(**settings, assistant=spy)
    assert spy.accepted > 0
    assert torch.equal(output.sequences, plain.sequences)
    ours, theirs = output[CACHE], plain[CACHE]
    if name == "t5":
        ours, theirs = ours.self_attention_cache, theirs.self_attention_cache
    for layer, reference in zip(ours.layers, theirs.layers, strict=True):
        assert layer.get_seq_length() == reference.get_seq_length()
        torch.testing.assert_close(layer.keys, reference.keys, atol=1e-4, rtol=1e-4)


def test_tokens_that_are_no_tokens(model, routed):
    """The mixin switches EOS off by an id that never comes."""
    model.generation_config.update(eos_token_id=-1, pad_token_id=-1)
    with torch.no_grad():
        routed(**BATCH, max_new_tokens=NEW)


def test_the_model_is_left_as_it_was(model):
    before = (model.config.to_dict(), model.config._attn_implementation, vars(model.generation_config).copy())
    with hf_smartspec.enabled():
        model.generate(**BATCH, max_new_tokens=NEW, assistant="prompt_lookup")
    assert before == (model.config.to_dict(), model.config._attn_implementation, vars(model.generation_config))
