"""
What transformers' own `GenerationTesterMixin` asserts of `generate`, with every call routed through an assistant:
shapes, counts and types of everything that is returned.
"""

import pytest
import torch
from transformers.cache_utils import DynamicCache, EncoderDecoderCache
from transformers.generation import GenerateDecoderOnlyOutput, GenerateEncoderDecoderOutput

import hf_smartspec
from hf_smartspec.target_model.compat import CACHE

from .helpers import BOS, prompts
from .mixin import (
    BATCH,
    CACHED,
    EVERYTHING,
    MODELS,
    NEW,
    WINDOW,
    build,
    check_layers,
    check_steps,
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


def test_greedy(model, routed):
    output = routed(**BATCH, max_new_tokens=NEW)
    assert output.shape == (2, prompt_length(model, BATCH) + NEW)


def test_sample(model):
    with hf_smartspec.enabled():
        for num_return_sequences in (1, 3):
            kwargs = {
                "do_sample": True,
                "num_return_sequences": num_return_sequences,
                "max_new_tokens": NEW,
                "top_k": 5,
            }
            output = model.generate(**BATCH, **kwargs, seed=1, assistant="prompt_lookup")
            assert output.shape == (2 * num_return_sequences, prompt_length(model, BATCH) + NEW)
            assert torch.equal(output, model.generate(**BATCH, **kwargs, seed=1, assistant="none"))


@pytest.mark.parametrize("num_return_sequences", [1, 2])
def test_dict_output(model, routed, num_return_sequences):
    kwargs = {"do_sample": num_return_sequences > 1, "num_return_sequences": num_return_sequences}
    num_rows = 2 * num_return_sequences
    kwargs |= {"max_new_tokens": NEW, "return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    if num_return_sequences == 1:
        output = routed(**BATCH, **kwargs)
    else:
        with hf_smartspec.enabled():
            output = model.generate(**BATCH, **kwargs, assistant="prompt_lookup")
    is_encoder_decoder = model.config.is_encoder_decoder
    assert isinstance(output, GenerateEncoderDecoderOutput if is_encoder_decoder else GenerateDecoderOnlyOutput)
    assert output.sequences.shape == (num_rows, prompt_length(model, BATCH) + NEW)
    check_steps("scores", output.scores, num_rows)
    check_steps("logits", output.logits, num_rows)
    assert output.statistics.generated_tokens == num_rows * NEW


@pytest.mark.parametrize("name", CACHED)
def test_attentions_and_hidden_states_are_served_plainly(name):
    model = build(name, "eager")
    kwargs = BATCH | EVERYTHING | {"max_new_tokens": NEW, "return_dict_in_generate": True}
    expected = model.generate(**kwargs)
    with hf_smartspec.enabled():
        output = model.generate(**kwargs, assistant="prompt_lookup")
    assert torch.equal(output.sequences, expected.sequences)
    check_steps("scores", output.scores, 2)
    check_steps("logits", output.logits, 2)
    config = model.config
    num_layers, num_heads, hidden_size = config.num_hidden_layers, config.num_attention_heads, config.hidden_size
    length = prompt_length(model, BATCH)

    def hidden_states(step):
        return [(2, length if step == 0 else 1, hidden_size)] * (num_layers + 1)

    def attentions(step):
        shapes = []
        for layer in range(num_layers):
            keys = length + step
            if name == "gemma3" and config.layer_types[layer] == "sliding_attention" and step:
                keys = min(keys, WINDOW)
            shapes.append((2, num_heads, length if step == 0 else 1, keys))
        return shapes

    if config.is_encoder_decoder:
        check_layers("decoder_hidden_states", output.decoder_hidden_states, hidden_states)
        check_layers("decoder_attentions", output.decoder_attentions, attentions)
        cross = lambda step: [(2, num_heads, 1, 9)] * num_layers  # noqa: E731
        check_layers("cross_attentions", output.cross_attentions, cross)
        assert [tuple(item.shape) for item in output.encoder_hidden_states] == [(2, 9, hidden_size)] * (num_layers + 1)
        assert [tuple(item.shape) for item in output.encoder_attentions] == [(2, num_heads, 9, 9)] * num_layers
    else:
        check_layers("hidden_states", output.hidden_states, hidden_states)
        check_layers("attentions", output.attentions, attentions)


@pytest.mark.parametrize("model", ["llama", "gemma3", "gpt2", "mamba"], indirect=True)
def test_without_input_ids(model, routed):
    output = routed(max_new_tokens=NEW)
    assert output.shape == (1, 1 + NEW)
    assert output[0, 0] == BOS


@pytest.mark.parametrize("model", CACHED, indirect=True)  # a padded state-space model differs from an unpadded one
def test_left_padding(model, routed):
    padded = prompts([5, 9], seed=2)
    output = routed(**padded, max_new_tokens=NEW)
    alone = routed(
        input_ids=padded["input_ids"][:1, 4:], attention_mask=padded["attention_mask"][:1, 4:], max_new_tokens=NEW
    )
    assert output[0, -NEW:].tolist() == alone[0, -NEW:].tolist()


@pytest.mark.parametrize("name", CACHED)
def test_cache_shapes(name):
    model = build(name)
    kwargs = BATCH | {"max_new_tokens": NEW, "return_dict_in_generate": True}
    expected = model.generate(**kwargs)[CACHE]
    with hf_smartspec.enabled():
        cache = model.generate(**kwargs, assistant="prompt_lookup")[CACHE]
    assert type(cache) is type(expected) is (EncoderDecoderCache if name == "t5" else DynamicCache)
    length = prompt_length(model, BATCH) + NEW - 1
    assert cache.get_seq_length() == expected.get_seq_length() == length
    pairs = [(cache, expected)]
    if name == "t5":
        pairs = [
            (cache.self_attention_cache, expected.self_attention_cache),
            (cache.cross_attention_cache, expected.cross_attention_cache),
        ]
    for actual, wanted in pairs:
        for ours, plain in zip(actual.layers, wanted.layers, strict=True):
            assert type(ours) is type(plain)
            for states, reference in ((ours.keys, plain.keys), (ours.values, plain.values)):
                torch.testing.assert_close(states, reference, atol=5e-5, rtol=1e-4)
