"""Checks of a call's arguments: they raise before any work starts, and their messages name the remedy."""

import difflib
import os
from collections.abc import Sequence
from typing import Any

import torch
from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation import CandidateGenerator, GenerationMode

from ..candidates import RoutedCandidates
from ..candidates.heads.learned import LearnedDrafter
from ..candidates.heads.mtp import MTP
from .config import SmartSpecConfig
from .presets import EARLY_EXIT, PRESET_NAMES, early_exit_layers, is_preset

_DRAFTERS = (PreTrainedModel, CandidateGenerator, LearnedDrafter)
_SERVED = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE, GenerationMode.ASSISTED_GENERATION)

# The argument that selects each of the other modes.
_ASKS = {
    GenerationMode.CONTRASTIVE_SEARCH: "penalty_alpha",
    GenerationMode.DOLA_GENERATION: "dola_layers",
    GenerationMode.CONSTRAINED_BEAM_SEARCH: "force_words_ids",
}

# Options of transformers' own assistants that belong to the candidate source here.
_SOURCE_OPTIONS = {
    "assistant_confidence_threshold": "`assistant=DraftModelCandidates(draft, confidence_threshold=...)`",
    "max_matching_ngram_size": "`assistant=PromptLookupCandidates(max_ngram=...)`",
    "num_assistant_tokens_schedule": "a `LengthPolicy` in `assistant=SmartSpecConfig(..., policy=...)`",
}


def check_settings(config: GenerationConfig, synced_gpus: bool | None = None) -> None:
    """Raise `ValueError` for generation settings that cannot be served."""
    mode = config.get_generation_mode()
    if mode not in _SERVED:
        name = _ASKS.get(mode, "num_beams")
        raise ValueError(
            f"`assistant` serves greedy search and sampling, not {mode.value.replace('_', ' ')} (`{name}="
            f"{getattr(config, name, None)}`). Leave `{name}` out, or `assistant`."
        )
    if config.use_cache is False:
        raise ValueError("`assistant` needs the key/value cache: `use_cache=False` cannot be served. Leave it out.")
    if config.cache_implementation == "paged":
        raise ValueError("`cache_implementation='paged'` decodes without an assistant. Leave it out, or `assistant`.")
    if synced_gpus:
        raise ValueError(
            "`synced_gpus=True`, the default with ZeRO-3 and FSDP, cannot be served: processes take different numbers "
            "of steps. Leave it out, or `assistant` where weights are spread over processes."
        )
    if config.assistant_ensemble_weight is not None:
        raise ValueError("`assistant_ensemble_weight` changes the output and is not supported. Leave it out.")
    if config.prefill_chunk_size is not None and config.prefill_chunk_size < 1:
        raise ValueError(f"`prefill_chunk_size` must be at least 1, got {config.prefill_chunk_size}.")
    if config.token_healing:
        raise ValueError(
            "`token_healing=True` cannot be served. Heal the prompt first, with `model.heal_tokens(input_ids, "
            "tokenizer)`, and leave it out."
        )


def check_source_options(kwargs: dict[str, Any]) -> None:
    """Raise `ValueError` for options of transformers' assistants, which would have no effect here."""
    for name, remedy in _SOURCE_OPTIONS.items():
        if kwargs.get(name) not in (None, 0, "constant"):
            raise ValueError(f"`{name}={kwargs[name]!r}` has no effect on `assistant`. Use {remedy} instead.")


def check_token_ids(model: PreTrainedModel, ids: Any, name: str = "input_ids") -> None:
    """
    Check that `ids` are a batch of token ids of the model.

    Raises:
        TypeError: for anything but an integer tensor.
        ValueError: for another shape than [batch, length], an empty batch, empty texts as tokenizers return them (as
            floats), and ids outside the vocabulary.
    """
    if not isinstance(ids, torch.Tensor):
        raise TypeError(
            f"`{name}` must be a torch.Tensor of token ids of shape [batch, length], got {type(ids).__name__}. "
            "Tokenize with `return_tensors='pt'`, and unpack an encoding: `generate(**encoding)`."
        )
    if ids.shape[:1] == (0,):
        raise ValueError(f"`{name}` is an empty batch (shape {list(ids.shape)}): pass at least one sequence.")
    if name == "inputs" and model.main_input_name != "input_ids":
        return  # features of a speech or vision encoder
    if ids.is_floating_point() and ids.dim() == 2 and not ids.shape[1]:  # what tokenizers return for empty text
        raise ValueError(
            f"`{name}` holds no tokens (shape {list(ids.shape)}): pass at least one per row, such as the tokenizer's "
            "`bos_token_id`."
        )
    if ids.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"`{name}` must be token ids of dtype torch.int64, got {ids.dtype}.")
    if ids.dim() != 2:
        raise ValueError(
            f"`{name}` must have shape [batch, length], got {list(ids.shape)}. For one sequence, add the first axis: "
            f"`{name}[None]`."
        )
    if ids.numel():
        num_embeddings = model.get_input_embeddings().weight.shape[0]  # type: ignore[index]
        lowest, highest = int(ids.min()), int(ids.max())
        if lowest < 0 or highest >= num_embeddings:
            raise ValueError(
                f"`{name}` must lie in [0, {num_embeddings}), the model's vocabulary; got {lowest} to {highest}."
            )


