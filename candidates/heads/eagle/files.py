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
from .config import IDS, MASK_TOKEN, check_kind, check_layers, flat_config, hidden_layers, is_set, layer_config

logger = get_logger(__name__)

_NAME = re.compile(
    r"(?:model\.)*(?:midlayer\.|layers\.(?P<layer>\d+)\.)?(?:(?:self_attn|mlp)\.)?"
    r"(?P<part>\w+)(?:\.(?P<number>\d+))?\.(?P<kind>weight|bias)"
)
# Tensors that drafting does not need: which tokens `d2t` names, what belongs to the target, what follows from configs.
_UNUSED = re.compile(r"(.*\.)?(t2d|(verifier_|rotary_emb\.).*)")
_FIRST_FC = {"fc.weight", "model.fc.weight"}
_MOST_LAYERS = 2  # of published heads of EAGLE-1 and its kin
_THIRD_LAYER = "midlayer."
_ATTENTION, _MLP = ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm"), ("gate_proj", "up_proj", "down_proj")
_NORMS, _FIRST = ("input_layernorm", "post_attention_layernorm"), ("hidden_norm",)  # of all layers, of the first
_ALONE = ("fc", "norm", "lm_head", "embed_tokens", "input_norm")
_OF_STATES = "fc_norm"  # one for each of the hidden states
_BARE = ("d2t", "mask_hidden")  # names without a kind
_KNOWN = {*_ATTENTION, *_MLP, *_NORMS, *_FIRST, *_ALONE, _OF_STATES}


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
        for entry, norm in (("norm_before_fc", "input_norm"), ("fc_norm", numbered(_OF_STATES, 0))):
            if is_third and is_set(config, entry) and f"{norm}.weight" not in tensors:
                raise ValueError(f"`{entry}` is true, and there is no `{_long(f'{norm}.weight', 1, is_third)}`")
        num_layers = target.config.get_text_config(decoder=True).num_hidden_layers
        if layers is None:
            found, origin = hidden_layers(config, is_third, target)
        else:
            check_layers("hidden_layers", list(layers), num_layers)
            found, origin = tuple(layers), "`hidden_layers`"
        sizes = layer_config(config, tensors, _num_layers(config, tensors))
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    if is_third:
        logger.info(f"{name} reads hidden states {list(found)} (k: what layer k of {num_layers} reads), by {origin}.")
    return sizes, tensors, found


def numbered(part: str, number: int) -> str:
    """
    Return the short name of a part in layer `number`: `q_proj`, `q_proj_1`, ...; of the norms of hidden states, which
    are numbered from 0, `fc_norm_0`, ...
    """
    return part if not number and part != _OF_STATES else f"{part}_{number}"


def _split(name: str) -> tuple[str, int]:
    """Return the part and the number of a short name without its kind."""
    part, _, number = name.rpartition("_")
    return (part, int(number)) if number.isdecimal() else (name, 0)


