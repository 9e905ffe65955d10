"""Configs of EAGLE's heads: the layers' sizes, and which hidden states of the target they read."""

from collections.abc import Mapping
from typing import Any

import torch
from transformers import LlamaConfig, PreTrainedModel
from transformers.activations import ACT2FN
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from ...committed import LAST

IDS = "eagle_aux_hidden_state_layer_ids"
_EAGLE_CONFIG = "eagle_config"
# Where writers put the config of the layer: speculators; vLLM, whose other entries override it; ModelOpt.
_NESTED = ("transformer_layer_config", "model", _EAGLE_CONFIG)
# Entries that say nothing of the layer's sizes, or are read here.
_NOT_SIZES = {
    *_NESTED, "architectures", "auto_map", "layer_types", "model_type", "num_hidden_layers", "sliding_window", IDS
}  # fmt: skip
_SLIDING, _FULL = "sliding_attention", "full_attention"
# Entries of drafters that draft all tokens of a draft in one forward (P-EAGLE), by speculators, vLLM and SpecForge.
MASK_TOKEN, DEPTHS = "mask_token_id", "para_depths"
_MASK_TOKENS, _DEPTHS = (MASK_TOKEN, "ptd_token_id", "pard_token"), (DEPTHS, "para_num")
_NUM_DEPTHS = 8  # that speculators trains
# Entries that add norms to EAGLE-1, and the value that does so, by vLLM, ModelOpt and speculators.
_FURTHER_NORMS = {
    "add_para_norm": True,
    "layernorms": True,
    "skip_output_norm": False,
    "skip_prenorm": False,
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
}
_NO_SHIFT = "gpt_oss"  # model type of targets


def flat_config(found: Mapping[str, Any]) -> dict[str, Any]:
    """Merge the nested config of the layer, if there is one, into the file's other entries."""
    for key in _NESTED:
        inner = found.get(key)
        if isinstance(inner, dict) and "hidden_size" in inner:
            return {**inner, **{name: value for name, value in found.items() if value is not None}}
    return dict(found)


def check_kind(config: Mapping[str, Any], is_third: bool) -> None:
    """
    Args:
        config (mapping): Result of `flat_config`.

    Raises:
        ValueError: for heads whose arithmetic is another one than that of EAGLE-1, 2 or 3.
    """
    entries = {**_eagle_entries(config), **config}
    if is_third and entries.get("use_aux_hidden_state") is False:
        raise ValueError("these heads of EAGLE-3 read no layers of the target (`use_aux_hidden_state`: false)")
    further = [name for name, value in _FURTHER_NORMS.items() if entries.get(name) is value]
    if not is_third and further:
        raise ValueError(f"these heads of EAGLE-1 have norms that are not known (`{further[0]}`)")


def flag_of(config: Mapping[str, Any], entry: str) -> bool | None:
    """Return an entry that is true or false, None where it is missing; raise `ValueError` for all else ("false")."""
    value = config.get(entry)
    if not isinstance(value, bool | None):
        raise ValueError(f"`{entry}` must be true or false, and is {value!r}")
    return value


def is_set(config: Mapping[str, Any], entry: str) -> bool:
    """Return whether an entry is true, at the top or in `eagle_config`."""
    return any([flag_of(config, entry), flag_of(_eagle_entries(config), entry)])


def _parallel(config: Mapping[str, Any], has_mask: bool) -> dict[str, int]:
    """
    Return the entries of heads that draft all depths in one forward, which have a `mask_hidden`: the token that stands
    in for those that are drafted, and the number of depths. Others have none.
    """
    entries = {**_eagle_entries(config), **config}
    if not has_mask:
        kinds = [str(config.get("speculators_model_type", "")), *map(str, config.get("architectures") or ())]
        signs = [name for name in (*_MASK_TOKENS, *_DEPTHS) if entries.get(name) is not None]
        signs += ["parallel_drafting"] * bool(entries.get("parallel_drafting"))
        signs += [kind for kind in kinds if "peagle" in kind.lower()]
        if signs:
            raise ValueError(f"these heads draft in parallel (P-EAGLE, by {signs[0]!r}), and have no `mask_hidden`")
        return {}
    methods = (config.get("speculators_config") or {}).get("proposal_methods") or [{}]
    num_depths = methods[0].get("speculative_tokens", _NUM_DEPTHS)
    found = {
        MASK_TOKEN: next((entries[name] for name in _MASK_TOKENS if entries.get(name) is not None), None),
        DEPTHS: next((entries[name] for name in _DEPTHS if entries.get(name) is not None), num_depths),
    }
    for name, least in ((MASK_TOKEN, 0), (DEPTHS, 1)):
        if type(found[name]) is not int or found[name] < least:
            raise ValueError(
                f"`{name}` of heads that draft in parallel (P-EAGLE) must be an integer of at least {least}, got "
                f"{found[name]!r}"
            )
    return found


