"""Files of block drafters: the names of their tensors, and what of them is needed."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel

from ..files import CONFIG, MASK_EMBEDDING, check_numbers, config_of, folder_of, read_tensors
from .config import (
    DFLASH,
    DFLASH2,
    DOMINO,
    DSPARK,
    JETSPEC,
    OUTPUTS,
    SINK,
    XPRESS,
    BlockConfig,
    entries_of,
    is_block_config,
    read_config,
)

_PREFIX = re.compile(r"(model\.)*")
_RENAMED = {"encoder.fc.weight": "fc.weight", "encoder.output_norm_enc.weight": "hidden_norm.weight"}
_FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
# What belongs to the target, or follows from configs.
_SKIPPED = re.compile(r"(.*\.)?rotary_emb\..*|verifier_.*")
_IDS, _MASK = ("d2t", "t2d"), ("embedding", "mask_token_id")
_ARCHITECTURES = {
    DFLASH: "DFlashDraftModel",
    JETSPEC: "DFlashDraftModel",
    DFLASH2: "DFlash2DraftModel",
    DSPARK: "Qwen3DSparkModel",
    DOMINO: "DFlashDraftModel",
    XPRESS: "XPressDraftModel",
}


def is_block_checkpoint(name: str, config: Mapping[str, Any] | None = None) -> bool:
    """Return whether a folder or hub id holds a block drafter, by its config."""
    return is_block_config(config_of(name) if config is None else config)


def read(name: str | Path, target: PreTrainedModel) -> tuple[BlockConfig, dict[str, torch.Tensor]]:
    """
    Return the config of a folder or hub id, and its tensors under the names of `BlockDrafter`: weights, and `d2t`.

    Raises:
        ValueError: for files that hold no such drafter; it names the folder and the reason.
    """
    folder, found = folder_of(name), config_of(str(name))
    if any(key.startswith("dspark_") and key != "dspark_config" for key in found):
        raise ValueError(
            f"{name}: DSpark in DeepSeek V4's own layers is not known: take a drafter with layers as Qwen3's"
        )
    tensors = read_tensors(folder)
    try:
        tensors = _without_copies(_renamed(tensors, entries_of(found)), target)
        mask, token = _mask_embedding(folder / MASK_EMBEDDING)
        if mask is not None:
            tensors["mask_embedding"] = mask
        check_numbers({key: item for key, item in tensors.items() if key not in _IDS})
        shapes = {key: tuple(item.shape) for key, item in tensors.items()}
        config = read_config(found, shapes, token, target)
        _check_ids(tensors, config)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    tensors.pop("t2d", None)
    return config, tensors


def _renamed(tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return the tensors that are needed under the names of `BlockDrafter`, where fused ones are taken apart."""
    found = {}
    for name, item in tensors.items():
        name = _PREFIX.sub("", name, count=1)
        name = _RENAMED.get(name, name)
        if _SKIPPED.fullmatch(name):
            continue
        part = next((part for part in _FUSED if f".{part}." in name), None)
        if part is None:
            found[name] = item
            continue
        pieces = item.split(_rows(part, len(item), config)) if part == "qkv_proj" else item.chunk(2)
        found |= {name.replace(part, own): piece for own, piece in zip(_FUSED[part], pieces)}
    return found


def _rows(name: str, num: int, config: Mapping[str, Any]) -> list[int]:
    """Return the rows of queries, keys and values among `num` of a fused map."""
    heads = config.get("num_attention_heads") or 0
    keys = config.get("num_key_value_heads") or heads
    if not heads or num % (heads + 2 * keys):
        raise ValueError(f"`{name}` has {num} rows, which are not those of {heads} queries and {keys} keys and values")
    size = num // (heads + 2 * keys)
    return [heads * size, keys * size, keys * size]


