"""Files of EAGLE's heads: what they are called where, and which sizes they have."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, PreTrainedConfig, PreTrainedModel

from ..committed import LAST
from .files import CONFIG, config_of, folder_of, read_tensors, tensor_names

# Of the names in files, these parts are left out: there is one layer only.
_PREFIXES = ("midlayer.", "layers.0.", "self_attn.", "mlp.")
_THIRD_LAYER = "midlayer."
_ATTENTION, _MLP = ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm"), ("gate_proj", "up_proj", "down_proj")
_NORMS = ("input_layernorm", "hidden_norm", "post_attention_layernorm")
_ALONE = ("fc", "norm", "lm_head", "embed_tokens", "input_norm")
_KNOWN = {*_ATTENTION, *_MLP, *_NORMS, *_ALONE}
_IDS = "eagle_aux_hidden_state_layer_ids"
_OPTIONS = ("norm_before_residual", "norm_output")


def says_eagle(name: str, config: Mapping[str, Any] | None = None) -> bool:
    """Whether a folder or hub id holds EAGLE's heads, by its config, or by what its tensors are called."""
    config = config_of(name) if config is None else config
    kinds = [str(config.get(key, "")) for key in ("model_type", "speculators_model_type")]
    kinds += map(str, config.get("architectures") or ())
    if "speculators_model_type" in config:
        return config["speculators_model_type"] in ("eagle", "eagle3")
    if "draft_vocab_size" in config or any("eagle" in kind.lower() for kind in kinds):
        return True
    # EAGLE-1's config is that of a model of one layer, and nothing else.
    return config.get("num_hidden_layers") == 1 and "fc.weight" in tensor_names(name)


def read(name: str | Path, target: PreTrainedModel) -> tuple[LlamaConfig, dict[str, torch.Tensor], tuple[int, ...]]:
    """
    Of a folder or hub id: the config of the layer, its tensors under their short names (`q_proj.weight`, ...), and the
    target's hidden states that it looks at.

    Raises:
        ValueError: for files that hold no such heads.
    """
    found = config_of(str(name))
    tensors = read_tensors(folder_of(name))
    try:
        tensors = _short(tensors)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    if "fc.weight" not in tensors or "o_proj.weight" not in tensors:
        raise ValueError(f"{name} holds no heads of EAGLE: its tensors are named {sorted(tensors)[:5]} ...")
    return _layer_config(found, tensors), tensors, _hidden_layers(found, tensors, target)