def layer_config(config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], num_layers: int) -> LlamaConfig:
    """
    Return the config of the heads' layers.

    Args:
        config (mapping): Result of `flat_config`.
        tensors (mapping of `str` to `torch.Tensor`): Weights under the names of `files`.
        num_layers (`int`): Number of layers among them.

    Raises:
        ValueError: naming an entry whose value is not known.
    """
    entries = {name: value for name, value in config.items() if name not in _NOT_SIZES}
    _check_activation(entries.get("hidden_act"))
    entries |= rope_of(entries) | _windows(config, num_layers) | {"num_hidden_layers": num_layers}
    entries |= _parallel(config, "mask_hidden" in tensors) | {"norm_output": is_set(config, "norm_output")}
    # vLLM's default, and its default for files of speculators.
    is_before = flag_of(config, "norm_before_residual")
    entries["norm_before_residual"] = (
        config.get("speculators_model_type") == "eagle3" if is_before is None else is_before
    )
    try:
        layer: LlamaConfig = LlamaConfig.from_dict(entries)
        if "q_norm.weight" in tensors:
            layer.head_dim = len(tensors["q_norm.weight"])
        LlamaRotaryEmbedding(layer)
    except Exception as error:  # of many kinds, for values of other types, and for entries that are missing
        raise ValueError(f"its config cannot be used: {' '.join(str(error).split())}") from error
    return layer


def _check_activation(name: Any) -> None:
    if name is not None and name not in ACT2FN:
        raise ValueError(f"`hidden_act` is {name!r}, and known are {', '.join(sorted(ACT2FN))}")


def rope_of(entries: Mapping[str, Any]) -> dict[str, Any]:
    """
    Return the rotary embeddings' entry, of a known kind. Multimodal ones (mrope) count three positions, which are equal
    in text.
    """
    key = "rope_parameters" if entries.get("rope_parameters") else "rope_scaling"
    rope = entries.get(key)
    if not isinstance(rope, dict):
        return {}
    rope = {name: value for name, value in rope.items() if not name.startswith("mrope_")}
    kind = rope.pop("type", None)
    kind = rope.get("rope_type") or kind or "default"
    if kind == "mrope":
        kind = "default"
    if kind != "default" and kind not in ROPE_INIT_FUNCTIONS:
        known = ", ".join(["default", "mrope", *ROPE_INIT_FUNCTIONS])
        raise ValueError(f"`rope_type` in `{key}` is {kind!r}, and known are {known}")
    return {key: rope | {"rope_type": kind}}


def _windows(config: Mapping[str, Any], num_layers: int) -> dict[str, Any]:
    """
    Return the types of the layers: the first ones, where the entry has those of all layers of the target. Without
    types, layers attend to all tokens.
    """
    types = config.get("layer_types")
    if not types:
        return {}
    kinds = types[:num_layers] if isinstance(types, list) else [types] * num_layers
    window = config.get("sliding_window")
    if len(kinds) < num_layers or not {_SLIDING, _FULL}.issuperset(kinds):
        raise ValueError(
            f"`layer_types` is {types!r}, and must be {_SLIDING!r} or {_FULL!r} for each of {num_layers} layers"
        )
    if _SLIDING in kinds and (type(window) is not int or window < 1):
        raise ValueError(f"`sliding_window` must be a positive integer for {_SLIDING!r}, got {window!r}")
    return {"layer_types": kinds, "sliding_window": window}


def window_of(config: Any, layer: int) -> int | None:
    """Return the number of tokens that a layer attends to, its own included; None for all."""
    types = getattr(config, "layer_types", None)
    return config.sliding_window if types and types[layer] == _SLIDING else None


def hidden_layers(config: Mapping[str, Any], is_third: bool, target: PreTrainedModel) -> tuple[tuple[int, ...], str]:
    """
    Return the hidden states of the target that heads read, and the entry that names them.

    One key has two conventions. At the top (vLLM, speculators), k is what layer k reads. In `eagle_config` (SGLang,
    SpecForge, ModelOpt) it is that too, unless the first is 1: then k is what layer k leaves, but for targets of the
    gpt-oss family. Where both are there, the latter counts: trainers write it, and it is copied to the top for vLLM.

    Raises:
        ValueError: naming the key, its value, and what is accepted.
    """
    if not is_third:
        return (LAST,), "EAGLE-1 and 2"
    sizes = target.config.get_text_config(decoder=True)
    nested, ids = _eagle_entries(config).get(IDS), config.get(IDS)
    key = f"{_EAGLE_CONFIG}.{IDS}" if nested else IDS
    ids = nested or ids
    if not ids:
        return default_layers(target), "the default"
    is_shifted = ids is nested and isinstance(ids, list) and ids[0] == 1 and sizes.model_type != _NO_SHIFT
    check_layers(key, ids, sizes.num_hidden_layers, int(is_shifted))
    return tuple(number + is_shifted for number in ids), f"`{key}` {ids}"


def check_layers(key: str, ids: Any, num_layers: int, shift: int = 0) -> None:
    """Raise `ValueError` unless `ids`, counted up by `shift`, are hidden states of a target of so many layers."""
    is_list = isinstance(ids, list | tuple)
    if not is_list or not all(type(number) is int and 0 <= number + shift <= num_layers for number in ids):
        raise ValueError(
            f"`{key}` is {ids!r}, and must be a list of integers from 0 to {num_layers - shift} for a target of "
            f"{num_layers} layers"
        )


def default_layers(target: PreTrainedModel) -> tuple[int, ...]:
    """Return a low, a middle and a high layer, as EAGLE-3's authors choose them."""
    num = target.config.get_text_config(decoder=True).num_hidden_layers
    return min(2, num - 1), num // 2, max(num - 3, 0)


def _eagle_entries(config: Mapping[str, Any]) -> dict[str, Any]:
    entries = config.get(_EAGLE_CONFIG)
    return entries if isinstance(entries, dict) else {}
