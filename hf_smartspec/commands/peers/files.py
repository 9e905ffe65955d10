"""The model and its draft in every format that the chosen peers read, with the same weights."""

from collections.abc import Iterable
from pathlib import Path

import torch
from transformers import PreTrainedModel

from .gguf_file import write_gguf


def write_files(
    target: PreTrainedModel, draft: PreTrainedModel, needed: Iterable[str], kind: str, folder: Path
) -> dict[str, str]:
    """
    Paths by the names of the files. Models are in `kind`'s precision already: int8 is made of bfloat16.

    Args:
        needed (iterable of `str`): Of "model" and "draft" (torch's pickles), "gguf" and "draft_gguf".

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
        else:
            torch.save(model, path)
        paths[name] = str(path)
    return paths
