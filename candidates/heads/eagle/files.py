"""Files of EAGLE's heads: names and sizes of their tensors."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, PreTrainedConfig, PreTrainedModel

from ....log import get_logger
from ..files import CONFIG, check_numbers, config_of, folder_of, kinds_of, read_tensors, tensor_names
from .config import IDS, check_kind, check_layers, flat_config, hidden_layers, layer_config

logger = get_logger(__name__)

# Of the names in files, these parts are left out: there is one layer only.
_LEFT_OUT = re.compile(r"(model\.)*(midlayer\.|layers\.0\.)?((self_attn|mlp)\.)?")
_FURTHER_LAYER = re.compile(r"(model\.)*(mid)?layers\.[1-9]")
# Tensors that drafting does not need: which tokens `d2t` names, what belongs to the target, what follows from configs.
_UNUSED = re.compile(r"(.*\.)?(t2d|(verifier_|rotary_emb\.).*)")
_FIRST_FC = {"fc.weight", "model.fc.weight"}
_MOST_LAYERS = 2  # of published heads of EAGLE-1 and its kin
_THIRD_LAYER = "midlayer."
_ATTENTION, _MLP = ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm"), ("gate_proj", "up_proj", "down_proj")
_NORMS = ("input_layernorm", "hidden_norm", "post_attention_layernorm")
_ALONE = ("fc", "norm", "lm_head", "embed_tokens", "input_norm")
_KNOWN = {*_ATTENTION, *_MLP, *_NORMS, *_ALONE}


def is_eagle_checkpoint(name: str, config: Mapping[str, Any] | None = None) -> bool:
    """Return whether a folder or hub id holds EAGLE's heads, by its config or by the names of its tensors."""
    config = config_of(name) if config is None else config
    if "speculators_model_type" in config:
        return config["speculators_model_type"] in ("eagle", "eagle3", "peagle")
    if "draft_vocab_size" in config or any("eagle" in kind for kind in kinds_of(config)):
        return True
    # EAGLE-1's config is that of a model of one layer, and may not even say so.
    is_small = bool(config) and config.get("num_hidden_layers", 1) in range(1, _MOST_LAYERS + 1)
    return is_small and "n_layer" not in config and not _FIRST_FC.isdisjoint(tensor_names(name))


def read(
    name: str | Path, target: PreTrainedModel, layers: Sequence[int] | None = None
) -> tuple[LlamaConfig, dict[str, torch.Tensor], tuple[int, ...]]:
    """
    Return the config of the layer of a folder or hub id, its tensors under their short names (`q_proj.weight`, ...),
    and the target's hidden states that it reads: `layers`, where these are given.

    Raises:
        ValueError: for files that hold no such heads, or such as are not known; it names the folder and the reason.
    """
    config = flat_config(config_of(str(name)))
    tensors = read_tensors(folder_of(name))
    try:
        check_kind(config, any("hidden_norm." in key for key in tensors))
        tensors = _short(tensors)
        is_third = "hidden_norm.weight" in tensors
        if is_third and _says(config, "norm_before_fc") and "input_norm.weight" not in tensors:
            raise ValueError("`norm_before_fc` is true, and there is no `input_norm.weight`")
        num_layers = target.config.get_text_config(decoder=True).num_hidden_layers
        if layers is None:
            found, origin = hidden_layers(config, is_third, target)
        else:
            check_layers("hidden_layers", list(layers), num_layers)
            found, origin = tuple(layers), "`hidden_layers`"
        sizes = layer_config(config, tensors)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    if is_third:
        logger.info(f"{name} reads hidden states {list(found)} (k: what layer k of {num_layers} reads), by {origin}.")
    return sizes, tensors, found


def _says(config: Mapping[str, Any], entry: str) -> bool:
    nested = config.get("eagle_config")
    return bool(config.get(entry) or (isinstance(nested, dict) and nested.get(entry)))


def _short(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """
    Return the heads' tensors under short names.

    Raises:
        ValueError: for tensors that are missing, or that the heads would have to be computed with in another way.
    """
    check_numbers({name: item for name, item in tensors.items() if not name.endswith(("d2t", "t2d"))})
    if any(map(_FURTHER_LAYER.match, tensors)):
        raise ValueError("these heads have more than one layer, of which only EAGLE's single one is known")
    short, unknown = {}, []
    for name, tensor in tensors.items():
        own = _LEFT_OUT.sub("", name, count=1)
        part, _, kind = own.rpartition(".")
        if own == "d2t" or (part in _KNOWN and kind in ("weight", "bias")):
            short[own] = tensor
        elif not _UNUSED.fullmatch(name):
            unknown.append(name)
    if missing := [f"{part}.weight" for part in ("fc", "o_proj") if f"{part}.weight" not in short]:
        raise ValueError(f"holds no heads of EAGLE: it lacks `{missing[0]}`, and has {sorted(tensors)[:5]} ...")
    if "mask_hidden" in unknown:
        raise ValueError("these heads draft in parallel (P-EAGLE, by `mask_hidden`), which is not known")
    if unknown:
        raise ValueError(f"these heads have tensors that are not known: {', '.join(sorted(unknown)[:5])}")
    if "hidden_norm.weight" not in short:
        # The first layer of EAGLE-1 has no norm before attention, and none after it: files may have kept a Llama's.
        for norm in ("input_layernorm", "norm"):
            short.pop(f"{norm}.weight", None)
    return short


def check_shapes(
    config: LlamaConfig, tensors: Mapping[str, torch.Tensor], num_states: int, target: PreTrainedConfig
) -> None:
    """
    Args:
        num_states (`int`): Hidden states of the target, side by side.
        target (`PreTrainedConfig`): Config of its decoder.

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
            + ("" if offsets is not None else ", and there is no `d2t` to map it to tokens")
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
    """
    Write tensors, given by their short names, and the config with further entries, as the authors' code reads them.
    """
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
        content |= {"draft_vocab_size": vocab_size if offsets is None else len(offsets), IDS: list(hidden_layers)}
    (folder / CONFIG).write_text(json.dumps(content | dict(entries), indent=2) + "\n", encoding="utf-8")


def _long(name: str, is_third: bool) -> str:
    part = name.rpartition(".")[0]
    if part in _ALONE or not part:
        return name
    inner = "self_attn." if part in _ATTENTION else "mlp." if part in _MLP else ""
    return f"{_THIRD_LAYER if is_third else 'layers.0.'}{inner}{name}"
