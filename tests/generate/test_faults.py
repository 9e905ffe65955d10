"""
What is known to go wrong in assisted decoding, transformers' own first of all: state that leaks, models in training,
weights that change. (Criteria, stop strings and padding: see test_stopping; sources that misbehave: test_source_guard.)
"""

import copy
import logging
from contextlib import contextmanager

import pytest
import torch
from transformers import GenerationConfig, LogitsProcessorList
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator
from transformers.utils import logging as transformers_logging

import hf_smartspec

from .helpers import EOS, Spy, check_same, draft_source, noisy_copy, prompts, tiny_llama
from .test_source_guard import Faulty

BATCH = prompts([5, 9, 2, 7])
IDS, MASK = BATCH["input_ids"], BATCH["attention_mask"]


# What transformers refuses


@pytest.mark.parametrize("settings", [{}, {"do_sample": True, "num_return_sequences": 3}], ids=["batch", "sequences"])
def test_batches(model, draft, settings):
    """transformers: "assisted generate is only supported for batch_size = 1"."""
    spy = Spy(draft_source(model))
    with hf_smartspec.enabled(model):
        model.generate(**BATCH, **settings, max_new_tokens=16, seed=1, assistant=spy)
    assert spy.started == (12 if settings else 4) and spy.accepted > 0


def test_a_draft_with_its_own_generation_config(model):
    """transformers' draft inherits the target's settings and its own defaults take effect: here it only drafts."""
    draft = noisy_copy(model)
    draft.generation_config.update(
        repetition_penalty=3.0, num_beams=4, do_sample=True, max_new_tokens=1, stop_strings=["a"], eos_token_id=[3, 4]
    )
    check_same(model, BATCH | {"max_new_tokens": 16}, source=hf_smartspec.DraftModelCandidates(draft))


# State that leaks


def snapshot(model):
    modules = [getattr(module, "config", None) for module in model.modules()]
    return {
        "generation_config": copy.deepcopy(vars(model.generation_config)),
        "as_dict": model.generation_config.to_dict(),
        "config": model.config.to_dict(),
        "attention": [config._attn_implementation for config in modules if config is not None],
        "attributes": set(vars(model)),
        "training": [module.training for module in model.modules()],
        "hooks": [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()],
        "weights": {name: tensor.clone() for name, tensor in model.state_dict().items()},
        "gradients": [parameter.requires_grad for parameter in model.parameters()],
    }


def assert_same_state(before, after):
    for name in before.keys() - {"weights"}:
        assert before[name] == after[name], name
    assert all(torch.equal(tensor, after["weights"][name]) for name, tensor in before["weights"].items())


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("raises", [False, True])
def test_target_and_draft_are_left_as_they_were(model, draft, implementation, raises):
    for one in (model, draft):
        one.set_attn_implementation(implementation)
    draft.generation_config.num_assistant_tokens_schedule = "heuristic"
    before = snapshot(model), snapshot(draft)

    def processor(ids, scores):
        if raises and ids.shape[1] > IDS.shape[1] + 4:
            raise KeyError("the user's own")
        return scores

    with hf_smartspec.enabled(model):
        for do_sample in (False, True):
            kwargs = {"do_sample": do_sample, "max_new_tokens": 12, "logits_processor": [processor]}
            if raises:
                with pytest.raises(KeyError):
                    model.generate(**BATCH, **kwargs, assistant=draft)
            else:
                model.generate(**BATCH, **kwargs, assistant=draft, num_assistant_tokens=3)
    for one in (model, draft):
        hf_smartspec.disable(one)
    for one, state in zip((model, draft), before):
        assert_same_state(state, snapshot(one))
    assert torch.equal(model.generate(**BATCH, max_new_tokens=8), tiny_llama().generate(**BATCH, max_new_tokens=8))


@pytest.mark.parametrize("where", ["target", "draft"])
def test_an_error_within_a_forward_leaves_the_attention_as_it_was(model, draft, where):
    failing = model if where == "target" else draft
    calls = []

    def fail(*args):
        calls.append(args)
        if len(calls) == 3:
            raise MemoryError("no memory")

    handle = failing.model.layers[1].register_forward_pre_hook(fail)
    before = snapshot(model), snapshot(draft)
    with hf_smartspec.enabled(model):
        kwargs = BATCH | {"max_new_tokens": 12, "assistant": draft}
        if where == "target":
            with pytest.raises(MemoryError):
                model.generate(**kwargs)
        else:  # a draft that fails costs its drafts, nothing more
            handle_output = model.generate(**kwargs)
    for one in (model, draft):
        hf_smartspec.disable(one)
    for one, state in zip((model, draft), before):
        assert_same_state(state, snapshot(one))
    handle.remove()
    expected = model.generate(**BATCH, max_new_tokens=12)
    if where == "draft":
        assert torch.equal(handle_output, expected)
    check_same(model, BATCH | {"max_new_tokens": 12}, source=hf_smartspec.DraftModelCandidates(draft))


