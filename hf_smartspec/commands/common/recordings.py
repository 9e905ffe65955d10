"""Requests with recorded responses, from JSON lines to token ids, and data sets of them."""

import argparse
import json
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ...candidates import SuffixTreeCandidates, TreeCandidateGenerator
from ...candidates.request import SourceRequest
from ...drafts.tree import DraftTree
from ...serving.engine import Engine
from .arguments import UsageError
from .console import track
from .models import demo_folder, encode, load_tokenizer
from .outputs import read_rows
from .runs import eos_ids, up_to_end

_AT_ONCE = 32  # requests that are answered together


class Fields(NamedTuple):
    """Keys of a row's texts."""

    prompt: str = "prompt"
    response: str = "response"
    turns: str = "all"  # of rows with "turns": every assistant turn is a request, only the last, or look at none


class Texts(NamedTuple):
    """One request as text."""

    context: list[str]  # the prompt, or the turns before the response
    response: str
    is_cut: bool = False  # at the most tokens of an answer: the text does not end where the response does


class Recording(NamedTuple):
    """One request as token ids, both int64."""

    prompt: np.ndarray  # [prompt_len]
    response: np.ndarray  # [response_len], at least 1


def tokenizer_of(name: str | None) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a folder or hub id, by default the demo's."""
    name = name or str(demo_folder("--tokenizer") / "models" / "target")
    tokenizer = load_tokenizer(name)
    if tokenizer is None:
        raise UsageError(f"cannot load a tokenizer from {name!r}")
    return tokenizer


def read_requests(path: Path, fields: Fields, limit: int | None, needs_responses: bool = True) -> list[Texts]:
    """
    Return the first `limit` requests of a .jsonl or .jsonl.gz file; where responses are needed, requests without one
    are left out. Raises `UsageError` if the file cannot be read, or holds no request.
    """
    requests: list[Texts] = []
    for number, row in read_rows(path):
        found = _requests(row, fields, f"{path.name!r}, row {number}", needs_responses)
        requests += [item for item in found if item.response or not needs_responses]
        if limit is not None and len(requests) >= limit:
            break
    if not requests:
        raise UsageError(f"{str(path)!r} holds no {'responses' if needs_responses else 'prompts'}")
    return requests[:limit]


def _requests(row: dict[str, Any], fields: Fields, place: str, needs_responses: bool) -> list[Texts]:
    if fields.turns != "none" and row.get("turns"):
        return _turns(row["turns"], place)[-1 if fields.turns == "last" else 0 :]
    if not needs_responses and row.get(fields.response) is None:
        row = row | {fields.response: ""}
    for name in (fields.prompt, fields.response):
        if not isinstance(row.get(name), str):
            raise UsageError(f'{place} has no text under "{name}"')
    return [Texts([row[fields.prompt]], row[fields.response], row.get("finish_reason") == "length")]


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


def load_recordings(args: argparse.Namespace, limit: int) -> dict[str, list[Recording]]:
    """Return up to `limit` requests of every file of `add_recording_arguments`, by its name."""
    fields = Fields(args.prompt_field, args.response_field, args.turns)
    texts = {str(path): read_requests(path, fields, limit) for path in args.files}
    tokenizer = tokenizer_of(args.tokenizer)
    return {name: tokenize(requests, tokenizer, args.max_prompt) for name, requests in texts.items()}


def count_accepted(tree: DraftTree, truth: np.ndarray) -> int:
    """Return the length of the path from the root whose tokens are those of `truth` (`[n]` integers)."""
    return len(tree.path_along(truth))


