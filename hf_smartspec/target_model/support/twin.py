"""
Models for trials: small twins, the same architecture in a few narrow layers with every border at a few tokens, and
copies in float32.
"""

import copy
import re
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

Module = TypeVar("Module", bound=nn.Module)

# Config entries for lengths at which a model's behaviour changes, and their values in twins.
BORDERS = {
    "sliding_window": 5,
    "sliding_window_size": 5,
    "window_size": 5,
    "attention_window_size": 5,
    "keep_window_size": 6,
    "local_attention": 10,
    "attention_chunk_size": 5,
    "index_topk": 4,
    "index_block_size": 2,
    "indexer_budget": 4,
    "indexer_compress_ratio": 2,
    "index_topk_blocks": 2,
    "index_local_blocks": 1,
    "block_size": 4,
    "rel_extent": 8,
    "log_scaling_n_floor": 8,
    "floor_scale": 8,
    "position_bias_max_distance": 8,
}
TWIN_REACH = 22  # tokens that lead a twin across all its borders
ROPE_BORDER = 12  # original positions of a twin whose rotary embeddings depend on the length

_LAYERS = re.compile(r"(^|_)(n_layers?|num_layers|hidden_layers|(en|de)coder_layers|num_blocks)$")
# Sizes by the ends of their names (the first that fits counts), and their largest values in twins.
_SIZES = [
    (re.compile(names + "$"), most)
    for names, most in (
        (r"vocab_size(_per_layer_input|_base)?", 97),
        (r"max_position_embeddings|n_positions|max_seq_len|n_ctx|context_length|max_(target|source)_positions", 512),
        (r"attention_hidden_size", 64),  # of Zamba, twice the hidden size
        (r"qk_head_dim|attention_head_dim|lora_rank|kv_channels", 16),
        (r"head_dim|headdim|head_size|d_head|dim_head|d_kv|state_size|d_state", 8),
        (r"rotary_dim", 4),
        (r"(key_value|kv|num_key)_heads|query_groups", 2),
        (r"heads|n_head", 4),
        (r"(hidden|embedding|intermediate|feed_forward|output)_size|d_model|n_embd|emb(edding)?_dim|embed_dim", 32),
        (r"word_embed_proj_dim|ffn_dim|ffn_hidden_size|d_inner|dff|dim_ff|lru_width|dim_model_base|d_ssm", 32),
        (r"block_multiple_of|intermediate_multiple_size|intermediate_size_mlp", 32),
        (r"experts_per_tok(en)?|top_k_experts|moe_topk|moe_k", 2),
        (r"shared_experts|n_group|topk_group|expert_group|first_k_dense_replace", 1),
        (r"(^|_)n_?groups", 2),  # of Mamba-2, whose heads have as many channels as `expand` times the hidden size
        (r"expand", 1),
        (r"attn_layer_period", 2),  # of Jamba: every second layer attends
        (r"attn_layer_offset", 1),
        (r"experts|expert_num", 4),
    )
]
# Values in twins for entries that a config leaves at None, since some configs derive them from others.
_UNSET = {"num_key_value_heads": 4, "head_dim": 8, "num_experts_per_tok": 2}
_SHARED = "num_kv_shared_layers"  # the last ones
_ORIGINAL = "original_max_position_embeddings"
_SECTIONS = "mrope_section"  # the angles of each axis of an image
_SLOPE = "llama_4_scaling_beta"  # of factors of queries, which begin at the original positions
_NO_SIZES = ("id2label", "label2id", "model_type", "transformers_version", "architectures")


def borders(config: PreTrainedConfig) -> dict[str, int]:
    """Return the lengths at which a model's behaviour changes, by their names in its config."""
    return dict(_borders(config.to_dict()))


def _borders(values: dict[str, Any]) -> Iterator[tuple[str, int]]:
    """Yield (name, length) pairs; for equal names the shortest comes last, so that `dict` keeps it."""
    for name, value in values.items():
        if isinstance(value, dict) and name not in _NO_SIZES:
            yield from _borders(value)
            rates = value if name == "compress_rates" else {}
            yield from (("compress_rates", rate) for rate in rates.values())
        elif name in BORDERS and _is_number(value) and value > 1:
            yield name, value
    kinds = [str(item.get("rope_type")) for item in _ropes(values)]
    if "longrope" in kinds or any(_SLOPE in item for item in _ropes(values)):
        yield from (
            ("original_max_position_embeddings", item[_ORIGINAL]) for item in _ropes(values) if _ORIGINAL in item
        )
    if any("dynamic" in kind for kind in kinds):
        yield "max_position_embeddings", values["max_position_embeddings"]


