"""The peers, and the virtual environments that they need, each of which is made once, in a folder for caches."""

import os
import subprocess
import sys
import venv
from pathlib import Path
from typing import Any, NamedTuple

from .processes import PeerError

KINDS = ("float32", "bfloat16", "int8", "int4")


class Peer(NamedTuple):
    """
    Args:
        runner (`str`): Module in `runners`.
        files (tuple of `str`): Files of the models, as `write_files` names them.
        kinds (tuple of `str`): Types of weights that it runs.
        requirements (tuple of `str`): Packages of its environment; without any, it runs in this one.
        settings (dict): Options of its runner.
    """

    runner: str
    files: tuple[str, ...]
    kinds: tuple[str, ...] = KINDS
    requirements: tuple[str, ...] = ()
    settings: dict[str, Any] = {}  # noqa: RUF012  never changed

    def python(self, name: str, folder: Path) -> Path:
        """Return the interpreter that runs it; make its environment where there is none."""
        return python_of(folder, name, self.requirements) if self.requirements else Path(sys.executable)


PEERS = {
    "transformers": Peer("transformers", ("model", "draft"), KINDS[:2]),
    "compiled": Peer("transformers", ("model",), KINDS[:2], settings={"compiled": True}),
    "smartspec": Peer("smartspec", ("model", "draft"), settings={"needs_library": True}),
    "llama.cpp": Peer("llama_cpp", ("gguf", "draft_gguf"), requirements=("xllamacpp==2026.10.11549",)),
    "openvino": Peer(
        "openvino_genai", ("arrays", "draft_arrays"), requirements=("openvino==2026.4.1", "openvino-genai==2026.4.1.0")
    ),
}
BASELINES = ("transformers, plain", "smartspec, generate on it")  # plain `generate`; of quantized models, the second


_MADE = "made-with.txt"  # in an environment: what was installed, written last
_NO_TORCH = "torch<0\n"  # no peer here needs one, and gigabytes are not fetched by mistake


def cache_folder() -> Path:
    """Return the default folder of environments."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "hf-smartspec" / "peers"


def python_of(folder: Path, name: str, requirements: tuple[str, ...]) -> Path:
    """
    Return the interpreter of the environment `folder / name`, which is made where it is missing or was made for other
    requirements.

    Raises:
        PeerError: if something cannot be installed.
    """
    place = folder / name
    python, made = place / "bin" / "python", place / _MADE
    wanted = "\n".join((sys.version, *requirements))
    if made.is_file() and made.read_text() == wanted:
        return python
    if place.is_dir() and any(place.iterdir()) and not (place / "pyvenv.cfg").is_file():
        raise PeerError(f"{place} is there and no environment: name another folder with --cache")
    made.unlink(missing_ok=True)
    venv.create(place, clear=True, with_pip=False)
    limits = place / "limits.txt"
    limits.write_text(_NO_TORCH)
    pip = [sys.executable, "-m", "pip", "--python", str(python), "--disable-pip-version-check", "install", "-q"]
    _run([*pip, "--constraint", str(limits), *requirements], place / "pip.log")
    made.write_text(wanted)
    return python


def _run(command: list[str], log: Path) -> None:
    """Run a command with its output in a file, as building a peer takes minutes and prints much."""
    with log.open("w") as file:
        status = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT).returncode
    if status:
        errors = [line for line in log.read_text(errors="replace").splitlines() if "ERROR" in line or "error:" in line]
        raise PeerError(f"cannot be installed: {(errors or ['pip failed'])[-1].strip()} (everything is in {log})")
