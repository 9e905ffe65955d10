"""Which of the three ways a model and a call can be served: packed, row by row, or plainly."""

from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from transformers import DynamicCache, GenerationConfig, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from ..drafts.tree import DraftTree
from .compat import TESTED_MODEL_TYPES, is_checkpointing, is_stateful
from .layout import RowInput
from .packed import PackedForward

# Arguments of the prepared call that the packed forward replaces or passes on.
_PACKED_KWARGS = {"attention_mask", "position_ids", "past_key_values", "use_cache", "logits_to_keep"}

# What configs call the reach of local attention.
_WINDOWS = ("sliding_window", "window_size", "attention_chunk_size")

_probed: WeakKeyDictionary[PreTrainedModel, bool] = WeakKeyDictionary()


def plain_reason(
    model: PreTrainedModel, input_ids: torch.LongTensor, config: GenerationConfig, model_kwargs: dict[str, Any]
) -> str | None:
    """Why this call must be left to plain decoding; None if it need not be."""
    if is_stateful(model):
        return f"{type(model).__name__} keeps a state that cannot be taken back to an earlier token"
    if "prepare_inputs_for_generation" in vars(model) and prepares_own_inputs(model):
        return "the inputs of the model are prepared by a wrapper around it"
    if config.output_attentions or config.output_hidden_states:
        return "attentions and hidden states are returned step by step by plain decoding only"
    if model.training and _has_dropout(model):
        return "the model is in training mode with dropout, so that no two forwards agree"
    if model.training and is_checkpointing(model):
        return "gradient checkpointing switches the cache off while the model is in training mode"
    if config.cache_implementation not in (None, "dynamic", "static", "hybrid"):
        return f"`cache_implementation={config.cache_implementation!r}` asks for another cache"
    cache = model_kwargs.get("past_key_values")
    is_given = cache is not None and (cache.get_seq_length() > 0 or getattr(cache, "_is_user_defined", False))
    if is_given and not _can_load(model, cache, input_ids, config, model_kwargs):
        return f"the given `past_key_values` ({type(cache).__name__}) cannot be taken over"
    mask = model_kwargs.get("attention_mask")
    if mask is not None and not model.config.is_encoder_decoder and bool((mask[:, -1] == 0).any()):
        return "the batch is padded on the right"
    extra = extra_kwargs(model, model_kwargs)
    if extra and len(input_ids) > 1 and not model.config.is_encoder_decoder:
        return f"the model arguments {sorted(extra)} cannot be split into rows"
    if "inputs_embeds" in extra:
        return "`inputs_embeds` replaces the tokens of the prompt"
    return None


def _has_dropout(model: PreTrainedModel) -> bool:
    modules = any(isinstance(module, torch.nn.Dropout) and module.p > 0 for module in model.modules())
    return modules or getattr(model.config.get_text_config(), "attention_dropout", 0.0) > 0


def _can_load(
    model: PreTrainedModel,
    cache: Any,
    input_ids: torch.LongTensor,
    config: GenerationConfig,
    model_kwargs: dict[str, Any],
) -> bool:
    """An empty cache of any kind, or one of simple layers that holds the beginning of the very sequences passed."""
    if not can_pack_call(model, input_ids, model_kwargs):
        return False
    if cache.get_seq_length() == 0:
        return True
    layers = (DynamicLayer, DynamicSlidingWindowLayer)
    if type(cache) is not DynamicCache or not all(type(layer) in layers for layer in cache.layers):
        return False
    mask = model_kwargs.get("attention_mask")
    length = getattr(config, "_mask_length", input_ids.shape[1]) if mask is None else mask.shape[1]
    return length == input_ids.shape[1] > cache.get_seq_length()


def can_pack_call(model: PreTrainedModel, input_ids: torch.LongTensor, model_kwargs: dict[str, Any]) -> bool:
    """Whether the packed forward serves this model with these arguments."""
    return (
        can_pack(model)
        and not extra_kwargs(model, model_kwargs)
        and has_default_positions(input_ids, model_kwargs)
        and not has_holes_in_windows(model, model_kwargs.get("attention_mask"))
    )


def extra_kwargs(model: PreTrainedModel, model_kwargs: dict[str, Any]) -> set[str]:
    """Names of model arguments that the packed forward does not know."""
    return {key for key, value in model_kwargs.items() if value is not None and key not in _PACKED_KWARGS}


