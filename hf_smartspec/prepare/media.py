"""Images, videos and the like in prompts: the model itself reads them, in one forward of its own."""

from collections.abc import Sequence
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel

from ..decoding.request import Request
from ..target_model.compat import CACHE, MEDIA_KWARGS
from ..target_model.forward.packed import PackedForward

# Which tokens stand for images: 0 for text.
_TOKEN_TYPES = ("mm_token_type_ids", "moe_mm_token_type_ids", "token_type_ids")

# How configs call the tokens that images, videos and sounds stand behind.
_PLACEHOLDERS = ("image_token_id", "image_token_index", "video_token_id", "video_token_index", "audio_token_id")


def without_empty_media(model_kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments without those that say nothing but that a multimodal model is given text."""
    return {key: value for key, value in model_kwargs.items() if not _is_empty(key, value, model_kwargs)}


def _is_empty(key: str, value: Any, model_kwargs: dict[str, Any]) -> bool:
    if key == "mm_encoder_outputs":
        return not any(output is not None for output in (value or {}).values())
    if key == "token_type_ids" and "mm_encoder_outputs" not in model_kwargs:
        return False  # of a text model, in which type 0 may have an embedding
    return key in _TOKEN_TYPES and value is not None and not bool(value.any())


def media_kwargs(model_kwargs: dict[str, Any]) -> set[str]:
    """Names of the arguments that hold images or say where they stand, which the prompt's forward alone reads."""
    if not any(model_kwargs.get(key) is not None for key in MEDIA_KWARGS):
        return set()
    return {key for key in (*MEDIA_KWARGS, *_TOKEN_TYPES) if model_kwargs.get(key) is not None}


def position_offsets(input_ids: torch.LongTensor, model_kwargs: dict[str, Any]) -> list[int] | None:
    """
    By how much the positions of each row's text behind its prompt differ from the number of its tokens: images may
    take fewer positions than tokens. None where a text's positions are no single numbers.
    """
    positions, mask = model_kwargs.get("position_ids"), model_kwargs.get("attention_mask")
    mask = torch.ones_like(input_ids) if mask is None else mask
    if positions is None:
        return [0] * len(mask) if bool(mask.all()) else None
    planes = positions[None] if positions.dim() == 2 else positions[-3:]  # a plane of four counts for masks only
    last = planes[:, :, -1].expand(-1, len(mask))
    if bool((last != last[0]).any()):
        return None
    return (last[0] - mask.long().sum(-1) + 1).tolist()


def ends_in_text(model: PreTrainedModel, input_ids: torch.LongTensor) -> bool:
    """Whether the last token of every row is a word, and not part of an image."""
    names = {getattr(model.config, name, None) for name in _PLACEHOLDERS}
    return input_ids.shape[1] > 1 and not names & set(input_ids[:, -1].tolist())


@torch.no_grad()
def read_media(forward: PackedForward, requests: Sequence[Request], prepared: Any) -> None:
    """
    Gives every request a row with the keys and values of its prompt, up to the last token, from a forward of the
    model's own over the whole padded batch, in which images are what they are in plain decoding.
    """
    model, ids = forward.model, prepared.input_ids[:, :-1]
    kwargs = {key: _before_last(key, value) for key, value in prepared.model_kwargs.items()}
    kwargs[CACHE] = DynamicCache(config=model.config.get_text_config(decoder=True))
    model._prefill(ids, prepared.generation_config, kwargs)  # type: ignore[operator]
    offsets = position_offsets(prepared.input_ids, prepared.model_kwargs)
    assert offsets is not None, "the route has seen that there are some"
    for request, offset in zip(requests, offsets):
        request.row = forward.add()
        request.row.position_offset = offset
    masks = [request.mask[:-1] for request in requests]
    forward.cache.load(kwargs[CACHE], [request.cache_row for request in requests], masks)


def _before_last(key: str, value: Any) -> Any:
    """The argument for a prompt without its last token."""
    is_per_token = key in ("attention_mask", "position_ids", *_TOKEN_TYPES)
    return value[..., :-1] if is_per_token and value is not None else value
