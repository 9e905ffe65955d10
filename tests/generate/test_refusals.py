"""Bad input is refused before the model runs, with an error that names the argument and what to do."""

import numpy as np
import pytest
import torch
from transformers import GenerationConfig, PreTrainedModel, T5Config, T5ForConditionalGeneration

import hf_smartspec
from hf_smartspec import DraftModelCandidates, PromptLookupCandidates, SmartSpecConfig, TreeCandidateGenerator

from .helpers import BOS, EOS, PAD, VOCAB_SIZE, prompts, tiny_llama

INPUTS = prompts([4, 6])
IDS, MASK = INPUTS["input_ids"], INPUTS["attention_mask"]


@pytest.fixture
def model():
    """A model that must not be run."""
    model = hf_smartspec.enable(tiny_llama())
    model.register_forward_pre_hook(lambda *args: pytest.fail("the model was run"))
    return model


def refused(model: PreTrainedModel, error: type[Exception], match: str, **kwargs) -> None:
    arguments = INPUTS | {"max_new_tokens": 4, "assistant": "prompt_lookup"} | kwargs
    with pytest.raises(error, match=match):
        model.generate(**arguments)


@pytest.mark.parametrize(
    ("ids", "error", "match"),
    [
        (IDS.tolist(), TypeError, r"`input_ids` must be a torch\.Tensor.*got list.*return_tensors='pt'"),
        (IDS.numpy(), TypeError, r"`input_ids` must be a torch\.Tensor.*got ndarray"),
        (dict(INPUTS), TypeError, r"`input_ids` must be a torch\.Tensor.*got dict.*generate\(\*\*encoding\)"),
        (IDS.float(), TypeError, r"`input_ids` must be token ids of dtype torch\.int64, got torch\.float32"),
        (IDS[:0], ValueError, r"`input_ids` is an empty batch \(shape \[0, 6\]\): pass at least one"),
        (IDS[:, :0].float(), ValueError, r"`input_ids` holds no tokens \(shape \[2, 0\]\): pass at least one per row"),
        (IDS[0], ValueError, r"`input_ids` must have shape \[batch, length\], got \[6\].*`input_ids\[None\]`"),
        (IDS[None], ValueError, r"`input_ids` must have shape \[batch, length\], got \[1, 2, 6\]"),
        (IDS + VOCAB_SIZE, ValueError, r"`input_ids` must lie in \[0, 40\), the model's vocabulary; got 40 to"),
        (IDS - 3, ValueError, r"`input_ids` must lie in \[0, 40\).*got -3 to"),
    ],
    ids=["list", "numpy", "encoding", "float", "empty", "no_tokens", "one_axis", "three_axes", "too_high", "negative"],
)
@pytest.mark.parametrize("name", ["input_ids", "inputs", "positional"])
def test_token_ids(model, ids, error, match, name):
    kwargs = {"max_new_tokens": 4, "assistant": "prompt_lookup"}
    if name == "input_ids":
        with pytest.raises(error, match=match):
            model.generate(input_ids=ids, **kwargs)
        return
    match = match.replace("`input_ids", "`inputs")
    with pytest.raises(error, match=match):
        model.generate(ids, **kwargs) if name == "positional" else model.generate(inputs=ids, **kwargs)


@pytest.mark.parametrize(
    ("mask", "error", "match"),
    [
        (MASK.tolist(), TypeError, r"`attention_mask` must be a torch\.Tensor.*got list"),
        (MASK[0], TypeError, r"`attention_mask` must be .* of shape \[batch, length\], got \[6\]"),
        (
            MASK[:, None, None],
            TypeError,
            r"`attention_mask` must be .* got \[2, 1, 1, 6\]",
        ),
        (MASK[:1], ValueError, r"`attention_mask` of shape \[1, 6\] does not fit `input_ids` of shape \[2, 6\]"),
        (MASK[:, 1:], ValueError, r"`attention_mask` of shape \[2, 5\] does not fit `input_ids` of shape \[2, 6\]"),
    ],
)
def test_attention_mask(model, mask, error, match):
    refused(model, error, match, attention_mask=mask)


@pytest.mark.parametrize(
    ("kwargs", "match"),
    [
        ({"num_beams": 2}, r"not beam search \(`num_beams=2`\)\. Leave `num_beams` out"),
        ({"num_beams": 2, "do_sample": True}, r"not beam sample \(`num_beams=2`\)"),
        ({"penalty_alpha": 0.6, "top_k": 4}, r"not contrastive search \(`penalty_alpha=0\.6`\)"),
        ({"use_cache": False}, r"`use_cache=False` cannot be served\. Leave it out"),
        ({"synced_gpus": True}, r"`synced_gpus=True`.* cannot be served.*Leave it out"),
        ({"cache_implementation": "paged"}, r"`cache_implementation='paged'` decodes without an assistant"),
        ({"prefill_chunk_size": 0}, r"`prefill_chunk_size` must be at least 1, got 0"),
        ({"prefill_chunk_size": -1}, r"`prefill_chunk_size` must be at least 1, got -1"),
        ({"token_healing": True}, r"`token_healing=True` cannot be served\. Heal the prompt first"),
        ({"assistant_ensemble_weight": 0.5}, r"`assistant_ensemble_weight` changes the output"),
        ({"assistant_confidence_threshold": 0.4}, r"`assistant_confidence_threshold=0\.4` has no effect.*Use"),
        ({"max_matching_ngram_size": 2}, r"`max_matching_ngram_size=2` has no effect.*max_ngram"),
        ({"num_assistant_tokens_schedule": "heuristic"}, r"`num_assistant_tokens_schedule='heuristic'` has no"),
    ],
)
def test_settings(model, kwargs, match):
    refused(model, ValueError, match, **kwargs)