class DataSet(NamedTuple):
    """Prompts and their recorded responses as token ids, in the order in which they arrive."""

    name: str
    prompts: list[list[int]]  # distinct prompts
    responses: list[np.ndarray]  # `[n]` int64: the first tokens of each, as many as are generated
    past: Sequence[Recording] = ()  # earlier requests, which are not sent again

    @classmethod
    def of(
        cls,
        name: str,
        texts: Sequence[Texts],
        tokenizer: PreTrainedTokenizerBase,
        limit: int,
        num_past: int,
        max_prompt: int,
        max_new_tokens: int,
    ) -> "DataSet":
        """
        Return a data set with the first `num_past` texts as its past, and the next `limit` distinct prompts; raises
        `UsageError` if no prompt is left.
        """
        past = list(tokenized(texts[:num_past], tokenizer, max_prompt, max_new_tokens))
        asked: dict[bytes, Recording] = {}
        for item in tokenized(texts[num_past:], tokenizer, max_prompt, max_new_tokens):
            asked.setdefault(item.prompt.tobytes(), item)
            if len(asked) == limit:
                break
        if not asked and num_past >= len(texts):
            raise UsageError(f"--remember: {name!r} has {len(texts)} requests, of which {num_past} leave none to ask")
        if not asked:
            raise UsageError(f"{name!r}: the tokenizer makes no tokens of the prompts")
        prompts = [item.prompt.tolist() for item in asked.values()]
        return cls(name, prompts, [item.response for item in asked.values()], past)


def tokenized(
    texts: Sequence[Texts], tokenizer: PreTrainedTokenizerBase, max_prompt: int, max_new_tokens: int | None = None
) -> Iterator[Recording]:
    """Yield the texts as token ids: a conversation as one user's turn, a response up to `max_new_tokens`, or empty."""
    for item in texts:
        prompts = encode(["\n".join(item.context)], tokenizer, max_prompt)
        response = tokenizer(item.response, add_special_tokens=False, verbose=False).input_ids[:max_new_tokens]
        if prompts and (response or not item.response):
            yield Recording(np.array(prompts[0], np.int64), np.array(response, np.int64))


def answered(
    past: Sequence[Recording],
    model: PreTrainedModel,
    max_new_tokens: int,
    desc: str = "answering what is remembered",
) -> list[Recording]:
    """Return the requests with the target's own answers, as `answers` yields them."""
    return list(answers(past, model, max_new_tokens, desc))


def answers(
    past: Sequence[Recording], model: PreTrainedModel, max_new_tokens: int, desc: str
) -> Generator[Recording, None, None]:
    """Yield the requests in order with the target's own answers, decoded greedily and without drafts by an engine."""
    ends = set(eos_ids(model))
    options: dict[str, Any] = {"do_sample": False, "max_new_tokens": max_new_tokens}
    with Engine(model, "none", max_batch_size=_AT_ONCE) as engine:
        names = [engine.add_request(item.prompt.tolist(), **options) for item in past]
        for item, name in zip(track(past, desc=desc), names):
            output: Any = engine.get_result(name)
            if output.error is not None:
                raise RuntimeError(f"a request could not be answered: {output.error}")
            yield Recording(item.prompt, np.array(up_to_end(output.generated_tokens, ends), np.int64))


def remember(source: TreeCandidateGenerator, past: Sequence[Recording], namespace: str = "") -> None:
    """
    Run the suffix trees of a source through earlier requests, as if it had drafted for them: the trees keep their
    outputs and learn which drafts are accepted. Other sources are left as they are.
    """
    for trees in (source, *getattr(source, "sources", ())):
        if isinstance(trees, SuffixTreeCandidates):
            for item in past:
                _decode(trees, item, namespace)


def _decode(trees: SuffixTreeCandidates, item: Recording, namespace: str) -> None:
    """Replay one request to the trees; all nodes that they draft are verified."""
    name, rest = object(), item.response
    trees.begin(SourceRequest(name, item.prompt, namespace=namespace))
    while len(rest):
        (tree,) = trees.propose([name], [trees.default_num_nodes])
        num_tokens = count_accepted(tree, rest) + 1
        trees.observe(name, rest[:num_tokens])
        rest = rest[num_tokens:]
    trees.stop(name)
