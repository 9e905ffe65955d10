"""Choice between three ways to serve a prepared `generate` call: packed, row by row, or without speculation."""

import inspect
from typing import Any, Literal, NamedTuple

import torch
from transformers import DynamicCache, GenerationConfig, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from ..device import autocasts
from ..target_model.compat import CACHE, WINDOWS, cached_length, is_checkpointing, is_stateful, renewal_length
from ..target_model.encoded import masks_encoder
from ..target_model.forward.rotary import border, lengthwise_modules
from ..target_model.recurrent.functions import recurrent_layers
from ..target_model.support.capabilities import packing_obstacle, prepares_own_inputs, rowwise_obstacle
from ..target_model.support.dropout import is_random
from ..target_model.support.wrappers import has_adapters_by_row
from .media import ends_in_text, media_kwargs, position_offsets, without_empty_media

# Arguments of the prepared call that the packed forward replaces or passes on.
_PACKED_KWARGS = {"attention_mask", "position_ids", CACHE, "use_cache", "logits_to_keep"}

# Further ones of encoder-decoder models.
_ENCODED_KWARGS = {"encoder_outputs", "decoder_attention_mask"}


class Route(NamedTuple):
    """
    The way a call is served.

    Args:
        way (`str`): "packed" (all rows' draft trees in one forward), "rowwise" (chains, one row after the other) or
            "plain" (transformers' own loop, without drafts).
        reason (`str`, *optional*): Why the call is not packed; None where it is.
        reads_media (`bool`): Whether the prompts hold images, videos or sounds, which a forward of the model's own
            reads before a packed call decodes.
    """

    way: Literal["packed", "rowwise", "plain"]
    reason: str | None = None
    reads_media: bool = False


def way_of(model: PreTrainedModel) -> tuple[Literal["packed", "rowwise", "plain"], str | None]:
    """Return the best way for text prompts on this model, before arguments of a call, and why it is not packed."""
    obstacle = packing_obstacle(model)
    if obstacle is None:
        return "packed", None
    if is_stateful(model):
        return "plain", obstacle
    reason = rowwise_obstacle(model)
    return ("rowwise", obstacle) if reason is None else ("plain", reason)


def route_of(
    model: PreTrainedModel, input_ids: torch.LongTensor, config: GenerationConfig, model_kwargs: dict[str, Any]
) -> Route:
    """Return the best way for this model and these arguments. Call it once per call: it may have to probe the model."""
    reason = _plain_reason(model, input_ids, config, model_kwargs)
    if reason is not None:
        return Route("plain", reason)
    kwargs = without_empty_media(model_kwargs)
    media = media_kwargs(kwargs)
    obstacle = _packing_obstacle(model, input_ids, kwargs, media)
    reason = _length_reason(model, input_ids, config, kwargs, is_packed=obstacle is None)
    if reason is not None:
        return Route("plain", reason)
    cache = kwargs.get(CACHE)
    cannot_load = obstacle is not None or media or model.config.is_encoder_decoder
    if _is_given(cache) and (cannot_load or not _can_load(cache, input_ids, config, kwargs)):
        return Route("plain", f"the given `{CACHE}` ({type(cache).__name__}) cannot be taken over")
    if obstacle is None:
        return Route("packed", reads_media=bool(media))
    if is_stateful(model):
        return Route("plain", obstacle)
    extra = _extra_kwargs(kwargs)
    if extra and len(input_ids) > 1 and not model.config.is_encoder_decoder:
        return Route("plain", f"{obstacle}, and the model arguments {sorted(extra)} cannot be split into rows")
    reason = rowwise_obstacle(model)
    return Route("rowwise", obstacle) if reason is None else Route("plain", reason)


