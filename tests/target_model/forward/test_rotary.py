"""Rotary embeddings that depend on the length of the text: the plain tokens on both sides of the border, and across."""

import pytest
import torch
from transformers import LogitsProcessorList
from transformers.generation.logits_process import TemperatureLogitsWarper

import hf_smartspec
from hf_smartspec import Engine, PromptLookupCandidates, SeededGumbelLogitsProcessor
from hf_smartspec.target_model.compat import CACHE
from hf_smartspec.target_model.forward.packed import PackedForward
from hf_smartspec.target_model.forward.rotary import forget_lengths, lengthwise_modules
from hf_smartspec.target_model.forward.rowwise import RowwiseForward
from hf_smartspec.target_model.support.capabilities import can_pack

from ...cases import left_padded, prompts_of
from ...covering import part_of
from ...models import new_model
from ...serving.helpers import TIMEOUT
from ...sources import Oracle, Recording, WithDecoys, Wrong

BORDER, NEW = 32, 40
_LONG = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0] * 4,
    "long_factor": [3.0, 4.0, 5.0, 9.0],
    "original_max_position_embeddings": BORDER,
}
_DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
_LAYERS: dict = {"sliding_attention": {"rope_type": "default", "rope_theta": 1e3}, "full_attention": _DYNAMIC}
_PHI = {"max_position_embeddings": 128, "original_max_position_embeddings": BORDER}
MODELS: dict[str, tuple[str, dict]] = {
    "llama dynamic": ("llama", {"max_position_embeddings": BORDER, "rope_parameters": _DYNAMIC}),
    "llama longrope": ("llama", {"max_position_embeddings": 128, "rope_parameters": _LONG | {"factor": 4.0}}),
    "phi3 longrope": ("phi3", _PHI | {"rope_parameters": _LONG}),
    "phimoe longrope": (
        "phimoe",
        {"max_position_embeddings": 128, "rope_parameters": _LONG | {"short_mscale": 1.1, "long_mscale": 1.4}},
    ),
    "gemma3 dynamic in some layers": ("gemma3_text", {"max_position_embeddings": BORDER, "rope_parameters": _LAYERS}),
    "falcon dynamic": ("falcon", {"max_position_embeddings": BORDER, "rope_parameters": _DYNAMIC, "alibi": False}),
}
# Prompts' lengths: before the border, up to it, behind it, and ragged, so that rows cross it at different tokens.
LENGTHS = [(12,), (32,), (10, 20), (5, 40), (30, 33, 31)]
# One that is packed with each kind of frequencies, and one that is not; `test_texts_cross_the_border` has all.
FEW = part_of(MODELS, "llama dynamic", "phi3 longrope", "falcon dynamic")
PACKED = part_of(["llama longrope", "phi3 longrope", "llama dynamic"], "phi3 longrope", "llama dynamic")
SOURCES: dict = {
    "none": lambda texts: "none",
    "lookup": lambda texts: "prompt_lookup",
    "chain": Oracle,
    "tree": lambda texts: WithDecoys(Oracle(texts), seed=0),
    "wrong": lambda texts: Wrong(texts, seed=0, is_tree=True),
}


def model_of(name: str):
    architecture, changes = MODELS[name]
    return new_model(architecture, **changes)


def plain(model, inputs, **arguments) -> torch.Tensor:
    forget_lengths(model)  # what an earlier text has left in dynamic frequencies is no part of the reference
    output = model.generate(**inputs, max_new_tokens=NEW, **arguments)
    forget_lengths(model)
    return output


def texts_of(sequences: torch.Tensor, prompts) -> list[list[int]]:
    return [prompt + ids[-NEW:].tolist() for prompt, ids in zip(prompts, sequences)]