def _ropes(values: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the parameters of rotary embeddings: one set, or one for each type of layer."""
    rope = values.get("rope_parameters") or {}
    return [rope, *(item for item in rope.values() if isinstance(item, dict))]


def small_twin(model: PreTrainedModel) -> PreTrainedModel:
    """
    Return a model of the same class with random weights that are far apart, on the CPU in float32.

    Raises:
        Exception: of any kind, if sizes in its config depend on one another in unknown ways.
    """
    # Independent of the caller's random state and default device.
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        twin = type(model)._from_config(small_config(model.config), dtype=torch.float32)
    return sharpened(twin.eval().requires_grad_(False))


@torch.no_grad()
def float32_copy(module: Module, shared: Iterable[Any] = ()) -> Module:
    """
    Copy a module to float32 without a copy in its own dtype on the way. Parameters that need no conversion are the
    module's own: use the copy for forwards only.

    Args:
        shared (iterable): Objects that the module and its copy have in common.
    """
    memo = {id(item): item for item in shared}
    for parameter in module.parameters():
        wide = nn.Parameter(parameter.float(), requires_grad=False) if _is_converted(parameter) else parameter
        memo[id(parameter)] = wide
    memo |= {id(buffer): buffer.float() for buffer in module.buffers() if _is_converted(buffer)}
    return copy.deepcopy(module, memo)


def _is_converted(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() and tensor.dtype != torch.float32


def sharpened(model: PreTrainedModel, seed: int = 0) -> PreTrainedModel:
    """Give the model random weights so large that its scores are far apart, and return it."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.3, generator=generator)
    return model


def small_config(config: PreTrainedConfig, **changes: Any) -> PreTrainedConfig:
    """Return the config of a model's small twin; `changes` take precedence."""
    values = {key: value for key, value in config.to_dict().items() if key not in _NO_SIZES}
    small = type(config)(**_shrunk(values) | changes)
    small._attn_implementation_internal = config._attn_implementation_internal
    return small


def _shrunk(values: dict[str, Any]) -> dict[str, Any]:
    num_layers = max((value for key, value in values.items() if _is_number(value) and _LAYERS.search(key)), default=0)
    kept = _num_layers(values, num_layers)
    small = {key: _small(key, value, values, num_layers, kept) for key, value in values.items()}
    for parameters in _ropes(small):
        _shrink_rope(parameters, small)
    return small


def _num_layers(values: dict[str, Any], num_layers: int) -> int:
    """
    Return the number of first layers that have all kinds of layers among them; two at least. Where the last ones share
    the keys and values of others, about as many of these follow, and the last is of the kind that the model's last is.
    """
    entries = [
        (key, value) for key, value in values.items() if isinstance(value, list) and not _names_layers(key, value)
    ]
    lists = [value for _, value in entries if len(value) == num_layers > 0]
    kinds = [str([item[layer] for item in lists]) for layer in range(num_layers)]
    lists_of_numbers = [value for key, value in values.items() if isinstance(value, list) and _names_layers(key, value)]
    named = [value[0] + 1 for value in lists_of_numbers if value]
    named += [len(values.get("block_types") or ())]  # of RecurrentGemma: a pattern, which is repeated
    kept = min(max([2, *named, *(kinds.index(kind) + 1 for kind in set(kinds))]), num_layers)
    if not (num_shared := values.get(_SHARED)):
        return kept
    most = range(kept + min(kept, num_shared), num_layers)
    return next((number for number in most if kinds[number - 1] == kinds[-1]), num_layers)


def _small(key: str, value: Any, values: dict[str, Any], num_layers: int, kept: int) -> Any:
    """Return one entry of a twin's config."""
    if key == "per_layer_config" and isinstance(value, dict):
        return {layer: item for layer, item in value.items() if int(layer) < kept}
    if isinstance(value, dict):
        return _shrunk({name: item for name, item in value.items() if name not in _NO_SIZES[:2]})
    if isinstance(value, list) and _names_layers(key, value):
        return [layer for layer in value if layer < kept]
    if isinstance(value, list):
        return value[:kept] if len(value) == num_layers else value
    if value is None:
        return _UNSET.get(key)
    if not _is_number(value):
        return value
    if key.endswith("token_id"):
        return {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}.get(key, min(value, 96))
    if key in BORDERS and value > 0:
        return BORDERS[key]
    if _LAYERS.search(key):
        return min(value, kept)
    if key == _SHARED:
        return min(value, kept // 2)
    queries = "linear_num_value_heads" if key == "linear_num_key_heads" else "num_attention_heads"
    if re.search(r"(key_value|kv|num_key)_heads$", key) and value == values.get(queries):
        return min(value, 4)
    return next((min(value, most) for names, most in _SIZES if names.search(key)), value)


def _names_layers(key: str, value: list[Any]) -> bool:
    """Return whether a list holds numbers of layers, rather than one entry for each layer."""
    is_rising = all(_is_number(item) for item in value) and value == sorted(set(value))
    return is_rising and re.search(r"layers?(_ids|_indices)?$|idxs$", key) is not None


def _shrink_rope(parameters: dict[str, Any], values: dict[str, Any]) -> None:
    """Set few original positions, and factors or sections for as many dimensions as there are."""
    size = 0
    if parameters.get("rope_type") == "longrope" or _SECTIONS in parameters:
        head_dim = values.get("head_dim") or values["hidden_size"] // values["num_attention_heads"]
        size = int(head_dim * parameters.get("partial_rotary_factor", 1.0)) // 2
    if _SECTIONS in parameters:
        sections = parameters[_SECTIONS]
        first = [part * size // sum(sections) for part in sections[:-1]]
        parameters[_SECTIONS] = [*first, size - sum(first)]
    if parameters.get("rope_type") == "longrope":
        parameters["original_max_position_embeddings"] = ROPE_BORDER
        for name in ("short_factor", "long_factor"):
            parameters[name] = [1.0, 3.0, 5.0, 9.0][:size] if name == "long_factor" else [1.0] * size
        if "original_max_position_embeddings" in values:
            values["original_max_position_embeddings"] = ROPE_BORDER
    elif _SLOPE in parameters:
        parameters[_ORIGINAL] = ROPE_BORDER
    elif "dynamic" in str(parameters.get("rope_type")):
        values["max_position_embeddings"] = ROPE_BORDER


def _is_number(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