def _plain_reason(
    model: PreTrainedModel, input_ids: torch.LongTensor, config: GenerationConfig, model_kwargs: dict[str, Any]
) -> str | None:
    """Return why this call must be decoded without speculation, whatever the model's attention; else None."""
    if input_ids.shape[1] == 0:  # there are no logits without a last token: transformers raises its own error
        return "the prompt is empty"
    if has_adapters_by_row(model):
        return "every row has an adapter of its own (`adapter_names`)"
    if "prepare_inputs_for_generation" in vars(model) and prepares_own_inputs(model):
        return "the inputs of the model are prepared by a wrapper around it"
    if config.output_attentions or config.output_hidden_states:
        return "attentions and hidden states are returned step by step by plain decoding only"
    if is_random(model) or (model.training and _drops_attention(model)):
        return "the model is in training mode with dropout, so that no two forwards agree"
    if model.training and is_checkpointing(model):
        return "gradient checkpointing switches the cache off while the model is in training mode"
    if autocasts(model.device) and recurrent_layers(model) is not None:
        return "under autocast, recurrent layers round states otherwise for several tokens at once"
    if config.cache_implementation not in (None, "dynamic", "static", "hybrid"):
        return f"`cache_implementation={config.cache_implementation!r}` asks for another cache"
    if config.cache_implementation == "static" and model.config.model_type == "gpt_neo":
        return "the local attention of GPT-Neo depends on the size of a static cache"  # a fault of transformers
    mask = model_kwargs.get("attention_mask")
    if mask is not None and not model.config.is_encoder_decoder:
        if empty := (mask == 0).all(dim=1).nonzero().flatten().tolist():
            return f"`attention_mask` masks the rows {empty} wholly"
        if not bool(((mask == 0) | (mask == 1)).all()):  # transformers counts positions by the mask's sums
            return "`attention_mask` has other values than 0 and 1"
        if bool((mask[:, -1] == 0).any()):
            return "the batch is padded on the right"
    positions = model_kwargs.get("position_ids")
    if positions is not None and positions.dim() == 2 and not model.config.is_encoder_decoder:
        rows, length = positions.shape
        if length != input_ids.shape[1] or rows not in (1, len(input_ids)):
            return f"`position_ids` of shape {[rows, length]} do not fit `input_ids` of shape {list(input_ids.shape)}"
    if model_kwargs.get("inputs_embeds") is not None:
        return "`inputs_embeds` replaces the tokens of the prompt"
    return None


def _drops_attention(model: PreTrainedModel) -> bool:
    """Return whether the config sets dropout of attention, which modules copy from it or read at every call."""
    return getattr(model.config.get_text_config(), "attention_dropout", 0.0) > 0


def _length_reason(
    model: PreTrainedModel,
    input_ids: torch.LongTensor,
    config: GenerationConfig,
    model_kwargs: dict[str, Any],
    is_packed: bool,
) -> str | None:
    """Return why length-dependent rotary embeddings rule speculation out for this call; None if they do not."""
    modules = lengthwise_modules(model)
    if modules and config.prefill_chunk_size is not None and input_ids.shape[1] > min(map(border, modules)):
        return "rotary embeddings that depend on the length differ with every chunk of `prefill_chunk_size` tokens"
    if not modules or is_packed:
        return None
    positions = model_kwargs.get("position_ids")
    if model.config.is_encoder_decoder or positions is None or positions.dim() != 2:
        return "rotary embeddings depend on the length, and the model counts positions by itself"
    if renewal_length(model) is not None:
        return f"{type(model).__name__} computes all keys anew on its way to long texts"
    return None


def _packing_obstacle(
    model: PreTrainedModel, input_ids: torch.LongTensor, model_kwargs: dict[str, Any], media: set[str]
) -> str | None:
    """
    Return why the packed forward does not serve this model with these arguments; None if it does. A forward of the
    model's own reads the arguments named in `media`.
    """
    if model.config.is_encoder_decoder:
        return packing_obstacle(model) or _encoded_obstacle(model, model_kwargs)
    mask = model_kwargs.get("attention_mask")
    if reason := packing_obstacle(model, is_padded=mask is not None and not bool(mask.all())):
        return reason
    if extra := _extra_kwargs(model_kwargs) - media:
        return f"the model arguments {sorted(extra)} cannot be packed"
    layers = recurrent_layers(model) if media else None
    if layers is not None and not layers.may_be_loaded:
        return "the states that prompts with images leave cannot be taken over"
    if media and lengthwise_modules(model):
        return "rotary embeddings depend on the length of texts with images"
    if media and not ends_in_text(model, input_ids):
        return "the prompt ends in an image"
    if media and position_offsets(input_ids, model_kwargs) is None:
        return "the text after the prompt's images has positions of several dimensions"
    counts_nothing = is_stateful(model) and "position_ids" not in inspect.signature(model.forward).parameters
    if not media and not counts_nothing and not _has_default_positions(input_ids, model_kwargs):
        return "the given `position_ids` do not count the tokens"
    if _has_holes_in_windows(model, model_kwargs.get("attention_mask")):
        return "`attention_mask` has holes, which count in sliding windows"
    return None