def check_mask(mask: Any) -> None:
    """Raise `TypeError` if `attention_mask` is given and is no tensor of two dimensions."""
    if mask is not None and (not isinstance(mask, torch.Tensor) or mask.dim() != 2):
        got = list(mask.shape) if isinstance(mask, torch.Tensor) else type(mask).__name__
        raise TypeError(f"`attention_mask` must be a torch.Tensor of shape [batch, length], got {got}.")


def check_mask_shape(mask: torch.Tensor | None, shape: Sequence[int]) -> None:
    """
    Raise `ValueError` if a prepared `attention_mask` is not of the shape of the prompts. Masks as the caller passes
    them may differ in shape: transformers drops those of ones only.
    """
    if mask is not None and mask.shape != tuple(shape):
        raise ValueError(
            f"`attention_mask` of shape {list(mask.shape)} does not fit `input_ids` of shape {list(shape)}: "
            "it needs one entry per token."
        )


def check_assistant(assistant: Any) -> None:
    """
    Check that this may be an `assistant` of some target, before anything is loaded.

    Raises:
        ValueError: for a name that is neither a preset nor a model.
        TypeError: for anything that cannot draft.
    """
    if isinstance(assistant, SmartSpecConfig):
        assistant = assistant.assistant
    if isinstance(assistant, list | tuple):
        if not assistant:
            raise ValueError("`assistant` must name at least one source, got an empty list.")
        for item in assistant:
            check_assistant(item)
    elif isinstance(assistant, RoutedCandidates):
        for item in assistant.drafters.values():
            check_assistant(item)
    elif isinstance(assistant, str) and assistant.startswith(EARLY_EXIT):
        early_exit_layers(assistant)
    elif isinstance(assistant, str):
        if not is_preset(assistant) and not _may_be_model(assistant):
            raise ValueError(_unknown(assistant))
    elif not isinstance(assistant, _DRAFTERS) and not hasattr(assistant, "get_base_model"):
        raise TypeError(
            f"`assistant` must be a preset name {PRESET_NAMES}, a draft PreTrainedModel, learned heads, the folder or "
            "hub id of either, a candidate generator, a list of these or a SmartSpecConfig, got "
            f"{type(assistant).__name__}."
        )


def _unknown(name: str) -> str:
    """Return the error message for a name that is neither a preset nor a model."""
    if not name.strip():
        return f"The name of an `assistant` is empty: known presets are {PRESET_NAMES}."
    if "/" in name or os.sep in name:
        there = "is a file, no folder of a model" if os.path.exists(os.path.expanduser(name)) else "does not exist"
        return f"`assistant={name!r}`: the path {there}."
    presets = {preset.partition(":")[0]: preset for preset in PRESET_NAMES}
    near = [presets[stem] for stem in difflib.get_close_matches(name.partition(":")[0], presets, n=1)]
    meant = f": did you mean {near[0]!r}? Known" if near else "; known"
    return (
        f"Unknown `assistant` preset {name!r}{meant} are {PRESET_NAMES}. A draft model is named by its folder or its "
        "hub id ('owner/name')."
    )


def _may_be_model(name: str) -> bool:
    """
    Return whether `name` may be a drafter that is loaded: the target's MTP layers, a folder, a hub id, or an old hub id
    without an owner if it has been downloaded.
    """
    if name == MTP:
        return True
    name = os.path.expanduser(name)
    if os.path.isabs(name) or name.startswith(".") or name.count("/") != 1:
        return os.path.isdir(name) or ("/" not in name and bool(name) and _is_downloaded(name))
    return True


def _is_downloaded(name: str) -> bool:
    try:
        return isinstance(try_to_load_from_cache(name, "config.json"), str)
    except HFValidationError:  # not a valid id
        return False
