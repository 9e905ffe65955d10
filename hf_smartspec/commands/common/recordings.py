"""Recorded requests for `smartspec replay`: prompts and real responses, from JSON lines to token ids."""

import gzip
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from transformers import PreTrainedTokenizerBase

from ...drafts.tree import DraftTree
from .arguments import UsageError
from .demo import demo_folder
from .models import load_tokenizer
from .progress import track


class Fields(NamedTuple):
    """Keys of a row's texts."""

    prompt: str = "prompt"
    response: str = "response"
    turns: str = "all"  # of rows with "turns": every assistant turn is a request, only the last, or look at none


class Texts(NamedTuple):
    """One request as text."""

    context: list[str]  # the prompt, or the turns before the response
    response: str


class Recording(NamedTuple):
    """One request as token ids, both int64."""

    prompt: np.ndarray  # [prompt_len]
    response: np.ndarray  # [response_len], at least 1


def tokenizer_of(name: str | None) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a folder or hub id, by default the demo's."""
    name = name or str(demo_folder("--tokenizer") / "models" / "target")
    tokenizer = load_tokenizer(name)
    if tokenizer is None:
        raise UsageError(f"--tokenizer: cannot load a tokenizer from {name!r}")
    return tokenizer


def read_requests(path: Path, fields: Fields, limit: int | None, needs_responses: bool = True) -> list[Texts]:
    """
    Return the first `limit` requests of a .jsonl or .jsonl.gz file; where responses are needed, requests without one
    are left out.

    Raises:
        UsageError: if the file cannot be read, or holds no request.
    """
    requests: list[Texts] = []
    for number, row in enumerate(read_rows(path), start=1):
        found = _requests(row, fields, f"{path.name!r}, row {number}", needs_responses)
        requests += [item for item in found if item.response or not needs_responses]
        if limit is not None and len(requests) >= limit:
            break
    if not requests:
        raise UsageError(f"{str(path)!r} holds no {'responses' if needs_responses else 'prompts'}")
    return requests[:limit]


def read_rows(path: Path) -> Iterator[Any]:
    """
    Yield the rows of a .jsonl or .jsonl.gz file.

    Raises:
        UsageError: if it cannot be read.
    """
    number = 0
    try:
        with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as file:
            for line in file:
                number += 1
                if line.strip():
                    yield json.loads(line)
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read {str(path)!r}: {error}") from error
    except json.JSONDecodeError as error:
        raise UsageError(f"{str(path)!r}, row {number} is no JSON: {error}") from error


def _requests(row: Any, fields: Fields, place: str, needs_responses: bool) -> list[Texts]:
    if not isinstance(row, dict):
        raise UsageError(f"{place} is no JSON object")
    if fields.turns != "none" and row.get("turns"):
        return _turns(row["turns"], place)[-1 if fields.turns == "last" else 0 :]
    if not needs_responses and row.get(fields.response) is None:
        row = row | {fields.response: ""}
    for name in (fields.prompt, fields.response):
        if not isinstance(row.get(name), str):
            raise UsageError(f'{place} has no text under "{name}"')
    return [Texts([row[fields.prompt]], row[fields.response])]


def _turns(turns: Any, place: str) -> list[Texts]:
    """Return every assistant turn, with the conversation before it."""
    if not isinstance(turns, list) or not all(isinstance(turn, dict) and "role" in turn for turn in turns):
        raise UsageError(f'{place}: "turns" must be a list of objects with "role" and "content"')
    texts = [_turn_text(turn) for turn in turns]
    answers = [index for index, turn in enumerate(turns) if turn["role"] == "assistant" and texts[index]]
    return [Texts(texts[:index], texts[index]) for index in answers]


def _turn_text(turn: dict[str, Any]) -> str:
    """Return the text of a turn followed by its tool calls: the model generated both."""
    calls = turn.get("tool_calls") or ""
    parts = (turn.get("content") or "", calls if isinstance(calls, str) else json.dumps(calls))
    return "\n".join(part for part in parts if part)


def tokenize(requests: Sequence[Texts], tokenizer: PreTrainedTokenizerBase, max_prompt: int) -> list[Recording]:
    """
    Return the token ids of every request, of its context at most the last `max_prompt`. Turns are lines, without a chat
    template, whose fixed tokens are in no response and differ from model to model.
    """
    known: dict[str, np.ndarray] = {}  # a turn is repeated in every later context of its conversation

    def encode(text: str) -> np.ndarray:
        if text not in known:
            known[text] = np.array(tokenizer(text, add_special_tokens=False, verbose=False).input_ids, np.int64)
        return known[text]

    recordings = []
    for request in track(requests, desc="tokenizing"):
        context = np.concatenate([encode(text + "\n") for text in request.context] or [np.zeros(0, np.int64)])
        recordings.append(Recording(context[-max_prompt:].copy(), encode(request.response)))
    return [recording for recording in recordings if len(recording.response)]


def count_accepted(tree: DraftTree, truth: np.ndarray) -> int:
    """Return the length of the path from the root whose tokens are those of `truth` (`[n]` integers)."""
    return len(tree.path_along(truth))