def _short(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    short = {}
    for name, tensor in tensors.items():
        name = name.removeprefix("model.")
        if name.startswith("layers.1."):
            raise ValueError("these heads have more than one layer, of which only EAGLE's single one is known")
        if name.startswith("fc_norm."):
            raise ValueError("norms of every hidden state (`fc_norm`) are not known")
        for prefix in _PREFIXES:
            name = name.removeprefix(prefix)
        if name in ("d2t", "t2d") or name.rpartition(".")[0] in _KNOWN:
            short[name] = tensor
    short.pop("t2d", None)  # which tokens `d2t` names
    return short


def _layer_config(found: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> LlamaConfig:
    options = {name: bool(found[name]) for name in _OPTIONS if name in found}
    inner = found.get("transformer_layer_config")
    config: LlamaConfig = LlamaConfig.from_dict({**(inner if isinstance(inner, dict) else found), **options})
    if "q_norm.weight" in tensors:
        config.head_dim = len(tensors["q_norm.weight"])
    return config


def _hidden_layers(
    found: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], target: PreTrainedModel
) -> tuple[int, ...]:
    if "hidden_norm.weight" not in tensors:
        return (LAST,)
    if found.get(_IDS):
        return tuple(found[_IDS])
    of_outputs = (found.get("eagle_config") or {}).get(_IDS)
    if of_outputs:  # SpecForge counts layers by what they leave, not by what they read
        return tuple(number + 1 for number in of_outputs)
    return default_layers(target)


def default_layers(target: PreTrainedModel) -> tuple[int, ...]:
    """A low, a middle and a high one, as EAGLE-3's authors choose them."""
    num = target.config.get_text_config(decoder=True).num_hidden_layers
    return min(2, num - 1), num // 2, max(num - 3, 0)


def check_shapes(
    config: LlamaConfig, tensors: Mapping[str, torch.Tensor], num_states: int, target: PreTrainedConfig
) -> None:
    """
    Args:
        num_states (`int`): Hidden states of the target, side by side.
        target (`PreTrainedConfig`): Of its decoder.

    Raises:
        ValueError: naming tensors that are missing, or of other sizes than the config and the target have.
    """
    is_third, hidden = "hidden_norm.weight" in tensors, config.hidden_size
    head_dim, kv_heads = config.head_dim or 0, config.num_key_value_heads or 0  # which configs fill in
    queries, keys = config.num_attention_heads * head_dim, kv_heads * head_dim
    reads, states, line = 2 * hidden if is_third else hidden, num_states * target.hidden_size, (hidden,)
    expected: dict[str, tuple[int, ...]] = {
        "fc": (hidden, states if is_third else hidden + target.hidden_size),
        "q_proj": (queries, reads),
        "k_proj": (keys, reads),
        "v_proj": (keys, reads),
        "o_proj": (hidden, queries),
        "gate_proj": (config.intermediate_size, hidden),
        "up_proj": (config.intermediate_size, hidden),
        "down_proj": (hidden, config.intermediate_size),
        "post_attention_layernorm": line,
    }
    if is_third:
        expected |= {"input_layernorm": line, "hidden_norm": line, "norm": line}
    if "input_norm.weight" in tensors:
        expected["input_norm"] = (states,)
    for name in ("q_norm", "k_norm"):
        if "q_norm.weight" in tensors or "k_norm.weight" in tensors:
            expected[name] = (head_dim,)
    if "embed_tokens.weight" in tensors or hidden != target.hidden_size:
        expected["embed_tokens"] = (target.vocab_size, hidden)
    found = {name: tuple(tensors[f"{name}.weight"].shape) if f"{name}.weight" in tensors else None for name in expected}
    if wrong := [name for name in expected if found[name] != expected[name]]:
        said = [f"`{name}` {found[name] or '(missing)'} in place of {expected[name]}" for name in wrong]
        raise ValueError(
            f"heads of EAGLE do not fit a target of hidden size {target.hidden_size} and {target.vocab_size} tokens: "
            f"{', '.join(said)}"
        )
    _check_outputs(tensors, hidden, target)


def _check_outputs(tensors: Mapping[str, torch.Tensor], hidden: int, target: PreTrainedConfig) -> None:
    head, offsets = tensors.get("lm_head.weight"), tensors.get("d2t")
    shape = (target.vocab_size, target.hidden_size) if head is None else tuple(head.shape)
    num = target.vocab_size if offsets is None else len(offsets)
    if shape != (num, hidden):
        raise ValueError(
            f"an output of shape {shape} does not fit {num} tokens of hidden size {hidden}"
            + ("" if offsets is not None else ", and no `d2t` says which tokens it is of")
        )
    if offsets is not None:
        ids = offsets.long() + torch.arange(num, device=offsets.device)
        if num and not 0 <= int(ids.min()) <= int(ids.max()) < target.vocab_size:
            raise ValueError(f"`d2t` names tokens beyond the target's {target.vocab_size}")


def write(
    folder: str | Path,
    config: LlamaConfig,
    tensors: Mapping[str, torch.Tensor],
    hidden_layers: Sequence[int],
    vocab_size: int,
    entries: Mapping[str, Any],
) -> None:
    """Tensors under their short names, and the config with further entries, as the authors' code reads them."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    is_third, offsets = "hidden_norm.weight" in tensors, tensors.get("d2t")
    named = {_long(name, is_third): item.detach().contiguous().cpu() for name, item in tensors.items()}
    if offsets is not None:
        known = torch.zeros(vocab_size, dtype=torch.bool)
        known[named["d2t"] + torch.arange(len(offsets))] = True
        named["t2d"] = known
    save_file(named, folder / "model.safetensors")
    content = config.to_dict() | {"num_hidden_layers": 1, "vocab_size": vocab_size}
    content["architectures"] = ["LlamaForCausalLMEagle3" if is_third else "LlamaForCausalLMEagle"]
    if is_third:
        content |= {"draft_vocab_size": vocab_size if offsets is None else len(offsets), _IDS: list(hidden_layers)}
    (folder / CONFIG).write_text(json.dumps(content | dict(entries), indent=2) + "\n", encoding="utf-8")


def _long(name: str, is_third: bool) -> str:
    part = name.rpartition(".")[0]
    if part in _ALONE or not part:
        return name
    inner = "self_attn." if part in _ATTENTION else "mlp." if part in _MLP else ""
    return f"{_THIRD_LAYER if is_third else 'layers.0.'}{inner}{name}"
