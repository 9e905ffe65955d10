"""Every causal language model of transformers, small, with all of its borders within a few tokens."""

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig, LogitsProcessorList, PreTrainedModel
from transformers.generation.logits_process import TemperatureLogitsWarper
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import hf_smartspec
from hf_smartspec import PromptLookupCandidates, SeededGumbelLogitsProcessor, SmartSpecConfig
from hf_smartspec.prepare import call as prepare_call
from hf_smartspec.target_model.forward.rotary import forget_lengths
from hf_smartspec.target_model.support.twin import sharpened, small_config

from .cases import left_padded, prompts_of
from .sources import Oracle, Recording, WithDecoys

NAMES = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
NEW = 26
PROMPTS = {"one row": (12,), "ragged rows": (5, 14)}

# Sizes that depend on one another in ways of their own.
CHANGES: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1]},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1},
    "dots3_note_text": {"swa_head_dim": 16},
    "gemma3n_text": {"vocab_size_per_layer_input": 97, "hidden_size_per_layer_input": 8},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "minimax_m3_vl_text": {"layer_types": ["full_attention", "minimax_m3_sparse"]},
    "reformer": {"is_decoder": True, "axial_pos_embds_dim": [16, 16], "axial_pos_shape": [16, 32]},
    "xmod": {"default_language": "en_XX"},
}
# As few as have every way to be served: these are part of every run.
REPRESENTATIVE = ("gemma4_text", "deepseek_v32", "minimax_m3_vl_text", "lfm2_moe", "qwen3_5_text", "whisper")


@dataclass
class Served:
    """How one architecture was served, and what of its tokens."""

    routes: dict[str, str] = field(default_factory=dict)
    drafted: int = 0
    accepted: int = 0
    differences: list[str] = field(default_factory=list)


def small_model(name: str) -> PreTrainedModel:
    """Skips where it cannot be built, or cannot generate by itself."""
    torch.manual_seed(0)
    try:
        whole = CONFIG_MAPPING[name]()
        decodes = {"is_decoder": True} if hasattr(whole, "is_decoder") else {}
        config = small_config(whole, **decodes | CHANGES.get(name, {}))
        with torch.device("meta"):
            size = sum(parameter.numel() for parameter in AutoModelForCausalLM.from_config(config).parameters())
        if size > 5e6:
            pytest.skip(f"{name} cannot be made small: {size / 1e6:.0f} M parameters")
        model = sharpened(AutoModelForCausalLM.from_config(config).eval().requires_grad_(False))
        model.generation_config = GenerationConfig(pad_token_id=0, bos_token_id=1)
        model.generate(**left_padded([[5, 6, 7], [8]]), max_new_tokens=3, do_sample=False)
    except Exception as error:
        pytest.skip(f"{name} cannot be made small, or cannot generate: {error!r}"[:200])
    return model


def serve(model: PreTrainedModel, monkeypatch) -> Served:
    """Decodes with and without drafts, past every border, and compares."""
    served = Served()
    routes: list = []
    route_of = prepare_call.route_of
    monkeypatch.setattr(prepare_call, "route_of", lambda *args: routes.append(route_of(*args)) or routes[-1])
    for name, lengths in PROMPTS.items():
        prompts = prompts_of(lengths)
        inputs = left_padded(prompts) | {"max_new_tokens": NEW}
        for samples in (False, True):
            expected = reference(model, inputs, samples)
            texts = [prompt + ids[-NEW:].tolist() for prompt, ids in zip(prompts, expected)]
            for kind, source in sources(texts, samples):
                actual = speculate(model, inputs, samples, source)
                if not torch.equal(actual, expected):
                    column = int((actual != expected).any(0).nonzero()[0]) if actual.shape == expected.shape else -1
                    served.differences.append(
                        f"{name}, {kind}, {samples=}: from column {column - expected.shape[1] + NEW}"
                    )
                if isinstance(source, Recording):
                    served.drafted += source.drafted
                    served.accepted += source.accepted
            way, reason, _ = routes[-1]
            served.routes[name] = way if reason is None else f"{way}: {reason}"
    return served


def sources(texts, samples):
    yield "tree", Recording(WithDecoys(Oracle(texts), seed=0))
    if not samples:
        yield "lookup", Recording(PromptLookupCandidates(max_ngram=1))
        yield "none", "none"


def reference(model, inputs, samples: bool) -> torch.Tensor:
    forget_lengths(model)
    processors = [TemperatureLogitsWarper(0.8), SeededGumbelLogitsProcessor(3)] if samples else []
    return model.generate(**inputs, do_sample=False, logits_processor=LogitsProcessorList(processors))


def speculate(model, inputs, samples: bool, source) -> torch.Tensor:
    sampling = {"temperature": 0.8, "top_k": 0, "top_p": 1.0, "seed": 3} if samples else {}
    with hf_smartspec.enabled(model):
        return model.generate(**inputs, **sampling, do_sample=samples, assistant=SmartSpecConfig(source, num_nodes=6))
