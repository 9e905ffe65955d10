"""Llamas as GGUF files, with the same weights: what llama.cpp reads."""

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from transformers import PreTrainedModel

_MAGIC, _VERSION, _ALIGNMENT = b"GGUF", 3, 32
_UINT32, _INT32, _FLOAT32, _STRING, _ARRAY = 4, 5, 6, 8, 9  # types of metadata
_TYPES = {"float32": 0, "int8": 8, "bfloat16": 30}  # of tensors; int8 is Q8_0
_FILE_TYPES = {"float32": 0, "int8": 7, "bfloat16": 32}
_BLOCK = 32  # numbers that share a scale in Q8_0
_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
_OUTSIDE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


class Tensor(NamedTuple):
    name: str
    shape: tuple[int, ...]  # as torch has it; the file lists it from the last dimension on
    type_id: int
    data: bytes


def write_gguf(model: PreTrainedModel, path: Path, kind: str) -> None:
    """
    Writes a Llama. Its vocabulary is one of placeholders: prompts are given as token ids.

    Args:
        model (`PreTrainedModel`): Of Llama's architecture, with plain rotary embeddings and without biases.
        path (`Path`): Of the file.
        kind (`str`): Of its matrices: "float32", "bfloat16" or "int8" (Q8_0). Vectors stay in float32.

    Raises:
        ValueError: for other models and kinds.
    """
    if kind not in _TYPES:
        raise ValueError(f"`kind` must be one of {', '.join(_TYPES)}, got {kind!r}.")
    check_llama(model)
    with torch.no_grad():
        tensors = [_encoded(name, weight, kind) for name, weight in converted(model)]
    entries = metadata(model, kind)
    with path.open("wb") as file:
        file.write(_MAGIC + struct.pack("<IQQ", _VERSION, len(tensors), len(entries)))
        for key, (type_id, value) in entries.items():
            file.write(_text(key) + struct.pack("<I", type_id) + _value(type_id, value))
        _write_tensors(file, tensors)


def check_llama(model: PreTrainedModel) -> None:
    """Raises `ValueError` for what the formats of other engines are not written for here."""
    config = model.config
    if config.model_type != "llama" or config.rope_parameters["rope_type"] != "default" or config.hidden_act != "silu":
        raise ValueError(f"Llamas with plain rotary embeddings can be converted, got {config.model_type!r}.")
    if any(name.endswith(".bias") for name, _ in model.named_parameters()):
        raise ValueError("Llamas without biases can be converted, this one has some.")


# --- Weights


def converted(model: PreTrainedModel) -> Iterator[tuple[str, torch.Tensor]]:
    """Every weight under its GGUF name. Tied embeddings come once."""
    config = model.config
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    for name, weight in model.named_parameters():
        name = name.removesuffix(".weight")
        if name in _OUTSIDE:
            yield f"{_OUTSIDE[name]}.weight", weight
            continue
        _, _, layer, part = name.split(".", 3)
        part = _NAMES[part]
        whole = _whole_blocks(weight, part)
        yield f"blk.{layer}.{part}.weight", interleaved(whole, heads[part]) if part in heads else whole