def _without_copies(tensors: dict[str, torch.Tensor], target: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Return the tensors without copies of the target's embedding and head."""
    parts: tuple[Any, Any] = target.get_input_embeddings(), target.get_output_embeddings()
    for name, weight in zip(("embed_tokens.weight", "lm_head.weight"), (part.weight for part in parts)):
        own = tensors.get(name)
        if own is not None and own.shape == weight.shape and bool((own.to(weight) == weight).all()):
            del tensors[name]
    return tensors


def _mask_embedding(path: Path) -> tuple[torch.Tensor | None, int | None]:
    """Return the embedding of the mask token and this token, where a file of its own has them."""
    if not path.exists():
        return None, None
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # of many kinds: it is damaged, cannot be opened, or asks for more than tensors
        raise ValueError(f"`{MASK_EMBEDDING}` cannot be read, or holds more than tensors: {error}") from None
    embedding, token = (content.get(key) for key in _MASK) if isinstance(content, dict) else (content, None)
    if not isinstance(embedding, torch.Tensor):
        raise ValueError(f"`{MASK_EMBEDDING}` must hold a tensor, alone or as {_MASK[0]!r}")
    return embedding.flatten(), None if token is None else int(token)


def _check_ids(tensors: Mapping[str, torch.Tensor], config: BlockConfig) -> None:
    """Raise `ValueError` unless the tokens that outputs stand for are tokens of the target, as `t2d` marks them."""
    offsets, known, vocab = tensors.get("d2t"), tensors.get("t2d"), config.sizes.vocab_size
    if offsets is None:
        if config.draft_vocab != vocab:
            raise ValueError(f"an output of {config.draft_vocab} of {vocab} tokens needs `d2t`, which is missing")
        return
    if tuple(offsets.shape) != (config.draft_vocab,):
        raise ValueError(f"`d2t` {tuple(offsets.shape)} in place of {(config.draft_vocab,)}")
    ids = offsets.long() + torch.arange(len(offsets))
    if not 0 <= int(ids.min()) <= int(ids.max()) < vocab:
        raise ValueError(f"`d2t` names tokens beyond the target's {vocab}")
    if known is not None and not torch.equal(known.nonzero()[:, 0], ids.sort().values):
        raise ValueError(f"`t2d` marks {int(known.sum())} tokens, which are not those that `d2t` names")


def check_tensors(tensors: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    """
    Raises:
        ValueError: naming tensors that are missing, unknown, or of another shape than the expected ones.
    """
    if unknown := sorted(set(tensors) - set(expected)):
        raise ValueError(f"tensors that this kind of drafter does not have: {', '.join(unknown[:5])}")
    if missing := sorted(set(expected) - set(tensors)):
        raise ValueError(f"tensors are missing: {', '.join(missing[:5])}")
    shapes = {name: (tuple(tensors[name].shape), tuple(item.shape)) for name, item in expected.items()}
    if wrong := [f"`{name}` {own} in place of {other}" for name, (own, other) in shapes.items() if own != other]:
        raise ValueError(f"tensors of wrong shapes: {', '.join(wrong[:5])}")


def write(folder: str | Path, config: BlockConfig, tensors: Mapping[str, torch.Tensor], entries: Any) -> None:
    """Write tensors, and a config with further entries, as the authors' code reads them."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    named = {name: item.detach().contiguous().cpu() for name, item in tensors.items()}
    if (mask := named.pop("mask_embedding", None)) is not None:
        torch.save(dict(zip(_MASK, (mask, config.mask_token))), folder / MASK_EMBEDDING)
    if "d2t" in named:
        known = torch.zeros(config.sizes.vocab_size, dtype=torch.bool)
        known[named["d2t"] + torch.arange(len(named["d2t"]))] = True
        named["t2d"] = known
    save_file(named, folder / "model.safetensors")
    content = config.sizes.to_dict() | {
        "architectures": [_ARCHITECTURES[config.kind]],
        "layer_types": ["full_attention" if window is None else "sliding_attention" for window in config.windows],
        "sliding_window": next((window for window in config.windows if window is not None), None),
        "attention_bias": config.has_bias,
        "draft_vocab_size": config.draft_vocab,
        "block_size": config.block_size,
        "is_neox_style": not config.is_interleaved,
        "attention_value_scale": config.value_scale,
        "partial_rotary_factor": config.partial_rotary_factor,
        SINK: any(config.has_sinks),
    }
    factors = {
        "input_embedding_scale": config.embedding_scale,
        "output_multiplier": config.logits_scale,
        "final_logit_softcapping": config.softcap,
    }
    own: dict[str, Any] = {
        OUTPUTS: [number - 1 for number in config.hidden_layers],
        "mask_token_id": config.mask_token,
        "target_hidden_size": config.target_hidden,
        "sample_from_anchor": config.first_slot == 0,
        **{name: value for name, value in factors.items() if value not in (None, 1.0)},
        **config.options,
    }
    if config.is_gemma:
        content |= {"attention_k_eq_v": not config.has_values, "hidden_activation": config.sizes.hidden_act}
    if len(set(config.causal)) == 1:
        content["is_causal"] = config.causal[0]
    content |= own if config.kind == DSPARK else {"dflash_config": own}  # where the authors' code looks for them
    content |= dict(entries)
    (folder / CONFIG).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
