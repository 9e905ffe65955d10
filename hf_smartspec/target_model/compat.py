"""Code that depends on the version of transformers or torch."""

import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch
import transformers
from packaging.version import Version
from torch import nn
from transformers import Cache, DynamicCache, GenerationConfig, GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.generation import utils as generation_utils
from transformers.generation.continuous_batching.requests import GenerationOutput, RequestStatus
from transformers.utils import ModelOutput

from .private import TRANSFORMERS, private_function, private_value

__all__ = ["GenerationOutput", "RequestStatus"]  # classes of continuous batching, whose module may change

if not Version("5.20") <= TRANSFORMERS < Version("6"):
    raise ImportError(f"hf-smartspec needs transformers >=5.20,<6; {transformers.__version__} is installed.")


def cache_name(function: Callable[..., Any]) -> str:
    """
    Return the name of the argument that takes the cache in the forward of a model or layer: "cache" from 5.24 on,
    "past_key_values" before, and in third-party models that have kept it; `CACHE` where the signature has neither.
    """
    parameters = inspect.signature(function).parameters
    for name in ("cache", "past_key_values"):
        if name in parameters:
            return name
    return CACHE


# Name of the cache among the arguments that `generate` prepares, and in the outputs of `generate` and of models.
CACHE = cache_name(GenerationMixin.prepare_inputs_for_generation)

# Names of caches, and of other models' states.
CACHE_NAMES = private_value(
    "transformers.generation.utils",
    "ALL_CACHE_NAMES",
    [CACHE, "state", "mems", "past_buckets_states"],
    "engines of models that are decoded without speculation",
)

# Model arguments that hold images, videos or sounds, or their encodings by `generate`.
MEDIA_KWARGS: tuple[str, ...] = private_value(
    "transformers.generation.utils",
    "MULTIMODAL_INPUTS_TO_DROP_OUTSIDE_PREFILL",
    ("mm_encoder_outputs", "pixel_values"),
    "prompts with images",
)

# Functions with which transformers' assisted decoding prepares every forward of a row.
prepare_attention_mask, prepare_position_ids, prepare_token_type_ids = [
    private_function("transformers.generation.candidate_generator", name, "models that run row by row")
    for name in ("_prepare_attention_mask", "_prepare_position_ids", "_prepare_token_type_ids")
]

# Architectures whose packed forward this project's tests compare with the model's own. Models of other types are
# probed at their first use (`support.can_pack`).
TESTED_MODEL_TYPES = frozenset(
    "llama mistral qwen2 qwen3 qwen3_moe gemma2 gemma3_text gpt2 opt phi phi3 gpt_neox olmo olmo2 olmo3 mixtral "
    "granite granitemoe cohere cohere2 stablelm smollm3 starcoder2 glm glm4 gpt_bigcode helium qwen2_moe olmoe "
    "nemotron persimmon exaone4 ernie4_5 seed_oss biogpt gpt_oss".split()
)

# The same for decoders that attend to an encoder's outputs.
TESTED_ENCODED_TYPES = frozenset("t5 mt5 umt5 t5gemma bart mbart whisper".split())

# The same for models that run row by row. Models of other types are probed (`support.rowwise_obstacle`).
TESTED_ROWWISE_TYPES = frozenset("bloom falcon mpt gptj codegen gpt_neo xglm llama4_text t5 bart".split())

# Names that configs have for the reach of local attention.
WINDOWS = ("sliding_window", "window_size", "attention_chunk_size")


def is_stateful(model: PreTrainedModel) -> bool:
    """
    Return whether the model's state cannot be rolled back to an earlier token: true of state-space and recurrent
    models, and of those with a cache of their own in place of transformers' (MiniMax, XLNet, ...).
    """
    return bool(model._is_stateful) or not model._supports_default_dynamic_cache()  # type: ignore[operator]


def new_cache(model: PreTrainedModel) -> Cache:
    """Return an empty cache of the class that `generate` uses for a decoder."""
    if model._supports_default_dynamic_cache():  # type: ignore[operator]
        return DynamicCache(config=model.config.get_text_config(decoder=True))
    own = sys.modules[type(model.get_decoder()).__module__]  # of MiniMax; a caller's class may be elsewhere
    classes = [item for item in vars(own).values() if isinstance(item, type) and item.__module__ == own.__name__]
    return next(item for item in classes if issubclass(item, Cache))()