def _num_layers(config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> int:
    """Return the number of layers: that of the tensors, or, of speculators' files, that of the config if it is more."""
    parts = [_split(name.rpartition(".")[0]) for name in tensors]
    found = 1 + max([number for part, number in parts if part != _OF_STATES])
    wanted = config.get("num_hidden_layers") if "speculators_model_type" in config else found
    if type(wanted) is int and wanted < found:
        raise ValueError(f"its config has {wanted} layers (`num_hidden_layers`), and there are tensors of {found}")
    return max(found, wanted if type(wanted) is int else 0)


def _short(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """
    Return the heads' tensors under short names.

    Raises:
        ValueError: for tensors that are missing, or that the heads would have to be computed with in another way.
    """
    check_numbers({name: item for name, item in tensors.items() if not name.endswith(("d2t", "t2d"))})
    short, unknown = {}, []
    for name, tensor in tensors.items():
        own = _short_name(name)
        if own is not None:
            short[own] = tensor
        elif not _UNUSED.fullmatch(name):
            unknown.append(name)
    if missing := [f"{part}.weight" for part in ("fc", "o_proj") if f"{part}.weight" not in short]:
        raise ValueError(f"holds no heads of EAGLE: it lacks `{missing[0]}`, and has {sorted(tensors)[:5]} ...")
    if unknown:
        raise ValueError(f"these heads have tensors that are not known: {', '.join(sorted(unknown)[:5])}")
    if "hidden_norm.weight" not in short:
        # The first layer of EAGLE-1 has no norm before attention, and none after it: files may have kept a Llama's.
        for norm in ("input_layernorm", "norm"):
            short.pop(f"{norm}.weight", None)
    return short


def _short_name(name: str) -> str | None:
    """Return the short name of a file's tensor, or None."""
    bare, found = name.rpartition(".")[2], _NAME.fullmatch(name)
    if bare in _BARE:
        return bare
    if found is None:
        return None
    layer, part, number, kind = found.group("layer", "part", "number", "kind")
    known = (*_ATTENTION, *_MLP, *_NORMS) if int(layer or 0) else _KNOWN
    if part not in known or (number is not None) != (part == _OF_STATES):
        return None
    return f"{numbered(part, int(number or layer or 0))}.{kind}"


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
    states, line = num_states * target.hidden_size, (hidden,)
    expected: dict[str, tuple[int, ...]] = {"fc": (hidden, states if is_third else hidden + target.hidden_size)}
    for layer in range(config.num_hidden_layers):
        has_norm = layer > 0 or is_third
        expected |= _layer_shapes(config, tensors, layer, 2 * hidden if is_third and not layer else hidden, has_norm)
    if is_third:
        expected |= {"hidden_norm": line, "norm": line}
    if "input_norm.weight" in tensors:
        expected["input_norm"] = (states,)
    if f"{numbered(_OF_STATES, 0)}.weight" in tensors:
        expected |= {numbered(_OF_STATES, number): (target.hidden_size,) for number in range(num_states)}
    if "embed_tokens.weight" in tensors or hidden != target.hidden_size:
        expected["embed_tokens"] = (target.vocab_size, hidden)
    found = {name: tuple(tensors[f"{name}.weight"].shape) if f"{name}.weight" in tensors else None for name in expected}
    wrong = [name for name in expected if found[name] != expected[name]]
    left = sorted({name.rpartition(".")[0] for name in tensors} - expected.keys() - {"", "lm_head"})
    if wrong:
        said = [f"`{name}` {found[name] or '(missing)'} in place of {expected[name]}" for name in wrong]
        raise ValueError(
            f"heads of EAGLE do not fit a target of hidden size {target.hidden_size} and {target.vocab_size} tokens: "
            f"{', '.join(said[:9])}"
        )
    if left:
        raise ValueError(f"these heads have tensors that are left over: {', '.join(left[:5])}")
    if "input_norm.weight" in tensors and f"{numbered(_OF_STATES, 0)}.weight" in tensors:
        raise ValueError("these heads have norms of all hidden states (`input_norm`) and of each (`fc_norm`)")
    _check_mask(config, tensors, states, target)
    _check_outputs(tensors, hidden, target)


def _layer_shapes(
    config: LlamaConfig, tensors: Mapping[str, torch.Tensor], layer: int, reads: int, has_norm: bool
) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a layer's weights, whose attention reads so many numbers of each token."""
    hidden, inner = config.hidden_size, config.intermediate_size
    head_dim, kv_heads = config.head_dim or 0, config.num_key_value_heads or 0  # which configs fill in
    queries, keys = config.num_attention_heads * head_dim, kv_heads * head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "q_proj": (queries, reads),
        "k_proj": (keys, reads),
        "v_proj": (keys, reads),
        "o_proj": (hidden, queries),
        "gate_proj": (inner, hidden),
        "up_proj": (inner, hidden),
        "down_proj": (hidden, inner),
        "post_attention_layernorm": (hidden,),
    }
    shapes |= {"input_layernorm": (hidden,)} if has_norm else {}
    if any(f"{numbered(name, layer)}.weight" in tensors for name in ("q_norm", "k_norm")):
        shapes |= {"q_norm": (head_dim,), "k_norm": (head_dim,)}
    return {numbered(name, layer): shape for name, shape in shapes.items()}


def _check_mask(config: Any, tensors: Mapping[str, torch.Tensor], num_numbers: int, target: PreTrainedConfig) -> None:
    mask = tensors.get("mask_hidden")
    if mask is None:
        return
    if "hidden_norm.weight" not in tensors or mask.numel() != num_numbers:
        raise ValueError(f"`mask_hidden` {tuple(mask.shape)} is for heads of EAGLE-3 that read {num_numbers} numbers")
    if config.mask_token_id >= target.vocab_size:
        raise ValueError(f"`{MASK_TOKEN}` is {config.mask_token_id}, and the target has {target.vocab_size} tokens")


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
    num = config.num_hidden_layers
    named = {_long(name, num, is_third): item.detach().contiguous().cpu() for name, item in tensors.items()}
    if offsets is not None:
        known = torch.zeros(vocab_size, dtype=torch.bool)
        known[named["d2t"] + torch.arange(len(offsets))] = True
        named["t2d"] = known
    save_file(named, folder / "model.safetensors")
    content = config.to_dict() | {"vocab_size": vocab_size}
    content["architectures"] = ["LlamaForCausalLMEagle3" if is_third else "LlamaForCausalLMEagle"]
    if is_third:
        content |= {"draft_vocab_size": vocab_size if offsets is None else len(offsets), IDS: list(hidden_layers)}
    (folder / CONFIG).write_text(json.dumps(content | dict(entries), indent=2) + "\n", encoding="utf-8")


def _long(name: str, num_layers: int, is_third: bool) -> str:
    """Return the name in files of a tensor that has a short name."""
    own, _, kind = name.rpartition(".")
    part, number = _split(own)
    if part == _OF_STATES:
        return f"{part}.{number}.{kind}"
    if part in _ALONE or not part:
        return name
    inner = "self_attn." if part in _ATTENTION else "mlp." if part in _MLP else ""
    layer = _THIRD_LAYER if is_third and num_layers == 1 else f"layers.{number}."
    return f"{layer}{inner}{part}.{kind}"