def speculate(model, inputs, source, **arguments):
    with hf_smartspec.enabled(model):
        return model.generate(**inputs, max_new_tokens=NEW, **arguments, assistant=source, return_dict_in_generate=True)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_texts_cross_the_border_with_the_plain_tokens(name, lengths):
    model, prompts = model_of(name), prompts_of(lengths)
    inputs = left_padded(prompts)
    expected = plain(model, inputs)
    for kind in SOURCES if len(lengths) > 1 else ("lookup", "tree"):
        source = SOURCES[kind]
        output = speculate(model, inputs, source(texts_of(expected, prompts)))
        assert torch.equal(output.sequences, expected), kind
        if kind in ("chain", "tree"):
            assert output.statistics.accepted_tokens > 20 * len(prompts), kind
        if kind == "lookup":
            assert output.statistics.drafted_tokens > 0


@pytest.mark.parametrize("name", FEW)
def test_sampled_rows_that_end_at_different_tokens(name):
    """Finished rows run on in plain decoding, so that its lengths go on growing."""
    model, prompts = model_of(name), prompts_of((10, 20, 27))
    inputs = left_padded(prompts) | {"eos_token_id": list(range(40, 48))}
    noise = LogitsProcessorList([TemperatureLogitsWarper(0.8), SeededGumbelLogitsProcessor(3)])
    expected = plain(model, inputs, logits_processor=noise)
    sampling = {"do_sample": True, "temperature": 0.8, "top_k": 0, "top_p": 1.0, "seed": 3}
    output = speculate(model, inputs, PromptLookupCandidates(max_ngram=1), **sampling)
    assert torch.equal(output.sequences, expected) and output.statistics.drafted_tokens > 0


@pytest.mark.parametrize("name", PACKED)
def test_a_batch_that_is_padded_all_over(name):
    """Phi-3 goes by the width of the padded batch where it begins anew, its frequencies by the longest text."""
    model, prompts = model_of(name), prompts_of((10, 20))
    inputs = {key: torch.nn.functional.pad(value, (5, 0)) for key, value in left_padded(prompts).items()}
    expected = plain(model, inputs)
    for kind, source in SOURCES.items():
        output = speculate(model, inputs, source(texts_of(expected, prompts)))
        assert torch.equal(output.sequences, expected), kind


