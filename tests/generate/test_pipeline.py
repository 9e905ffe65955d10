"""Callers of `generate` that know nothing of us: pipelines, wrappers, and kinds of models around the model."""

import pytest
import torch
from transformers import GenerationConfig, GenerationMixin, pipeline

import hf_smartspec
from hf_smartspec import SmartSpecConfig
from hf_smartspec.target_model.compat import CACHE

from .helpers import EOS, Spy, draft_source, noisy_copy, prompts, tiny_llama

TEXTS = ["abcabcabc", "hello", "zyxwvut", "thequickbrownfox"]


@pytest.fixture
def generator(model, tokenizer):
    model.generation_config.eos_token_id = [EOS, 8]
    return pipeline("text-generation", model=hf_smartspec.enable(model), tokenizer=tokenizer, device="cpu")


@pytest.mark.parametrize("batch_size", [1, 2, 3])
@pytest.mark.parametrize("inputs", [TEXTS, TEXTS[0]], ids=["list", "text"])
def test_greedy_pipeline(generator, model, inputs, batch_size):
    kwargs = {"do_sample": False, "max_new_tokens": 16, "batch_size": batch_size}
    expected = generator(inputs, **kwargs)
    spy = Spy(draft_source(model))
    assert generator(inputs, **kwargs, assistant=spy) == expected
    assert spy.accepted > 0 and spy.started == spy.stopped == (4 if inputs is TEXTS else 1)


def test_pipeline_without_batches_needs_no_padding_token(generator, model):
    generator.tokenizer.pad_token = None
    expected = generator(TEXTS, do_sample=False, max_new_tokens=9)
    assert generator(TEXTS, do_sample=False, max_new_tokens=9, assistant=noisy_copy(model)) == expected
    generator.tokenizer.pad_token = "<pad>"


def test_sampling_pipeline(generator, model):
    """Pipelines sample by default (`do_sample=True, temperature=0.7`)."""
    kwargs = {"max_new_tokens": 16, "batch_size": 2}
    outputs = []
    for assistant in (noisy_copy(model), "prompt_lookup", "none"):
        torch.manual_seed(4)
        outputs.append(generator(TEXTS, **kwargs, assistant=assistant))
    assert outputs[0] == outputs[1] == outputs[2]
    assert generator(TEXTS, **kwargs, seed=1, assistant="none") == generator(
        TEXTS, **kwargs, seed=1, assistant=noisy_copy(model)
    )
    assert generator(TEXTS, **kwargs, seed=2, assistant="none") != outputs[0]
    sequences = generator(TEXTS, **kwargs, num_return_sequences=3, assistant=noisy_copy(model))
    assert [len(item) for item in sequences] == [3] * 4


def test_pipeline_options(generator, model):
    for options in (
        {"return_full_text": False},
        {"stop_sequence": generator(TEXTS[0], do_sample=False, max_new_tokens=6)[0]["generated_text"][-2:]},
        {"generation_config": GenerationConfig(max_new_tokens=9, do_sample=False)},
        {"prefix": "ab"},
        {"return_tensors": True},
    ):
        kwargs = {} if "generation_config" in options else {"do_sample": False, "max_new_tokens": 12}
        expected = generator(TEXTS, batch_size=2, **kwargs, **options)
        spy = Spy(draft_source(model))
        actual = generator(TEXTS, batch_size=2, **kwargs, **options, assistant=spy)
        assert str(actual) == str(expected), options
        assert spy.drafted > 0


def test_an_assistant_for_every_call_of_a_pipeline(model, tokenizer):
    """`assistant=` given at construction, as pipelines keep other arguments of `generate`."""
    spy = Spy(draft_source(model))
    generator = pipeline(
        "text-generation", model=hf_smartspec.enable(model), tokenizer=tokenizer, device="cpu", assistant=spy
    )
    plain = pipeline("text-generation", model=model, tokenizer=tokenizer, device="cpu")
    kwargs = {"do_sample": False, "max_new_tokens": 12}
    assert generator(TEXTS, **kwargs) == plain(TEXTS, **kwargs)
    assert spy.accepted > 0


def test_pipeline_with_the_global_patch(model, tokenizer):
    generator = pipeline("text-generation", model=model, tokenizer=tokenizer, device="cpu")
    kwargs = {"do_sample": False, "max_new_tokens": 12}
    expected = generator(TEXTS, **kwargs)
    spy = Spy(draft_source(model))
    with hf_smartspec.enable():
        assert generator(TEXTS, **kwargs, batch_size=2, assistant=spy) == expected
    assert spy.accepted > 0