def has_default_positions(input_ids: torch.LongTensor, model_kwargs: dict[str, Any]) -> bool:
    """Whether `position_ids` count the tokens that are not masked, as `generate` fills them in."""
    positions, mask = model_kwargs.get("position_ids"), model_kwargs.get("attention_mask")
    if positions is None:  # the model counts by itself, from the first column on
        return mask is None or bool(mask.all())
    if positions.dim() != 2 or positions.shape[1] != input_ids.shape[1]:
        return False
    mask = torch.ones_like(input_ids) if mask is None else mask
    expected = (mask.long().cumsum(-1) - 1).masked_fill(mask == 0, 0)
    return bool(((positions == expected) | (mask == 0)).all())


def has_holes_in_windows(model: PreTrainedModel, mask: torch.Tensor | None) -> bool:
    """
    Whether masked tokens within a row meet sliding windows: transformers' windows count them, those of the packed
    forward, which leaves them out, do not.
    """
    config = model.config.get_text_config(decoder=True)
    if mask is None or all(getattr(config, name, None) is None for name in _WINDOWS):
        return False
    return bool((mask.long().diff(dim=1) < 0).any())


def prepares_own_inputs(model: PreTrainedModel) -> bool:
    """Whether a forward is fed more than the tokens that it is asked for, which the packed forward would not know."""
    own = vars(model).get("prepare_inputs_for_generation")
    if own is None:
        function = type(model).prepare_inputs_for_generation  # type: ignore[attr-defined]
        return not function.__module__.startswith("transformers.")
    # PEFT's wrappers set theirs for the time of the call; only adapters that learn prompts change anything in it.
    peft_config = getattr(getattr(own, "__self__", None), "active_peft_config", None)
    return getattr(peft_config, "is_prompt_learning", True)


def can_pack(model: PreTrainedModel) -> bool:
    """Whether the model can run packed trees: by its type, else by comparing a small forward, once per model."""
    config = model.config.get_text_config(decoder=True)
    rope = getattr(config, "rope_parameters", None) or {}
    if model.config.is_encoder_decoder or prepares_own_inputs(model):
        return False
    if len({parameter.device for parameter in model.parameters()} | {model.device}) > 1 or model.device.type == "meta":
        return False  # spread over devices or offloaded: one step's indices and masks lie on one device
    if rope.get("rope_type") in ("dynamic", "longrope"):
        return False  # frequencies that depend on the longest row of the batch would depend on the drafts
    layer_types = getattr(config, "layer_types", None)
    if not set(layer_types or ()) <= {"full_attention", "sliding_attention"}:
        return False  # chunked attention and the like: the probe's texts are too short to tell
    if model.config.model_type in TESTED_MODEL_TYPES and type(model).__module__.startswith("transformers."):
        return True
    if not layer_types and any(getattr(config, name, None) is not None for name in _WINDOWS):
        return False  # likewise: the window may be known to the model's own masks only
    if model not in _probed:
        _probed[model] = _probe(model)
    return _probed[model]


@torch.no_grad()
def _probe(model: PreTrainedModel) -> bool:
    """Compares a packed forward of two ragged rows with a tree against plain forwards of every path."""
    vocab_size = model.config.get_text_config(decoder=True).vocab_size
    prompts = [np.arange(1, 8) % vocab_size, np.arange(3, 6) % vocab_size]
    tree = DraftTree(np.arange(4) % vocab_size, np.array([-1, -1, 0, 1]), np.ones(4, np.float32))
    paths = [[], [0], [1], [0, 2], [1, 3]]
    modes = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        packed = PackedForward(model, num_rows=2, capacity=16)
        rows = [packed.add() for _ in prompts]
        logits, offsets = packed.forward([RowInput(row, prompt, tree) for row, prompt in zip(rows, prompts)])
        for prompt, offset in zip(prompts, offsets):
            for line, path in enumerate(paths):
                ids = torch.from_numpy(np.concatenate([prompt, tree.tokens[path]]))[None].to(logits.device)
                expected = model(input_ids=ids).logits[0, -1].float()
                error = (logits[offset + line].float() - expected).abs().max()
                if not error <= (0.1 if logits.dtype != torch.float32 else 1e-3) * expected.std():
                    return False
        return True
    except Exception:  # whatever goes wrong in a foreign model: it cannot be packed
        return False
    finally:
        for module, mode in modes:
            module.training = mode