@pytest.mark.parametrize("name", FEW)
def test_scores_and_cache_of_finished_rows(name):
    """Plain decoding feeds finished rows padding, across the border too, and returns what comes of it."""
    model, prompts = model_of(name), prompts_of((10, 20))
    inputs = left_padded(prompts)
    first = plain(model, inputs)
    short, long = first[:, -NEW:].tolist()
    eos = max(short, key=lambda token: [*long, token].index(token) - short.index(token))  # ends the first row first
    wanted = {"eos_token_id": eos, "output_logits": True, "return_dict_in_generate": True}
    expected = plain(model, inputs, **wanted)
    wanted.pop("return_dict_in_generate")
    actual = speculate(model, inputs, Oracle(texts_of(expected.sequences, prompts)), **wanted)
    assert torch.equal(actual.sequences, expected.sequences) and len(actual.logits) == len(expected.logits)
    for one, other in zip(actual.logits, expected.logits):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)
    if not name.startswith("falcon"):
        for one, other in zip(actual[CACHE].layers, expected[CACHE].layers):
            width = min(one.keys.shape[2], other.keys.shape[2])
            rows = inputs["attention_mask"].bool().all(dim=1)  # padding is not kept
            torch.testing.assert_close(one.keys[rows, :, -width:], other.keys[rows, :, -width:], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", FEW)
@pytest.mark.parametrize("length", [20, 31, 34])
def test_going_on_from_a_cache(name, length):
    model, (prompt,) = model_of(name), prompts_of((length,))
    texts = []
    for source in (None, "prompt_lookup"):
        forget_lengths(model)
        begun = model.generate(torch.tensor([prompt]), max_new_tokens=8, return_dict_in_generate=True)
        inputs = {"input_ids": torch.cat([begun.sequences, torch.tensor([[5, 6, 7]])], dim=1)}
        inputs[CACHE] = begun[CACHE]
        forget_lengths(model)
        if source is None:
            texts.append(model.generate(**inputs, max_new_tokens=20))
        else:
            texts.append(speculate(model, inputs, source).sequences[:, : texts[0].shape[1]])
    assert torch.equal(*texts)


@pytest.mark.parametrize("name", PACKED)
def test_prompts_that_are_fed_in_chunks_behind_the_border_are_decoded_plainly(name):
    model, prompts = model_of(name), prompts_of((40, 45))
    inputs = left_padded(prompts)
    expected = plain(model, inputs, prefill_chunk_size=16)
    recording = Recording(Oracle(texts_of(expected, prompts)))
    forget_lengths(model)
    output = speculate(model, inputs, recording, prefill_chunk_size=16)
    assert torch.equal(output.sequences, expected) and recording.num_asked == 0


@pytest.mark.parametrize("name", PACKED)
def test_an_engine_serves_every_request_as_it_would_be_alone(name):
    """Prompts that begin alike share memory only where its keys are those of their own lengths."""
    model = model_of(name)
    start = prompts_of((16,))[0]
    prompts = [start + [9] * 3, start + [7] * 2, start + [8] * 30, start * 2 + [3] * 8, [*start, 5]]
    expected = [plain(model, {"input_ids": torch.tensor([prompt])})[0, len(prompt) :].tolist() for prompt in prompts]
    with Engine(model, assistant="prompt_lookup", max_batch_size=2, max_prefill_tokens=7) as engine:
        names = [engine.add_request(prompt, max_new_tokens=NEW) for prompt in prompts]
        assert [engine.get_result(name, timeout=TIMEOUT).generated_tokens for name in names] == expected
        assert engine.report() is not None


@pytest.mark.parametrize("name", FEW)
def test_modules_are_left_as_they_were(name):
    model, prompts = model_of(name), prompts_of((20, 30))
    modules = lengthwise_modules(model)
    assert modules
    with hf_smartspec.enabled(model):
        model.generate(**left_padded(prompts), max_new_tokens=NEW, assistant="prompt_lookup")
    for module in modules:
        assert "forward" not in vars(module)


@pytest.mark.parametrize("name", FEW)
def test_these_models_are_not_decoded_plainly(name, monkeypatch):
    model, prompts = model_of(name), prompts_of((20, 30))
    kind = RowwiseForward if name.startswith("falcon") else PackedForward
    assert can_pack(model) == (kind is PackedForward)
    calls = []
    forward = kind.forward
    monkeypatch.setattr(kind, "forward", lambda self, inputs: calls.append(self) or forward(self, inputs))
    speculate(model, left_padded(prompts), "prompt_lookup")
    assert calls


@pytest.mark.parametrize("name", FEW)
def test_the_border_matters_in_these_tests(name):
    """Frequencies that did not change would pass every comparison above."""
    model, prompts = model_of(name), prompts_of((BORDER + 8,))
    text = torch.tensor(prompts)
    forget_lengths(model)
    short = model(input_ids=text[:, :BORDER]).logits
    long = model(input_ids=text).logits[:, :BORDER]
    assert (long - short).abs().max() > 0.02 * short.std()


def test_seeds_mean_the_same_whatever_was_decoded_before():
    """Dynamic frequencies remember the longest text: without an assistant, too, the same seed gives the same tokens."""
    model = model_of("llama dynamic")
    prompt = left_padded(prompts_of((BORDER + 8,)))
    sampling = {"do_sample": True, "seed": 5, "eos_token_id": None}
    with hf_smartspec.enabled(model):
        first = model.generate(**prompt, **sampling, max_new_tokens=10)
        model.generate(**prompt, **sampling, max_new_tokens=NEW)
        assert torch.equal(model.generate(**prompt, **sampling, max_new_tokens=10), first)
        assert torch.equal(model.generate(**prompt, **sampling, max_new_tokens=10, assistant="none"), first)
