"""Files of learned drafters: what kind they are, and their tensors."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from transformers.utils import cached_file

CONFIG = "config.json"
MASK_EMBEDDING = "mask_embedding.pt"  # beside the weights of some block drafters
# The first that there are: beside Medusa's own file there may be those of a whole model.
_PATTERNS = ["medusa_lm_head.safetensors", "medusa_lm_head.pt", "*.safetensors", "*.pt", "*.bin"]

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
# What quantized weights are multiplied with, or unpacked by, under the names of compressed-tensors, FP8, GPTQ and AWQ.
_SCALES = re.compile(r".*[._](scales?|scale_inv|zero_points?|qweight|qzeros|g_idx|weight_packed)")


def config_of(name: str) -> dict[str, Any]:
    """
    Return the `config.json` of a folder or hub id; an empty dict where there is none.

    Raises:
        ValueError: if it is no JSON object.
    """
    try:
        path = cached_file(name, CONFIG, _raise_exceptions_for_missing_entries=False)
    except OSError:  # no such repository, no way to ask for it, or none that may be read
        path = None
    if path is None:
        return {}
    try:
        config = json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is no JSON: {error}.") from None
    if not isinstance(config, dict):
        raise ValueError(f"{path} holds no JSON object.")
    return config


def kinds_of(config: Mapping[str, Any]) -> list[str]:
    """Return the kinds of model that a config names, in lower case."""
    return [str(kind).lower() for kind in (config.get("model_type", ""), *(config.get("architectures") or ()))]


def folder_of(name: str | Path) -> Path:
    """Return the folder of a drafter's files: the name itself, or that of a hub id, downloaded unless it is there."""
    path = Path(name)
    return path if path.is_dir() else Path(snapshot_download(str(name), allow_patterns=[CONFIG, *_PATTERNS]))


def read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """
    Return all tensors of the folder's files: safetensors, or else pickled ones, from which only tensors are read.

    Raises:
        ValueError: if there are none, or a file is damaged.
    """
    paths = _paths(folder)
    if not paths:
        raise ValueError(f"{folder} holds no weights: looked for {_PATTERNS}.")
    tensors: dict[str, torch.Tensor] = {}
    for path in paths:
        tensors |= _read(path)
    return tensors


def _paths(folder: Path) -> list[Path]:
    found = ([path for path in sorted(folder.glob(pattern)) if path.name != MASK_EMBEDDING] for pattern in _PATTERNS)
    return next(filter(None, found), [])


def tensor_names(name: str | Path) -> set[str]:
    """Return the names of the tensors of a folder or hub id; an empty set where these cannot be read."""
    try:
        return set().union(*map(_names, _paths(folder_of(name))))
    except (OSError, ValueError, SafetensorError):
        return set()


def _names(path: Path) -> set[str]:
    if path.suffix != ".safetensors":
        return set(_read(path))
    with safe_open(path, "pt") as file:
        return set(file.keys())


def _read(path: Path) -> Mapping[str, torch.Tensor]:
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # of many kinds: it is damaged, cannot be opened, or asks for more than tensors
        raise ValueError(f"{path} cannot be read, or holds more than tensors: {error}.") from None
    if not isinstance(content, Mapping) or not all(isinstance(item, torch.Tensor) for item in content.values()):
        raise ValueError(f"{path} holds other objects than named tensors.")
    return content


def check_numbers(tensors: Mapping[str, torch.Tensor]) -> None:
    """
    Args:
        tensors (mapping of `str` to `torch.Tensor`): Weights by their names in files.

    Raises:
        ValueError: naming one that is quantized, or not all of finite numbers.
    """
    for name, tensor in tensors.items():
        if tensor.dtype not in FLOATS or _SCALES.fullmatch(name):
            kind = str(tensor.dtype).removeprefix("torch.")
            raise ValueError(f"its weights are quantized (`{name}`, {kind}): take files in floating point")
        check_finite(name, tensor)


def check_finite(name: str, tensor: torch.Tensor) -> None:
    """
    Raises:
        ValueError: unless all numbers of a floating-point tensor are finite.
    """
    if not tensor.numel() or all(bool(end.isfinite()) for end in tensor.aminmax()):  # one pass, nothing is allocated
        return
    num = int((~torch.isfinite(tensor)).sum())
    raise ValueError(f"`{name}` is damaged: {num} of its {tensor.numel()} numbers are NaN or infinite")
