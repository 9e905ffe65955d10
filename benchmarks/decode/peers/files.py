"""The model and its draft in every format that the chosen peers read, with the same weights."""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

_SIZES = ("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps")


def write_files(
    target: PreTrainedModel, draft: PreTrainedModel | None, needed: Iterable[str], kind: str, folder: Path
) -> dict[str, str]:
    """
    Write the needed files and return their paths by name, those of a draft only where there is one. Models are in
    `kind`'s precision already: int8 is made of bfloat16, int4 of float32.

    Args:
        needed (iterable of `str`): Some of "model" and "draft" (torch's pickles), "gguf" and "draft_gguf", "arrays"
            and "draft_arrays" (numpy's, in float32).

    Raises:
        ValueError: for models that a format cannot hold.
    """
    folder.mkdir(parents=True, exist_ok=True)
    paths = {}
    for name in sorted(set(needed)):
        model = draft if name.startswith("draft") else target
        if model is None:
            continue
        path = folder / name
        if name.endswith("gguf"):
            write_gguf(model, path, kind)
        elif name.endswith("arrays"):
            path = path.with_suffix(".npz")
            write_arrays(model, path)
        else:
            torch.save(model, path)
        paths[name] = str(path)
    return paths


def write_arrays(model: PreTrainedModel, path: Path) -> None:
    """
    Write every weight of a Llama in float32 under its name, and its sizes in JSON as "config".

    Raises:
        ValueError: for other models.
    """
    check_llama(model)
    config = {name: getattr(model.config, name) for name in _SIZES}
    config["rope_theta"] = model.config.rope_parameters["rope_theta"]
    arrays: dict[str, Any] = {name: weight.detach().float().numpy() for name, weight in model.named_parameters()}
    np.savez(path, **arrays, config=np.array(json.dumps(config)))


# GGUF, which llama.cpp reads.

# Types of tensors, and of files.
_GGUF_KINDS = {"float32": ("F32", 0), "bfloat16": ("BF16", 32), "int8": ("Q8_0", 7), "int4": ("Q4_1", 3)}
_BLOCK = 32  # numbers that share a scale in Q8_0 and Q4_1
_NORMAL = 1  # type of a token


def write_gguf(model: PreTrainedModel, path: Path, kind: str) -> None:
    """
    Write a Llama. Its vocabulary consists of placeholders, whose texts are the tokens' numbers: prompts are token ids.

    Args:
        model (`PreTrainedModel`): A Llama with default rotary embeddings and without biases.
        path (`Path`): The file.
        kind (`str`): Type of its matrices: "float32", "bfloat16", "int8" (Q8_0) or "int4" (Q4_1). Vectors stay in
            float32.

    Raises:
        ValueError: For other models and kinds.
    """
    import gguf

    if kind not in _GGUF_KINDS:
        raise ValueError(f"`kind` must be one of {', '.join(_GGUF_KINDS)}, got {kind!r}.")
    check_llama(model)
    matrix_type, file_type = _GGUF_KINDS[kind]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_file_type(file_type)
    _add_sizes(writer, model.config)
    for name, weight in converted(model):
        kept = gguf.GGMLQuantizationType[matrix_type if weight.ndim > 1 else "F32"]
        data = gguf.quants.quantize(weight.detach().float().contiguous().numpy(), kept)
        writer.add_tensor(name, data, raw_dtype=kept)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def check_llama(model: PreTrainedModel) -> None:
    """Raise `ValueError` for models that cannot be written in the formats of other engines here."""
    config = model.config
    if config.model_type != "llama" or config.rope_parameters["rope_type"] != "default" or config.hidden_act != "silu":
        raise ValueError(f"Llamas with default rotary embeddings can be converted, got {config.model_type!r}.")
    if any(name.endswith(".bias") for name, _ in model.named_parameters()):
        raise ValueError("Llamas without biases can be converted, this one has some.")


def _add_sizes(writer: Any, config: Any) -> None:
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size + -config.intermediate_size % _BLOCK)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("llama")
    writer.add_token_list([f"<{index}>" for index in range(config.vocab_size)])
    writer.add_token_scores([0.0] * config.vocab_size)
    writer.add_token_types([_NORMAL] * config.vocab_size)
    writer.add_eos_token_id(config.pad_token_id or 0)  # no model generates its padding


def converted(model: PreTrainedModel) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every weight with its GGUF name; tied embeddings come once."""
    import gguf

    config = model.config
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    for own, weight in model.named_parameters():
        name = names.get_name(own, try_suffixes=(".weight",))
        assert name is not None, f"a Llama has no {own}"
        part = name.split(".")[-2]
        yield name, interleaved(weight, heads[part]) if part in heads else _whole_blocks(weight, part)


def interleaved(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """
    Return the rows of each head in the order in which llama.cpp rotates them: it rotates neighbours, (0, 1), (2, 3), …,
    where transformers rotates the halves, (0, n / 2), (1, n / 2 + 1), …

    Args:
        weight (`torch.Tensor` of shape `(num_heads * head_dim, hidden_size)`)
    """
    return weight.unflatten(0, (num_heads, 2, -1)).transpose(1, 2).reshape(weight.shape)


def _whole_blocks(weight: torch.Tensor, part: str) -> torch.Tensor:
    """Return the MLP's weights with neurons of zeros appended until their number is one of whole Q8_0 blocks."""
    missing = -weight.shape[1 if part == "ffn_down" else 0] % _BLOCK
    if not missing or part not in ("ffn_gate", "ffn_up", "ffn_down"):
        return weight
    return torch.nn.functional.pad(weight, (0, missing) if part == "ffn_down" else (0, 0, 0, missing))