def _encoded_obstacle(model: PreTrainedModel, model_kwargs: dict[str, Any]) -> str | None:
    """Return why the packed forward does not serve these arguments of an encoder-decoder model; None if it does."""
    if extra := _extra_kwargs(model_kwargs) - _ENCODED_KWARGS:
        return f"the model arguments {sorted(extra)} cannot be packed"
    outputs, mask = model_kwargs.get("encoder_outputs"), model_kwargs.get("attention_mask")
    if outputs is None:
        return "`encoder_outputs` are not there"
    of_decoder = model_kwargs.get("decoder_attention_mask")
    if of_decoder is not None and not bool(of_decoder.all()):
        return "`decoder_attention_mask` masks tokens of the decoder's prompt"
    if masks_encoder(model) and mask is not None:
        if mask.shape != outputs[0].shape[:2]:
            return "`attention_mask` is not of the shape of the encoder's outputs"
        if not bool((mask != 0).any(dim=1).all()):
            return "`attention_mask` masks some texts wholly"
    return None


def _is_given(cache: Any) -> bool:
    """Return whether the caller has passed this cache; `generate` itself passes an empty one."""
    return cache is not None and (cached_length(cache) > 0 or getattr(cache, "_is_user_defined", False))


def _can_load(cache: Any, input_ids: torch.LongTensor, config: GenerationConfig, model_kwargs: dict[str, Any]) -> bool:
    """
    Return whether the packed cache can take over a given one: an empty cache of any kind, or one of simple layers that
    holds the beginning of exactly these prompts.
    """
    if cached_length(cache) == 0:
        return True
    layers = (DynamicLayer, DynamicSlidingWindowLayer)
    if type(cache) is not DynamicCache or not all(type(layer) in layers for layer in cache.layers):
        return False
    mask = model_kwargs.get("attention_mask")
    length = getattr(config, "_mask_length", input_ids.shape[1]) if mask is None else mask.shape[1]
    return length == input_ids.shape[1] > cached_length(cache)


def _extra_kwargs(model_kwargs: dict[str, Any]) -> set[str]:
    """Return the names of model arguments that the packed forward does not take."""
    return {key for key, value in model_kwargs.items() if value is not None and key not in _PACKED_KWARGS}


def _has_default_positions(input_ids: torch.LongTensor, model_kwargs: dict[str, Any]) -> bool:
    """Return whether `position_ids` count the unmasked tokens, as those that `generate` fills in do."""
    positions, mask = model_kwargs.get("position_ids"), model_kwargs.get("attention_mask")
    if positions is None:  # the model counts by itself, from the first column on
        return mask is None or bool(mask.all())
    if positions.shape[-1] != input_ids.shape[1]:
        return False
    mask = torch.ones_like(input_ids) if mask is None else mask
    expected = (mask.long().cumsum(-1) - 1).masked_fill(mask == 0, 0)
    return bool(((positions == expected) | (mask == 0)).all())


def _has_holes_in_windows(model: PreTrainedModel, mask: torch.Tensor | None) -> bool:
    """
    Return whether masked tokens within a row meet sliding windows: transformers' windows count such tokens, and those
    of the packed forward, which leaves them out, do not.
    """
    config = model.config.get_text_config(decoder=True)
    if mask is None or all(getattr(config, name, None) is None for name in WINDOWS):
        return False
    return bool((mask.long().diff(dim=1) < 0).any())
