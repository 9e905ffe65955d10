"""Tiny models that read images, and prompts for them."""

from functools import cache
from typing import Any

import torch
import transformers
from transformers import GenerationConfig, PreTrainedModel

from ..models import RECURRENT

VOCAB_SIZE = 97
IMAGE = 90  # the token that an image stands behind
IMAGE_TOKENS = 4

_TEXT = {"vocab_size": VOCAB_SIZE, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2} | {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
}
_HEADS = _TEXT | {"head_dim": 8}
_WINDOWED = _HEADS | {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}
_PLANES = {"rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0}}
_PLANES_OF_GLM = {"rope_parameters": _PLANES["rope_parameters"] | {"partial_rotary_factor": 1.0}}
_VISION = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
_PATCHES = _VISION | {"image_size": 8, "patch_size": 4}
_GRID = {"depth": 1, "hidden_size": 32, "num_heads": 2, "patch_size": 4, "spatial_merge_size": 2} | {
    "temporal_patch_size": 2
}
_QWEN_VISION = _GRID | {"intermediate_size": 64, "out_hidden_size": 32}
_INDEX, _ID = {"image_token_index": IMAGE}, {"image_token_id": IMAGE}
_VIDEO = _ID | {"video_token_id": 91}
_LINEAR = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
_HYBRID = _TEXT | _LINEAR | {"head_dim": 16, "layer_types": ["linear_attention", "full_attention"]}


def _of(name: str, **arguments: Any) -> Any:
    return getattr(transformers, f"{name}Config")(**arguments)


# Model class -> what makes its configuration.
CONFIGS = {
    "Gemma3": lambda: _of(
        "Gemma3", text_config=_WINDOWED, vision_config=_PATCHES, mm_tokens_per_image=IMAGE_TOKENS, **_INDEX
    ),
    "Llava": lambda: _of(
        "Llava", text_config=_of("Llama", **_TEXT), vision_config=_of("CLIPVision", **_PATCHES), **_INDEX
    ),
    "Qwen2VL": lambda: _of("Qwen2VL", text_config=_TEXT | _PLANES, vision_config=_GRID | {"embed_dim": 32}, **_VIDEO),
    "Qwen2_5_VL": lambda: _of(
        "Qwen2_5_VL",
        text_config=_TEXT | _PLANES,
        vision_config=_QWEN_VISION | {"fullatt_block_indexes": [0]},
        **_VIDEO,
    ),
    "Qwen3VL": lambda: _of(
        "Qwen3VL",
        text_config=_HEADS | _PLANES,
        vision_config=_QWEN_VISION | {"deepstack_visual_indexes": [0], "num_position_embeddings": 16},
        **_VIDEO,
    ),
    "Glm4v": lambda: _of(
        "Glm4v", text_config=_TEXT | _PLANES_OF_GLM, vision_config=_QWEN_VISION | {"image_size": 8}, **_VIDEO
    ),
    "Mistral3": lambda: _of(
        "Mistral3",
        text_config=_of("Mistral", **_HEADS, sliding_window=None),
        vision_config=_of("PixtralVision", **_PATCHES),
        spatial_merge_size=1,
        **_INDEX,
    ),
    "Idefics3": lambda: _of(
        "Idefics3", text_config=_of("Llama", **_TEXT), vision_config=_PATCHES, scale_factor=1, **_ID
    ),
    "InternVL": lambda: _of(
        "InternVL",
        text_config=_of("Qwen2", **_TEXT),
        vision_config=_of("InternVLVision", **_VISION, image_size=[8, 8], patch_size=[4, 4]),
        **_ID,
    ),
    "AyaVision": lambda: _of(
        "AyaVision", text_config=_of("Cohere", **_TEXT), vision_config=_of("SiglipVision", **_PATCHES), **_INDEX
    ),
    "PaliGemma": lambda: _of(
        "PaliGemma", text_config=_of("Gemma", **_HEADS), vision_config=_PATCHES, projection_dim=32, **_INDEX
    ),
}
if RECURRENT:
    CONFIGS["Qwen3_5"] = lambda: _of(
        "Qwen3_5", text_config=_HYBRID, vision_config=_QWEN_VISION | {"num_position_embeddings": 16}, **_VIDEO
    )
    CONFIGS["Lfm2Vl"] = lambda: _of(
        "Lfm2Vl",
        text_config=_of("Lfm2", **_TEXT, layer_types=["conv", "full_attention"], block_multiple_of=32),
        vision_config=_of("Siglip2Vision", **_VISION, num_patches=16, patch_size=4),
        projector_hidden_size=32,
        **_ID,
    )


@cache
def build(name: str) -> PreTrainedModel:
    """One model for the whole session; tests must leave it as it is."""
    model = getattr(transformers, f"{name}ForConditionalGeneration")(CONFIGS[name]()).eval()
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.3, generator=generator)
    model.generation_config = GenerationConfig(pad_token_id=0, bos_token_id=1)
    return model.requires_grad_(False)


def text_batch(lengths: tuple[int, ...] = (7, 12, 10)) -> dict[str, torch.Tensor]:
    """A ragged batch without images."""
    width, generator = max(lengths), torch.Generator().manual_seed(1)
    mask = torch.tensor([[0] * (width - length) + [1] * length for length in lengths])
    ids = torch.randint(3, 80, mask.shape, generator=generator)
    return {"input_ids": ids.masked_fill(mask == 0, 0), "attention_mask": mask}


def image_batch(name: str, rows: tuple[int, ...] = (0, 1, 2)) -> dict[str, torch.Tensor]:
    """A ragged batch in which the second row has no image, but for models that want one everywhere."""
    batch = text_batch((9, 14, 12))
    ids, mask = batch["input_ids"][list(rows)], batch["attention_mask"][list(rows)]
    for line, row in enumerate(rows):
        if row != 1 or name == "Idefics3":
            ids[line, 6 : 6 + IMAGE_TOKENS] = IMAGE
    is_image, generator = (ids == IMAGE).long(), torch.Generator().manual_seed(3)
    num_images = int(is_image.any(1).sum())
    batch = {"input_ids": ids, "attention_mask": mask}
    if name.startswith(("Qwen", "Glm")):
        batch["pixel_values"] = torch.randn(16 * num_images, 3 * 2 * 4 * 4, generator=generator)
        return batch | {"image_grid_thw": torch.tensor([[1, 4, 4]] * num_images), "mm_token_type_ids": is_image}
    if name == "Lfm2Vl":
        batch["pixel_values"] = torch.randn(num_images, 16, 3 * 4 * 4, generator=generator)
        batch["spatial_shapes"] = torch.tensor([[4, 4]] * num_images)
        return batch | {"pixel_attention_mask": torch.ones(num_images, 16, dtype=torch.long)}
    shape = (len(ids), 1, 3, 8, 8) if name == "Idefics3" else (num_images, 3, 8, 8)
    batch["pixel_values"] = torch.randn(shape, generator=generator)
    if name in ("Gemma3", "PaliGemma"):
        batch["token_type_ids"] = is_image
    if name == "Mistral3":
        batch["image_sizes"] = torch.tensor([[8, 8]] * num_images)
    return batch