def cached_length(cache: Any) -> int:
    """Return the number of tokens in transformers' cache; 1 where it has states only, of any number of tokens."""
    try:
        return cache.get_seq_length()
    except ValueError:  # only layers of attention count tokens
        return int(cache.has_previous_state())


def shared_value(config: PreTrainedConfig, name: str) -> Any:
    """
    Return an entry of a config that all layers share; None where each layer has its own (Gemma 4) or the config lacks
    it.
    """
    try:
        return getattr(config, name, None)
    except RuntimeError:
        return None


def drops_soft_caps(model: PreTrainedModel) -> bool:
    """Return whether the model's attention leaves out its soft caps (Gemma 2): before 5.21, the default (sdpa) does."""
    config = model.config.get_text_config(decoder=True)
    is_capped = shared_value(config, "attn_logit_softcapping") is not None
    return is_capped and Version("5.21") > TRANSFORMERS and config._attn_implementation == "sdpa"


def num_positions(config: PreTrainedConfig) -> int | None:
    """Return the number of positions that a decoder with this config has; None where it is unlimited."""
    positions = getattr(config, "max_position_embeddings", None)
    positions = getattr(config, "max_target_positions", None) if positions is None else positions
    return None if positions is None or positions < 0 else positions  # -1: XLNet


def modules_of(model: nn.Module) -> list[nn.Module]:
    """Return a model and all modules in it, as `model.modules()` does, whose nested generators take longer."""
    modules, known = [model], {model}
    for module in modules:  # the list grows meanwhile
        for child in module._modules.values():
            if child is not None and child not in known:
                known.add(child)
                modules.append(child)
    return modules


def is_checkpointing(model: PreTrainedModel) -> bool:
    """Return whether activations are recomputed in training."""
    # 5.23 deprecates `model.is_gradient_checkpointing`, and older versions have no other name for it.
    return any(getattr(module, "gradient_checkpointing", False) for module in modules_of(model))


def splits_outputs(model: PreTrainedModel) -> bool:
    """
    Return whether the `generate` of the model's class takes apart the outputs of the common one: Whisper's splits every
    entry by rows, and handles only entries that transformers defines.
    """
    own = type(model).__mro__[: type(model).__mro__.index(GenerationMixin)]
    return any("generate" in vars(item) and item.__module__.startswith("transformers.") for item in own)


def delegates_generate(model: PreTrainedModel) -> bool:
    """Return whether the `generate` of the model's class calls the common one with all arguments, clip by clip."""
    modules = [item.__module__ for item in type(model).__mro__ if "generate" in vars(item)]
    return modules[:1] == ["transformers.models.whisper.generation_whisper"]


def is_synchronized(model: PreTrainedModel) -> bool:
    """
    Return whether transformers runs equally many steps in every process, since each holds a part of the weights
    (ZeRO-3, FSDP). transformers finds out by itself, and does not pass this to a callable `custom_generate`.
    """
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1):
        return False
    return generation_utils.is_deepspeed_zero3_enabled() or generation_utils.is_fsdp_managed_module(model)


def run_encoder(
    model: PreTrainedModel, input_ids: torch.LongTensor, model_kwargs: dict[str, Any], config: GenerationConfig
) -> ModelOutput:
    """Return the outputs of the model's encoder for a prompt, computed as `generate` does."""
    prepare: Any = model._prepare_text_encoder_decoder_kwargs_for_generation
    kwargs = {key: value for key, value in model_kwargs.items() if key not in ("encoder_outputs", "logits_to_keep")}
    return prepare(input_ids, kwargs, "input_ids", config)["encoder_outputs"]


def renewal_length(model: PreTrainedModel) -> int | None:
    """
    Return the length of the padded batch after which the model's `prepare_inputs_for_generation` has all keys and
    values recomputed, with the frequencies for long texts; None for models that keep them.
    """
    if model.config.model_type not in ("phi3", "phimoe", "phi4_multimodal"):
        return None
    return getattr(model.config, "original_max_position_embeddings", None)