@pytest.mark.parametrize("settings", [{"num_beams": 2}, {"use_cache": False}])
def test_settings_of_config_objects(model, settings):
    name = next(iter(settings))
    arguments = dict(INPUTS, assistant="prompt_lookup")
    with pytest.raises(ValueError, match=f"`{name}="):
        model.generate(**arguments, generation_config=GenerationConfig(max_new_tokens=4, **settings))
    for key, value in settings.items():
        setattr(model.generation_config, key, value)
    with pytest.raises(ValueError, match=f"`{name}="):
        model.generate(**arguments, max_new_tokens=4)


def test_the_remedy_for_a_models_default_works():
    model = hf_smartspec.enable(tiny_llama())
    model.generation_config.num_beams = 2
    expected = model.generate(**INPUTS, max_new_tokens=4, num_beams=1)
    actual = model.generate(**INPUTS, max_new_tokens=4, num_beams=1, assistant="prompt_lookup")
    assert torch.equal(actual, expected)


@pytest.mark.parametrize(
    "name", ["assistant_model", "prompt_lookup_num_tokens", "custom_generate", "use_mtp", "assistant_early_exit"]
)
def test_other_ways_of_decoding(model, draft, name):
    value = {"assistant_model": draft, "custom_generate": hf_smartspec.decode, "use_mtp": True}.get(name, 2)
    match = f"`{name}` and `assistant` both say how to decode: pass one of them"
    refused(model, ValueError, match, **{name: value})
    if name not in ("assistant_model", "custom_generate"):
        config = GenerationConfig(max_new_tokens=4)
        setattr(config, name, value)
        with pytest.raises(ValueError, match=match):
            model.generate(**INPUTS, generation_config=config, assistant="prompt_lookup")


def test_arguments_that_are_none_are_no_conflict():
    model = hf_smartspec.enable(tiny_llama())
    names = "assistant_model prompt_lookup_num_tokens custom_generate streamer stopping_criteria logits_processor"
    none = dict.fromkeys(
        [*names.split(), "generation_config", "tokenizer", "seed", "stop_strings", "num_assistant_tokens"]
    )
    expected = model.generate(**INPUTS, max_new_tokens=4)
    actual = model.generate(**INPUTS, max_new_tokens=4, assistant="prompt_lookup", **none)
    assert torch.equal(actual, expected)


class NeedsOutputs(PromptLookupCandidates):
    requires_model_outputs = True


def test_assistants(model, draft):
    other = tiny_llama(vocab_size=VOCAB_SIZE + 1)
    refused(model, ValueError, r"Unknown `assistant` preset 'fast'; known are \[", assistant="fast")
    for assistant in (3, 2.5, True, object(), torch.nn.Linear(2, 2), TreeCandidateGenerator, np.zeros(3)):
        refused(model, TypeError, r"`assistant` must be a preset name .*, got \w+", assistant=assistant)
    for assistant in (other, DraftModelCandidates(other), SmartSpecConfig(other)):
        match = r"draft model has a vocabulary of 41 tokens and the target one of 40.*`assistant='prompt_lookup'`"
        refused(model, ValueError, match, assistant=assistant)
    encoder_decoder = T5ForConditionalGeneration(T5Config(vocab_size=VOCAB_SIZE, d_model=8, d_ff=8, num_layers=1))
    refused(model, ValueError, r"T5ForConditionalGeneration cannot draft.*Use a draft", assistant=encoder_decoder)


@pytest.mark.parametrize(
    ("name", "match"),
    [
        ("sufix", r"Unknown `assistant` preset 'sufix': did you mean 'suffix'\? Known are \["),
        ("datastor:x", r"did you mean 'datastore:PATH'\?"),
        ("", r"The name of an `assistant` is empty: known presets are \["),
        ("./nope", r"`assistant='./nope'`: the path does not exist"),
        ("~/nope", r"`assistant='~/nope'`: the path does not exist"),
        ("/no/such/folder", r"`assistant='/no/such/folder'`: the path does not exist"),
        ("no/such", r"`assistant='no/such'` is neither a preset nor a folder that exists, and no draft model"),
    ],
)
def test_a_misspelt_preset_and_a_path_that_does_not_exist(model, name, match):
    refused(model, ValueError, match, assistant=name)


