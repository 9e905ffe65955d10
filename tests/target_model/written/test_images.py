"""Decoders of models that read images: text runs as in models without."""

import pytest
import torch
import transformers

from hf_smartspec.cpu.few_tokens import has_kernels
from hf_smartspec.target_model.forward.packed import PackedForward
from hf_smartspec.target_model.support.twin import small_twin
from hf_smartspec.target_model.written import packed_forward

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
