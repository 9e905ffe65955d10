"""Images, videos and sounds in prompts: one forward of the model itself reads them."""

from collections.abc import Sequence
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel

from ..decoding.call import Request
from ..target_model.cache.loading import load
from ..target_model.compat import CACHE, MEDIA_KWARGS
from ..target_model.forward.packed import PackedForward
from ..target_model.written.placeholders import placeholder_tokens

# Arguments that hold the type of each token: 0 for text, others for images and the like.
_TOKEN_TYPES = ("mm_token_type_ids", "moe_mm_token_type_ids", "token_type_ids")


def without_empty_media(model_kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments without the empty ones of media, which multimodal models get with text-only prompts."""
    return {key: value for key, value in model_kwargs.items() if not _is_empty(key, value, model_kwargs)}


def _is_empty(key: str, value: Any, model_kwargs: dict[str, Any]) -> bool:
    if key == "mm_encoder_outputs":
        return not any(output is not None for output in (value or {}).values())
    if key == "token_type_ids" and "mm_encoder_outputs" not in model_kwargs:
        return False  # a text model's own, in which type 0 may have an embedding
    return key in _TOKEN_TYPES and value is not None and not bool(value.any())


def media_kwargs(model_kwargs: dict[str, Any]) -> set[str]:
    """Return the names of arguments that hold images or their places, which only the prompt's forward reads."""
    if not any(model_kwargs.get(key) is not None for key in MEDIA_KWARGS):
        return set()
    return {key for key in (*MEDIA_KWARGS, *_TOKEN_TYPES) if model_kwargs.get(key) is not None}


def position_offsets(input_ids: torch.LongTensor, model_kwargs: dict[str, Any]) -> list[int] | None:
    """
    Return, for each row, by how much positions after the prompt differ from the number of tokens before them: images
    may take fewer positions than tokens. None where a token of text has several different positions.
    """
    positions, mask = model_kwargs.get("position_ids"), model_kwargs.get("attention_mask")
    mask = torch.ones_like(input_ids) if mask is None else mask
    if positions is None:
        return [0] * len(mask) if bool(mask.all()) else None
    planes = positions[None] if positions.dim() == 2 else positions[-3:]  # the first of four planes serves masks only
    last = planes[:, :, -1].expand(-1, len(mask))
    if bool((last != last[0]).any()):
        return None
    return (last[0] - mask.long().sum(-1) + 1).tolist()


def ends_in_text(model: PreTrainedModel, input_ids: torch.LongTensor) -> bool:
    """Return whether the last token of every row is text, and not part of an image."""
    return input_ids.shape[1] > 1 and not {*placeholder_tokens(model)} & {*input_ids[:, -1].tolist()}


@torch.no_grad()
def read_media(forward: PackedForward, requests: Sequence[Request], prepared: Any) -> None:
    """
    Give every request a row with the keys and values of its prompt, except for the last token. A forward of the model's
    own over the whole padded batch computes them, so that images are read as in plain decoding.
    """
    model, ids = forward.model, prepared.input_ids[:, :-1]
    kwargs = {key: _before_last(key, value) for key, value in prepared.model_kwargs.items()}
    kwargs[CACHE] = DynamicCache(config=model.config.get_text_config(decoder=True))
    model._prefill(ids, prepared.generation_config, kwargs)  # type: ignore[operator]
    offsets = position_offsets(prepared.input_ids, prepared.model_kwargs)
    assert offsets is not None, "the route is packed only where there are offsets"
    for request, offset in zip(requests, offsets):
        request.row = forward.add()
        request.row.position_offset = offset
    masks = [request.mask[:-1] for request in requests]
    load(kwargs[CACHE], forward.cache, [request.cache_row for request in requests], masks)


def _before_last(key: str, value: Any) -> Any:
    """Return the argument for a prompt without its last token."""
    is_per_token = key in ("attention_mask", "position_ids", *_TOKEN_TYPES)
    return value[..., :-1] if is_per_token and value is not None else value