class PromptTuned(torch.nn.Module):
    """As PEFT's wrapper of a prompt-learning adapter: it changes what the model inside is fed."""

    def __init__(self, base_model):
        super().__init__()
        self.base_model = base_model
        self.active_peft_config = type("Config", (), {"is_prompt_learning": True})()
        self.soft_prompt = torch.nn.Parameter(torch.randn(1, 3, base_model.config.hidden_size))

    def get_base_model(self):
        return self.base_model

    def prepare_inputs_for_generation(self, input_ids, *args, attention_mask=None, **kwargs):
        prepare = type(self.base_model).prepare_inputs_for_generation
        inputs = prepare(self.base_model, input_ids, *args, **kwargs)
        inputs = {name: inputs[name] for name in ("input_ids", CACHE, "use_cache") if name in inputs}
        if kwargs[CACHE].get_seq_length() == 0:
            embeds = self.base_model.get_input_embeddings()(inputs.pop("input_ids"))
            inputs["inputs_embeds"] = torch.cat([self.soft_prompt.expand(len(embeds), -1, -1), embeds], dim=1)
        return inputs

    def generate(self, *args, **kwargs):
        self.base_model.prepare_inputs_for_generation = self.prepare_inputs_for_generation
        try:
            return self.base_model.generate(*args, **kwargs)
        finally:
            del self.base_model.prepare_inputs_for_generation


def test_prompt_learning_is_served_plainly(model):
    """A soft prompt that the packed forward does not see must not be lost."""
    tuned = hf_smartspec.enable(PromptTuned(model))
    inputs = {"input_ids": prompts([6, 6])["input_ids"], "max_new_tokens": 10}
    expected = tuned.generate(**inputs)
    assert not torch.equal(expected, model.generate(**inputs))
    for assistant in ("prompt_lookup", noisy_copy(model)):
        assert torch.equal(tuned.generate(**inputs, assistant=assistant), expected)


class Adapter(PromptTuned):
    """As PEFT's wrapper of a LoRA: it passes inputs on as they are."""

    def __init__(self, base_model):
        super().__init__(base_model)
        self.active_peft_config.is_prompt_learning = False

    def prepare_inputs_for_generation(self, *args, **kwargs):
        return type(self.base_model).prepare_inputs_for_generation(self.base_model, *args, **kwargs)


def test_adapters_in_the_weights_are_speculated_for(model):
    adapter = hf_smartspec.enable(Adapter(model))
    inputs = prompts([6, 4]) | {"max_new_tokens": 16, "return_dict_in_generate": True}
    output = model.generate(**inputs, assistant=Adapter(noisy_copy(model)))  # a draft may be wrapped as well
    assert torch.equal(output.sequences, model.generate(**inputs).sequences)
    assert output.statistics.accepted_tokens > 0
    inputs.pop("return_dict_in_generate")
    spy = Spy(draft_source(model))
    assert torch.equal(adapter.generate(**inputs, assistant=spy), adapter.generate(**inputs))
    assert spy.accepted > 0


class Shifting(type(tiny_llama())):
    """A model of a user's own that prepares its inputs in its own way."""

    def prepare_inputs_for_generation(self, input_ids, **kwargs):
        inputs = super().prepare_inputs_for_generation(input_ids, **kwargs)
        inputs["input_ids"] = (inputs["input_ids"] + 1) % self.config.vocab_size
        return inputs


def test_models_with_inputs_of_their_own_keep_them(model):
    shifting = Shifting(model.config).eval()
    shifting.load_state_dict(model.state_dict())
    inputs = prompts([6, 6]) | {"max_new_tokens": 10}
    expected = shifting.generate(**inputs)
    assert not torch.equal(expected, model.generate(**inputs))
    with hf_smartspec.enabled():
        output = shifting.generate(**inputs, assistant=noisy_copy(model))
    assert torch.equal(output, expected)


def test_enabled_drafts_and_targets_in_one_config(model):
    """A config object with a model in it may be used again and again."""
    config = SmartSpecConfig(noisy_copy(model), num_nodes=4, width=2)
    with hf_smartspec.enabled():
        for seed in range(3):
            inputs = prompts([4, 6], seed) | {"max_new_tokens": 12}
            output = model.generate(**inputs, assistant=config, return_dict_in_generate=True)
            assert torch.equal(output.sequences, model.generate(**inputs))
            assert output.statistics.drafted_tokens > 0
    assert GenerationMixin.generate.__module__.startswith("transformers")