def interleaved(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """
    Rows of each head in the order in which llama.cpp rotates them: it turns neighbours, (0, 1), (2, 3), …, where
    transformers turns the halves, (0, n / 2), (1, n / 2 + 1), …

    Args:
        weight (`torch.Tensor` of shape `(num_heads * head_dim, hidden_size)`)
    """
    return weight.unflatten(0, (num_heads, 2, -1)).transpose(1, 2).reshape(weight.shape)


def _whole_blocks(weight: torch.Tensor, part: str) -> torch.Tensor:
    """The MLP's weights with neurons that do nothing behind them, until the blocks of Q8_0 come out even."""
    missing = -weight.shape[1 if part == "ffn_down" else 0] % _BLOCK
    if not missing or not part.startswith("ffn_") or weight.ndim < 2:
        return weight
    return torch.nn.functional.pad(weight, (0, missing) if part == "ffn_down" else (0, 0, 0, missing))


def _encoded(name: str, weight: torch.Tensor, kind: str) -> Tensor:
    kind = kind if weight.ndim > 1 else "float32"
    stored = q8_0(weight.float()) if kind == "int8" else weight.to(getattr(torch, kind))
    data = stored.contiguous().view(torch.uint8).numpy().tobytes()
    return Tensor(name, tuple(weight.shape), _TYPES[kind], data)


def q8_0(weight: torch.Tensor) -> torch.Tensor:
    """
    Blocks of 32 numbers: a scale in float16, then 32 integers.

    Args:
        weight (`torch.Tensor` of shape `(rows, columns)`): float32; columns are a multiple of 32.

    Returns:
        `torch.Tensor` of shape `(blocks, 34)`, uint8.

    Raises:
        ValueError: for other numbers of columns.
    """
    if weight.shape[-1] % _BLOCK:
        raise ValueError(f"Q8_0 has blocks of {_BLOCK} numbers, which rows of {weight.shape[-1]} do not fill.")
    blocks = weight.reshape(-1, _BLOCK)
    scales = blocks.abs().amax(1, keepdim=True) / 127
    rounded = (blocks / scales.clamp_min(torch.finfo(torch.float32).tiny)).round().to(torch.int8)
    return torch.cat([scales.half().view(torch.uint8), rounded.view(torch.uint8)], dim=1)


def _write_tensors(file: BinaryIO, tensors: list[Tensor]) -> None:
    offset = 0
    for tensor in tensors:
        sizes = struct.pack(f"<I{len(tensor.shape)}Q", len(tensor.shape), *reversed(tensor.shape))
        file.write(_text(tensor.name) + sizes + struct.pack("<IQ", tensor.type_id, offset))
        offset += len(tensor.data) + -len(tensor.data) % _ALIGNMENT
    for tensor in tensors:
        file.write(bytes(-file.tell() % _ALIGNMENT))
        file.write(tensor.data)
    file.write(bytes(-file.tell() % _ALIGNMENT))


# --- Metadata


def metadata(model: PreTrainedModel, kind: str) -> dict[str, tuple[int, Any]]:
    """Type and value of every key."""
    config = model.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    neurons = config.intermediate_size + -config.intermediate_size % _BLOCK
    numbers = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": neurons,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "rope.dimension_count": head_dim,
        "vocab_size": config.vocab_size,
    }
    return {
        "general.architecture": (_STRING, "llama"),
        "general.file_type": (_UINT32, _FILE_TYPES[kind]),
        **{f"llama.{key}": (_UINT32, value) for key, value in numbers.items()},
        "llama.attention.layer_norm_rms_epsilon": (_FLOAT32, config.rms_norm_eps),
        "llama.rope.freq_base": (_FLOAT32, config.rope_parameters["rope_theta"]),
        **_placeholders(config.vocab_size, config.pad_token_id or 0),  # padding is what no model says
    }


def _placeholders(vocab_size: int, eos_id: int) -> dict[str, tuple[int, Any]]:
    """A vocabulary of the right size, whose texts are the tokens' numbers."""
    return {
        "tokenizer.ggml.eos_token_id": (_UINT32, eos_id),
        "tokenizer.ggml.model": (_STRING, "llama"),
        "tokenizer.ggml.tokens": (_ARRAY, (_STRING, [f"<{index}>" for index in range(vocab_size)])),
        "tokenizer.ggml.scores": (_ARRAY, (_FLOAT32, [0.0] * vocab_size)),
        "tokenizer.ggml.token_type": (_ARRAY, (_INT32, [1] * vocab_size)),
    }


def _value(type_id: int, value: Any) -> bytes:
    if type_id == _ARRAY:
        item_type, items = value
        return struct.pack("<IQ", item_type, len(items)) + b"".join(_value(item_type, item) for item in items)
    if type_id == _STRING:
        return _text(value)
    return struct.pack({_UINT32: "<I", _INT32: "<i", _FLOAT32: "<f"}[type_id], value)


def _text(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data
