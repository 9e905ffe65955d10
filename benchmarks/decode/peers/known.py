"""The peers there are, and what each needs."""

import sys
from pathlib import Path
from typing import Any, NamedTuple

from .environments import python_of

KINDS = ("float32", "bfloat16", "int8")


class Peer(NamedTuple):
    """
    Args:
        runner (`str`): Module in `runners`.
        files (tuple of `str`): Of the models, as `write_files` names them.
        kinds (tuple of `str`): What it runs weights in.
        requirements (tuple of `str`): Of its environment; none: it runs in this one.
        settings (dict): For its runner.
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
BASELINES = ("transformers, plain", "smartspec, generate on it")  # plain `generate`; in int8, the second