def test_the_callers_config_object_is_unchanged(model, draft, tokenizer):
    config = GenerationConfig(
        max_new_tokens=8, num_assistant_tokens=3, stop_strings=["ab"], bad_words_ids=[[5]], eos_token_id=[EOS, 7]
    )
    before, as_dict = copy.deepcopy(vars(config)), config.to_dict()
    with hf_smartspec.enabled(model):
        for assistant in (draft, "prompt_lookup"):
            model.generate(**BATCH, generation_config=config, tokenizer=tokenizer, assistant=assistant)
            with pytest.raises(ValueError):
                model.generate(**BATCH, generation_config=config, assistant=assistant)
    assert vars(config) == before and config.to_dict() == as_dict


# Models in training, weights that change


def test_training_mode_with_dropout_is_served_plainly():
    model = tiny_llama(attention_dropout=0.2).train()
    spy = Spy(draft_source(model))
    hf_smartspec.enable(model)
    torch.manual_seed(5)
    expected = model.generate(**BATCH, max_new_tokens=10)
    torch.manual_seed(5)
    assert torch.equal(model.generate(**BATCH, max_new_tokens=10, assistant=spy), expected)
    assert spy.started == 0 and model.training
    model.eval()
    check_same(model, BATCH | {"max_new_tokens": 10})


def test_training_mode_with_dropout_modules_is_served_plainly():
    model = tiny_llama()
    model.lm_head = torch.nn.Sequential(torch.nn.Dropout(0.1), model.lm_head)
    spy = Spy(draft_source(model))
    with hf_smartspec.enabled(model):
        model.train().generate(**BATCH, max_new_tokens=5, assistant=spy)
    assert spy.started == 0


def test_training_mode_without_dropout_is_served(model):
    """As TRL calls `generate`: under `no_grad`, with `model.training`, between two steps of the optimiser."""
    model.train()
    with torch.no_grad():
        check_same(model, BATCH | {"generation_config": GenerationConfig(max_new_tokens=16)})
    assert model.training


@pytest.mark.filterwarnings("ignore::FutureWarning")  # later versions of transformers rename the method
def test_gradient_checkpointing_is_served_plainly(model, hush):
    model.gradient_checkpointing_enable()
    model.train()
    spy = Spy(draft_source(model))
    expected = model.generate(**BATCH, max_new_tokens=8)
    with hf_smartspec.enabled(model):
        assert torch.equal(model.generate(**BATCH, max_new_tokens=8, assistant=spy), expected)
    model.eval()
    check_same(model, BATCH | {"max_new_tokens": 8})


def test_a_draft_in_training_mode(model):
    """Its dropout may spoil the drafts, never the output."""
    draft = noisy_copy(tiny_llama(attention_dropout=0.5)).train()
    expected = model.generate(**BATCH, max_new_tokens=16)
    spy = Spy(hf_smartspec.DraftModelCandidates(draft))
    with hf_smartspec.enabled(model):
        assert torch.equal(model.generate(**BATCH, max_new_tokens=16, assistant=spy), expected)
    assert spy.drafted > 0 and draft.training


@pytest.mark.parametrize("changes", ["target", "draft", "both"])
def test_weights_that_change_between_two_calls(model, changes):
    """Reinforcement learning does that: neither keys and values nor drafts of the old weights may survive."""
    draft = noisy_copy(model)
    source = hf_smartspec.DraftModelCandidates(draft)
    spy = Spy(source)
    hf_smartspec.enable(model)
    model.generate(**BATCH, max_new_tokens=16, assistant=spy)
    generator = torch.Generator().manual_seed(8)
    with torch.no_grad():
        for parameters in zip(model.parameters(), draft.parameters()):
            step = 0.3 * torch.randn(parameters[0].shape, generator=generator)
            for parameter, name in zip(parameters, ("target", "draft")):
                if changes in (name, "both"):
                    parameter += step
    spy.accepted = 0
    expected = model.generate(**BATCH, max_new_tokens=16)
    assert torch.equal(model.generate(**BATCH, max_new_tokens=16, assistant=spy), expected)
    assert (spy.accepted > 0) or changes != "both"


