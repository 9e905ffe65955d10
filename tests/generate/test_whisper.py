"""Whisper's own `generate`, with and without a draft: the plain tokens."""

import pytest
import torch
from transformers import GenerationConfig

import hf_smartspec
from hf_smartspec import PromptLookupCandidates, SmartSpecConfig

from ..covering import exhaustive
from ..models import new_model, noisy_model
from .helpers import Spy, both, tensors_of

pytestmark = pytest.mark.usefixtures("deprecated_by_itself")  # Whisper's `generate`


def speaking(model):
    """As Whisper's generation configs are."""
    settings = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 3, "max_length": 40}
    model.generation_config = GenerationConfig(**settings)
    more = {"no_timestamps_token_id": 80, "is_multilingual": False, "return_timestamps": False}
    for name, value in (more | {"suppress_tokens": [5, 6], "begin_suppress_tokens": [7]}).items():
        setattr(model.generation_config, name, value)
    return model


@pytest.mark.parametrize("num_frames", [40, 60], ids=["short", "long"])
@pytest.mark.parametrize("with_draft", [False, True], ids=["lookup", "draft"])
def test_whispers_own_loop(num_frames, with_draft):
    """Suppressed tokens, timestamps, and segment after segment of recordings longer than its window."""
    model = speaking(new_model("whisper"))
    assistant = SmartSpecConfig(noisy_model("whisper") if with_draft else "prompt_lookup", num_nodes=4)
    features = torch.randn(3, 8, num_frames, generator=torch.Generator().manual_seed(1))
    kwargs = {"input_features": features, "return_timestamps": True}
    if num_frames > 40:
        kwargs["attention_mask"] = torch.ones(3, num_frames, dtype=torch.long)
    plain, output = both(model, assistant, **kwargs)
    assert torch.equal(plain, output)
    with hf_smartspec.enabled(model):
        model.generate(**kwargs, assistant=assistant)
        assert model.smartspec_statistics.total.accepted_tokens > 0


RECORDING = {"attention_mask": torch.ones(3, 60, dtype=torch.long), "return_timestamps": True}
FALLBACK = {"temperature": (0.0, 0.6), "logprob_threshold": -0.1, "compression_ratio_threshold": 1.2}
WAYS = {
    "temperature fallback": (60, RECORDING | FALLBACK),
    "no speech": (60, RECORDING | FALLBACK | {"temperature": (0.0,), "no_speech_threshold": 0.2}),
    "text before": (60, RECORDING | {"condition_on_prev_tokens": True}),
    "segments": (60, RECORDING | {"return_segments": True}),
    "scores": (40, {"return_dict_in_generate": True, "output_scores": True}),
    "prompt": (40, {"prompt_ids": torch.tensor([10, 11, 12])}),
}


@pytest.mark.parametrize(
    "way", ["temperature fallback", "segments", "scores", "prompt", *exhaustive(["no speech"], ["text before"])]
)
def test_what_whispers_own_loop_looks_at(way):
    """It takes outputs apart entry by entry, and samples where the likeliest text is not good enough."""
    model, (num_frames, kwargs) = speaking(new_model("whisper")), WAYS[way]
    features = torch.randn(3, 8, num_frames, generator=torch.Generator().manual_seed(2))
    with hf_smartspec.enabled(model):
        plain = model.generate(features, **kwargs, seed=3)
        output = model.generate(features, **kwargs, seed=3, assistant=SmartSpecConfig("prompt_lookup", num_nodes=4))
    assert type(output) is type(plain)
    found = [list(tensors_of(item)) for item in (plain, output)]
    assert len(found[0]) == len(found[1]) > 0
    for ours, theirs in zip(found[1], found[0]):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


def test_whisper_with_a_default():
    """As pipelines need it, which name no assistant."""
    model = speaking(new_model("whisper"))
    features = torch.randn(2, 8, 100, generator=torch.Generator().manual_seed(2))
    kwargs = {"attention_mask": torch.ones(2, 100, dtype=torch.long), "return_timestamps": True}
    plain = model.generate(features, **kwargs)
    with hf_smartspec.enabled(model, noisy_model("whisper")):
        assert torch.equal(model.generate(features, **kwargs), plain)
        assert model.smartspec_statistics.total.accepted_tokens > 0
        assert model.smartspec_statistics.num_calls > 1


@pytest.mark.parametrize("as_default", [False, True])
def test_whisper_where_all_models_are_enabled(as_default):
    """Its own `generate` is called first, and hands the assistant on."""
    model = speaking(new_model("whisper"))
    features = torch.randn(3, 8, 40, generator=torch.Generator().manual_seed(2))
    plain = model.generate(features)
    spy = Spy(PromptLookupCandidates(max_ngram=1))
    with hf_smartspec.enabled(assistant=spy if as_default else None):
        output = model.generate(features, **({} if as_default else {"assistant": spy}))
    assert torch.equal(plain, output) and spy.drafted > 0
