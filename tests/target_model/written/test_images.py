"""Decoders of models that read images: text runs as in models without."""

import numpy as np
import pytest
import torch
import transformers

from hf_smartspec.cpu.few_tokens import has_kernels
from hf_smartspec.drafts.tree import DraftTree
from hf_smartspec.target_model.forward.packed import PackedForward
from hf_smartspec.target_model.layout.rows import RowInput
from hf_smartspec.target_model.support.twin import sharpened, small_twin
from hf_smartspec.target_model.written import packed_forward, recognition

from ... import models
from ...prepare import multimodal
from .test_compiled import check_program
from .test_written import are_near, is_written, logits_of

TEXT = multimodal._TEXT | {"hidden_size": 64, "num_hidden_layers": 3}
SECTIONS = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
COMPILED = {
    "Qwen2VL": (TEXT | {"rope_parameters": SECTIONS}, multimodal._GRID | {"embed_dim": 32, "hidden_size": 64}),
    "Qwen2_5_VL": (TEXT | {"rope_parameters": SECTIONS}, multimodal._QWEN_VISION | {"out_hidden_size": 64}),
    "Qwen3VL": (
        TEXT | {"rope_parameters": SECTIONS, "head_dim": 16},
        multimodal._QWEN_VISION
        | {"out_hidden_size": 64, "deepstack_visual_indexes": [0], "num_position_embeddings": 16},
    ),
    "Glm4v": (
        TEXT | {"rope_parameters": SECTIONS | {"partial_rotary_factor": 1.0}},
        multimodal._QWEN_VISION | {"out_hidden_size": 64, "image_size": 8},
    ),
}


@pytest.mark.parametrize("name", [name for name in multimodal.CONFIGS if name != "PaliGemma"])
@torch.no_grad()
def test_logits_of_text_are_the_models_own(name):
    model = multimodal.build(name)
    assert is_written(model)
    assert are_near(logits_of(packed_forward(model)), logits_of(PackedForward(model)))


@pytest.mark.skipif(not has_kernels(torch.float32), reason="there is no compiled code for this CPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", COMPILED)
@torch.no_grad()
def test_every_bit_is_that_of_the_layers(name, dtype, programs):
    """In half precision a twin, whose sections fit its heads, is tried out as well."""
    text, vision = COMPILED[name]
    config = getattr(transformers, f"{name}Config")(text_config=text, vision_config=vision, **multimodal._VIDEO)
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForConditionalGeneration")(config).eval().requires_grad_(False).to(dtype)
    assert sum(small_twin(model).config.text_config.rope_parameters["mrope_section"]) == 4
    check_program(model, programs)


@torch.no_grad()
def test_a_parameter_between_the_lines_of_images_is_not_read_for_text():
    vision = transformers.CLIPVisionConfig(**multimodal._PATCHES)
    text = transformers.LlamaConfig(**multimodal._TEXT)
    config = transformers.LlavaNextConfig(text_config=text, vision_config=vision, **multimodal._INDEX)
    torch.manual_seed(0)
    model = transformers.LlavaNextForConditionalGeneration(config).eval().requires_grad_(False)
    assert model.model.image_newline is not None and is_written(model)
    assert are_near(logits_of(packed_forward(model)), logits_of(PackedForward(model)))


def unified() -> transformers.PreTrainedModel:
    """Return a model in whose texts images have tokens with embeddings of their own."""
    text = models.CONFIGS["gemma4_text"][1] | {"hidden_size_per_layer_input": 0, "vocab_size": 400}
    tokens = {f"{name}_token_id": 390 + number for number, name in enumerate(("image", "video", "audio", "boi", "eoi"))}
    vision = {"patch_size": 4, "pooling_kernel_size": 1, "model_patch_size": 4, "mm_embed_dim": 32}
    vision |= {"output_proj_dims": 32, "mm_posemb_size": 16}
    config = transformers.Gemma4UnifiedConfig(text_config=text, vision_config=vision, audio_config=None, **tokens)
    torch.manual_seed(0)
    return sharpened(transformers.Gemma4UnifiedForConditionalGeneration(config).eval().requires_grad_(False))


@pytest.mark.skipif(not hasattr(transformers, "Gemma4UnifiedConfig"), reason="this release has no such model")
@torch.no_grad()
def test_placeholders_in_texts_are_read_as_padding():
    model = unified()
    text = np.array([5, 6, 390, 7, 391, 8, 392, 9])
    assert is_written(model)
    forward = packed_forward(model)
    found, _ = forward.forward([RowInput(forward.add(), text[:1], DraftTree.chain(text[1:]))])
    assert are_near(found, model(torch.from_numpy(text)[None]).logits[0])


@pytest.mark.skipif(not hasattr(transformers, "Gemma4UnifiedConfig"), reason="this release has no such model")
@torch.no_grad()
def test_trials_read_placeholders(monkeypatch):
    """Without their replacement, numbers of text alone would be right."""
    monkeypatch.setattr(recognition, "placeholders_of", lambda model, around: None)
    assert not is_written(unified())
