"""
Data sets that papers about speculative decoding use, by short names: `@gsm8k` in place of a file reads the one of the
Hugging Face hub, row by row, and `@gsm8k=FILE` a file with the same columns.
"""

import difflib
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from .arguments import UsageError

_PREFIX = "@"
_ROLES = {"human": "user", "gpt": "assistant"}


class Workload(NamedTuple):
    """
    A data set, and how its rows become requests.

    Args:
        path, config, split (`str`): As `datasets.load_dataset` takes them; "json" loads `data_files`.
        as_request (`Callable`): Returns a row with "prompt" and "response", and "turns" of conversations; empty for
            a row that holds no request.
        data_files (`str`, *optional*): File of the data set, where it is no whole repository.
    """

    path: str
    config: str | None
    split: str
    as_request: Callable[[dict[str, Any]], dict[str, Any]]
    data_files: str | None = None


def _pair(prompt: str, response: str, instruction: str = "{}") -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Return a function that takes prompt and response from two columns."""
    return lambda row: {"prompt": instruction.format(row[prompt]), "response": row[response]}


def _chat(column: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """
    Return a function that takes the turns from a column of messages, whose keys are ShareGPT's or OpenAI's, and prompt
    and response from the first of a user's turns that is answered; an empty row where none is.
    """

    def turns(row: dict[str, Any]) -> dict[str, Any]:
        messages = []
        for item in row[column]:
            role = item.get("role") or item.get("from")
            content = item["content"] if "content" in item else item.get("value")
            messages.append({"role": _ROLES.get(role, role), "content": content or ""})
            if item.get("tool_calls"):
                messages[-1]["tool_calls"] = item["tool_calls"]
        first = next(
            (pair for pair in pairwise(messages) if [item["role"] for item in pair] == ["user", "assistant"]), None
        )
        if first is None:
            return {}
        return {"prompt": first[0]["content"], "response": first[1]["content"], "turns": messages}

    return turns


def _spec_bench(row: dict[str, Any]) -> dict[str, Any]:
    return {"prompt": row["turns"][0], "response": (row.get("reference") or [""])[0]}


def _alpaca(row: dict[str, Any]) -> dict[str, Any]:
    return {"prompt": "\n".join(filter(None, [row["instruction"], row.get("input")])), "response": row["output"]}


_SHARE_GPT = "anon8231489123/ShareGPT_Vicuna_unfiltered"
_SPEC_BENCH = "https://raw.githubusercontent.com/hemingkx/Spec-Bench/main/data/spec_bench/question.jsonl"
WORKLOADS = {
    "sharegpt": Workload(
        _SHARE_GPT, None, "train", _chat("conversations"), "ShareGPT_V3_unfiltered_cleaned_split.json"
    ),
    "arena": Workload("lmsys/chatbot_arena_conversations", None, "train", _chat("conversation_a")),
    "wildchat": Workload("allenai/WildChat-1M", None, "train", _chat("conversation")),
    "spider": Workload("xlangai/spider", None, "train", _pair("question", "query", "Write an SQL query. {}")),
    "gsm8k": Workload("openai/gsm8k", "main", "test", _pair("question", "answer")),
    "cnn-dailymail": Workload("abisee/cnn_dailymail", "3.0.0", "test", _pair("article", "highlights", "{}\nTL;DR:")),
    "spec-bench": Workload("json", None, "train", _spec_bench, _SPEC_BENCH),
    "swe-bench": Workload("nebius/SWE-rebench-openhands-trajectories", None, "train", _chat("trajectory")),
    "alpaca": Workload("tatsu-lab/alpaca", None, "train", _alpaca),
    "finance-alpaca": Workload("gbharti/finance-alpaca", None, "train", _alpaca),
    "code-search-net": Workload(
        "code-search-net/code_search_net", "python", "test", _pair("func_documentation_string", "func_code_string")
    ),
}


def is_workload(path: Path) -> bool:
    return str(path).startswith(_PREFIX)


def workload_rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """
    Yield number and request of each row of `@NAME` or `@NAME=FILE`.

    Raises:
        UsageError: if the name is unknown, `datasets` is missing, or the rows cannot be read or have other columns.
    """
    name, _, file = str(path).removeprefix(_PREFIX).partition("=")
    if name not in WORKLOADS:
        near = difflib.get_close_matches(name, WORKLOADS, n=1)
        meant = f", did you mean {near[0]!r}?" if near else f"; there are {', '.join(WORKLOADS)}"
        raise UsageError(f"no data set is called {name!r}{meant}")
    try:
        import datasets  # type: ignore[import-untyped]
    except ImportError as error:
        raise UsageError('datasets is missing: pip install "hf-smartspec[data]"') from error
    workload = WORKLOADS[name]
    try:
        if file:
            kind = "parquet" if Path(file).suffix == ".parquet" else "json"
            rows = datasets.load_dataset(kind, data_files=file, split="train", streaming=True)
        else:
            rows = datasets.load_dataset(
                workload.path, workload.config, data_files=workload.data_files, split=workload.split, streaming=True
            )
        for number, row in enumerate(rows, start=1):
            if request := workload.as_request(row):
                yield number, request
    except (KeyError, TypeError, IndexError) as error:
        raise UsageError(f"{str(path)!r} has rows of another form than {workload.path}: {error!r}") from error
    except Exception as error:  # of many kinds; all mean that it cannot be read
        raise UsageError(f"cannot read {str(path)!r}: {str(error).partition(chr(10))[0]}") from error
