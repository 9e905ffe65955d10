"""Sizes of block drafters' layers, and their rotary embeddings."""

from collections.abc import Collection, Mapping
from typing import Any

from transformers import LlamaConfig, PreTrainedModel
from transformers.activations import ACT2FN
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from ..eagle.config import rope_of

SLIDING, FULL = "sliding_attention", "full_attention"  # types of layers
MUSE = "muse_glimmer_assistant"  # transformers' class of DFlash
_NEEDED = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
_SIZES = (*_NEEDED, "num_key_value_heads", "head_dim", "hidden_act", "max_position_embeddings", "rope_theta")
_SHARE, _BASE = "partial_rotary_factor", "backbone_rotary_base"  # MiMo's
_BY_FREQUENCY = "proportional"  # type of rotary embeddings that turn whole heads, a share of them by 0


def positive(entries: Mapping[str, Any], name: str) -> int:
    value = entries.get(name)
    if type(value) is not int or value < 1:
        raise ValueError(f"`{name}` must be a positive integer, and is {value!r}")
    return value


def rotary_share(entries: Mapping[str, Any]) -> float:
    """Return the share of a head's numbers, the first ones, that rotary embeddings turn."""
    inner: dict[str, Any] = next(iter(rope_of(entries).values()), {})
    share = entries.get(_SHARE)
    if share is None and inner.get("rope_type") != _BY_FREQUENCY:
        share = inner.get(_SHARE)
    share = 1.0 if share is None else share
    if not isinstance(share, float | int) or not 0 < share <= 1:
        raise ValueError(f"`{_SHARE}` must lie in (0, 1], and is {share!r}")
    return float(share)


def sizes_of(entries: Mapping[str, Any], target: PreTrainedModel) -> LlamaConfig:
    """
    Return the sizes of the layers. Their rotary embeddings are those of whole heads: see `BlockConfig.rotary`.

    Raises:
        ValueError: naming an entry that is missing, or whose value is not known.
    """
    for name in _NEEDED:
        positive(entries, name)
    if entries.get("hidden_act") not in (None, *ACT2FN):
        raise ValueError(f"`hidden_act` is {entries['hidden_act']!r}, and known are {', '.join(sorted(ACT2FN))}")
    used = {name: entries[name] for name in _SIZES if entries.get(name) is not None}
    if entries.get("model_type") == MUSE:
        used.setdefault("rope_theta", 500_000.0)
    rope = rope_of(entries)
    for inner in (used, *rope.values()):
        if inner.get("rope_type") != _BY_FREQUENCY:
            inner.pop(_SHARE, None)
        if entries.get(_BASE) is not None:  # in place of the base that the authors' own module reads
            inner["rope_theta"] = entries[_BASE]
    vocab = target.config.get_text_config(decoder=True).vocab_size
    if entries.get("vocab_size") not in (None, vocab):
        raise ValueError(f"a drafter for a target of {entries['vocab_size']} tokens does not fit one of {vocab}")
    try:
        eps = float(entries.get("rms_norm_eps") or 1e-6)
        sizes: LlamaConfig = LlamaConfig.from_dict(used | rope | {"rms_norm_eps": eps, "vocab_size": vocab})
        num = 2 * len(LlamaRotaryEmbedding(sizes).inv_freq)
    except Exception as error:  # of many kinds, for values of other types
        raise ValueError(f"its config cannot be used: {' '.join(str(error).split())}") from error
    turned = int(num * rotary_share(entries))
    if num != sizes.head_dim or turned < 2 or turned % 2:
        raise ValueError(f"rotary embeddings do not turn pairs of the {sizes.head_dim} numbers of a head")
    return sizes


def gemma_entries(entries: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of layers of Gemma 4, which are all like its layers of full attention."""
    found = dict(entries)
    found["head_dim"] = entries.get("global_head_dim") or entries.get("head_dim")
    if entries.get("attention_k_eq_v"):
        found["num_key_value_heads"] = entries.get("num_global_key_value_heads") or entries.get("num_key_value_heads")
    found["hidden_act"] = entries.get("hidden_activation") or "gelu_pytorch_tanh"
    return found


def rope_of_types(entries: Mapping[str, Any], types: Collection[str]) -> dict[str, Any]:
    """Return the rotary embeddings of layers of these types, where a config has several."""
    rope = entries.get("rope_parameters")
    if not isinstance(rope, dict) or not {SLIDING, FULL} & set(rope):
        return {}
    found = [rope.get(kind) for kind in sorted(types)]
    if any(item != found[0] for item in found):
        raise ValueError(f"layers with rotary embeddings of several kinds are not known: `rope_parameters` {rope}")
    return {"rope_parameters": found[0]}