def test_weights_on_which_a_gradient_is_taken(model):
    """A training step between two calls works: nothing of inference mode has stuck to the parameters."""
    hf_smartspec.enable(model)
    draft = noisy_copy(model)
    for _ in range(2):
        output = model.generate(**BATCH, max_new_tokens=6, assistant=draft)
        model.zero_grad()
        loss = model(output, labels=output).loss
        loss.backward()
        assert all(parameter.grad is not None for parameter in model.parameters() if parameter.requires_grad)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad
        assert torch.equal(output[:, : IDS.shape[1]], IDS)


@pytest.mark.parametrize("context", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_grad_modes(model, context):
    with context():
        check_same(model, BATCH | {"max_new_tokens": 12})
        check_same(
            model,
            BATCH | {"max_new_tokens": 12, "do_sample": True},
            seed=3,
            reference=lambda: (
                BATCH | {"max_new_tokens": 12, "logits_processor": [hf_smartspec.SeededGumbelLogitsProcessor(3)]}
            ),
        )
    expected = model.generate(**BATCH, max_new_tokens=6)
    with hf_smartspec.enabled(model):  # the parameters are usable outside afterwards
        assert torch.equal(model.generate(**BATCH, max_new_tokens=6, assistant="prompt_lookup"), expected)


# What is not served is said


@contextmanager
def logging_not_configured():
    """As in a program that has not set logging up. No fixture: pytest adds its handlers after those have run."""
    transformers_logging.warning_once.cache_clear()
    root = logging.getLogger()
    handlers, root.handlers = root.handlers, []
    try:
        yield
    finally:
        root.handlers = handlers


def test_plain_serving_is_announced_once(model, capsys):
    """A draft that is loaded and does nothing, without a hint, costs somebody a day."""
    kwargs = BATCH | {"max_new_tokens": 3, "output_hidden_states": True, "return_dict_in_generate": True}
    with hf_smartspec.enabled(model), logging_not_configured():
        for _ in range(2):
            model.generate(**kwargs, assistant="prompt_lookup")
    text = capsys.readouterr().err
    assert text.count("Decoding without speculation: attentions and hidden states are returned step by step") == 1


def test_a_failing_source_is_announced_once_per_call(model, capsys):
    known = model.generate(**BATCH, max_new_tokens=12)
    with hf_smartspec.enabled(model), logging_not_configured():
        for _ in range(2):
            model.generate(**BATCH, max_new_tokens=12, assistant=Faulty(known, "all"))
    text = capsys.readouterr().err
    assert text.count("Faulty failed and was dropped") == 2 and "RuntimeError('all')" in text


def test_nothing_is_said_where_all_is_well(model, capsys):
    with logging_not_configured():
        check_same(model, BATCH | {"max_new_tokens": 12})
    captured = capsys.readouterr()
    assert captured.err == captured.out == ""


# transformers' own candidate generators


def test_candidate_generators_of_transformers(model):
    """They know one sequence; each row gets a copy."""
    generator = PromptLookupCandidateGenerator(num_output_tokens=4, max_matching_ngram_size=2, max_length=10**6)
    repeating = {"input_ids": IDS[:, -2:].repeat(1, 6)}
    model.generation_config.eos_token_id = None
    expected = model.generate(**repeating, max_new_tokens=40)
    with hf_smartspec.enabled(model):
        output = model.generate(**repeating, max_new_tokens=40, assistant=generator, return_dict_in_generate=True)
    assert torch.equal(output.sequences, expected)
    assert output.statistics.drafted_tokens > 0


def test_our_sources_in_transformers_assisted_decoding(model, hush, monkeypatch):
    """The other way round: a tree source is a `CandidateGenerator` too, and drafts its best chain."""
    source = Spy(draft_source(model, num_nodes=6, width=2))
    inputs = prompts([7])
    expected = model.generate(**inputs, max_new_tokens=20)
    monkeypatch.setattr(model, "_get_candidate_generator", lambda *args, **kwargs: source)
    output = model.generate(**inputs, max_new_tokens=20, assistant_model=noisy_copy(model))
    assert torch.equal(output, expected)
    assert source.accepted > 0


def test_processors_lists_are_not_shared_between_calls(model):
    processors = LogitsProcessorList()
    with hf_smartspec.enabled(model):
        for _ in range(2):
            model.generate(
                **BATCH, max_new_tokens=4, repetition_penalty=1.5, logits_processor=processors, assistant="none"
            )
    assert len(processors) == 0