def test_configs(model, draft):
    for kwargs, error, match in [
        ({"verification": "always"}, ValueError, r"`verification` must be one of .*, got 'always'"),
        ({"num_nodes": -1}, ValueError, r"`num_nodes` must be an integer of at least 0.*got -1"),
        ({"num_nodes": 2.0}, ValueError, r"`num_nodes` must be an integer of at least 0.*got 2\.0"),
        ({"num_nodes": True}, ValueError, r"`num_nodes` must be an integer of at least 0.*got True"),
        ({"width": 0}, ValueError, r"`width` must be a positive integer, got 0"),
        ({"width": True}, ValueError, r"`width` must be a positive integer, got True"),
        ({"policy": 4}, TypeError, r"`policy` must be a LengthPolicy or a name, got int"),
        ({"assistant": SmartSpecConfig()}, TypeError, r"must not be a SmartSpecConfig itself"),
    ]:
        with pytest.raises(error, match=match):
            SmartSpecConfig(**kwargs)
    rejection = SmartSpecConfig("prompt_lookup", verification="rejection")
    refused(
        model, ValueError, r"`verification='rejection'` needs the draft's distributions.*draft", assistant=rejection
    )
    refused(model, ValueError, r"`num_nodes` must be .*got -3", num_assistant_tokens=-3)
    refused(
        model,
        ValueError,
        r"`num_assistant_tokens` has no effect on a SmartSpecConfig. Set its `num_nodes`",
        assistant=SmartSpecConfig(),
        num_assistant_tokens=3,
    )


@pytest.mark.parametrize("do_sample", [True, False])
@pytest.mark.parametrize("seed", ["7", 1.5, True, object(), [1, "2"], [1.0, 2.0], torch.tensor(3), [True, False]])
def test_seed_types(model, seed, do_sample):
    refused(model, TypeError, r"`seed` must be an integer or a sequence of integers", seed=seed, do_sample=do_sample)


def test_seed_lengths(model):
    for seed in ([], [1], [1, 2, 3]):
        match = f"`seed` must be one integer or one per row: got {len(seed)} for 2 rows"
        refused(model, ValueError, match, seed=seed, do_sample=True)


def test_python_call_errors(model):
    with pytest.raises(TypeError, match="multiple values for argument 'inputs'"):
        model.generate(IDS, inputs=IDS, assistant="prompt_lookup")
    with pytest.raises(TypeError, match="positional arguments"):
        model.generate(*[None] * 30, assistant="prompt_lookup")
    refused(model, TypeError, r"`generation_config` must be a GenerationConfig, got dict", generation_config={})
    refused(model, ValueError, "max_new_token", max_new_token=4)  # a typing error is caught by transformers


def test_both_names_of_the_prompt(model):
    with pytest.raises(ValueError, match="input_ids"):
        model.generate(IDS, input_ids=IDS, max_new_tokens=4, assistant="prompt_lookup")


def test_no_room_for_new_tokens(model):
    refused(model, ValueError, "`max_length` is set to 5", max_new_tokens=None, max_length=5)


def test_stop_strings_without_tokenizer(model):
    refused(model, ValueError, r"`stop_strings` need the model's tokenizer: pass `tokenizer=`", stop_strings="ab")


def test_the_callable_refuses_as_well(model):
    """`custom_generate=decode` does not pass through the patch."""
    for kwargs, error, match in [
        ({"num_beams": 2}, ValueError, "`num_beams=2`"),
        ({"use_cache": False}, ValueError, "`use_cache=False`"),
        ({"input_ids": IDS + VOCAB_SIZE}, ValueError, r"`input_ids` must lie in"),
        ({"attention_mask": MASK[:1]}, ValueError, "`attention_mask` of shape"),
        ({"assistant": "fast"}, ValueError, "Unknown `assistant` preset"),
        ({"seed": "7"}, TypeError, "`seed` must be"),
    ]:
        arguments = INPUTS | {"max_new_tokens": 4, "assistant": "prompt_lookup"} | kwargs
        with pytest.raises(error, match=match):
            tiny_llama().generate(**arguments, custom_generate=hf_smartspec.decode)


def test_the_encoder_is_not_run_either():
    config = T5Config(
        vocab_size=VOCAB_SIZE, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2, decoder_start_token_id=PAD
    )
    model = hf_smartspec.enable(T5ForConditionalGeneration(config))
    model.generation_config.update(pad_token_id=PAD, eos_token_id=EOS, bos_token_id=BOS)
    for module in (model, model.get_encoder()):
        module.register_forward_pre_hook(lambda *args: pytest.fail("the model was run"))
    for kwargs, error, match in [
        ({"num_beams": 2}, ValueError, "`num_beams=2`"),
        ({"use_cache": False}, ValueError, "`use_cache=False`"),
        ({"input_ids": IDS + VOCAB_SIZE}, ValueError, r"`input_ids` must lie in"),
        ({"seed": "7"}, TypeError, "`seed` must be"),
    ]:
        refused(model, error, match, **kwargs)


def test_the_streamer_is_not_fed_before_a_refusal(model):
    class Streamer:
        def put(self, value):
            pytest.fail("the streamer was fed")

        end = put

    refused(model, ValueError, "`num_beams=2`|streamer", streamer=Streamer(), num_beams=2)
    refused(model, TypeError, "`seed` must be", streamer=Streamer(), seed="7")
