"""Answers of the target, kept beside the results, so that a resumed run does not generate them again."""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedModel

from hf_smartspec.commands.common.outputs import replace_json
from hf_smartspec.commands.common.recordings import Recording, answered

_AT_ONCE = 16  # requests that are answered together
_SHOWN = 4096  # numbers of each weight, by which targets are told apart


class Answers:
    """
    Args:
        target (`PreTrainedModel`): Who is asked, greedily.
        path (`Path`, *optional*): A file that is replaced as a whole after every task.
        resumes (`bool`): What the file holds is not asked again.
    """

    def __init__(self, target: PreTrainedModel, path: Path | None = None, resumes: bool = False):
        self.target, self.path = target, path
        self._known: dict[str, list[list[int]]] = _read(path) if path is not None and resumes else {}

    def of(self, asked: Sequence[Recording], max_new_tokens: int, desc: str) -> list[Recording]:
        """Return the same requests with the target's answers."""
        key = self._key(asked, max_new_tokens)
        found = self._known.get(key)
        if found is not None and len(found) == len(asked):
            return [Recording(item.prompt, np.array(tokens, np.int64)) for item, tokens in zip(asked, found)]
        texts = answered(asked, self.target, _AT_ONCE, max_new_tokens, desc)
        if self.path is not None:
            self._known[key] = [item.response.tolist() for item in texts]
            replace_json(self.path, self._known)
        return texts

    def _key(self, asked: Sequence[Recording], max_new_tokens: int) -> str:
        """Return a digest of the prompts and of the target's weights."""
        digest = hashlib.sha256(str(max_new_tokens).encode())
        for item in asked:
            digest.update(len(item.prompt).to_bytes(8, "little") + item.prompt.astype(np.int64).tobytes())
        for weight in self.target.parameters():
            digest.update(weight.detach().flatten()[:_SHOWN].float().cpu().numpy().tobytes())
        return digest.hexdigest()


def _read(path: Path) -> dict[str, Any]:
    """Return the answers in a file; none if it cannot be read, so that they are generated again."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
