"""The model and its draft in every format that the chosen peers read, with the same weights."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from .gguf_file import check_llama, write_gguf

_SIZES = ("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps")


def write_files(
    target: PreTrainedModel, draft: PreTrainedModel, needed: Iterable[str], kind: str, folder: Path
) -> dict[str, str]:
    """
    Write the needed files and return their paths by name. Models are in `kind`'s precision already: int8 is made of
    bfloat16.

    Args:
        needed (iterable of `str`): Of "model" and "draft" (torch's pickles), "gguf" and "draft_gguf", and "arrays" and
            "draft_arrays" (numpy's, in float32).

    Raises:
        ValueError: for models that a format cannot hold.
    """
    folder.mkdir(parents=True, exist_ok=True)
    paths = {}
    for name in sorted(set(needed)):
        model = draft if name.startswith("draft") else target
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
