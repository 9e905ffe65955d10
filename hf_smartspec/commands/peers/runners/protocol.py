"""
How a peer is asked: it reads a job (JSON), loads the model, and says which ways to decode it has. Then, for every line
that names a way and rows, it decodes once and answers in one line. All lines are JSON.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

Prompts = Sequence[Sequence[int]]
Decode = Callable[[Prompts, int], list[list[int]]]  # (prompts, number of new tokens) -> new tokens of each row


class Way(NamedTuple):
    """How a peer decodes, greedily and beyond ends of sequence."""

    decode: Decode
    in_batches: bool = False  # several rows at once


def serve(load: Callable[[dict[str, Any]], dict[str, Way]]) -> None:
    """
    Answers until there are no more lines. What libraries print goes to stderr.

    Args:
        load (callable): From a job, `{"files", "kind", "prompts", "num_tokens", "threads", "batch_size", "settings"}`,
            to the ways to decode by their names.
    """
    with os.fdopen(os.dup(1), "w", buffering=1) as answers:
        os.dup2(2, 1)
        with open(sys.argv[1], encoding="utf-8") as file:
            job = json.load(file)
        try:
            ways = load(job)
        except Exception as error:  # of any library, of any kind
            print(json.dumps({"error": _told(error)}), file=answers)
            return
        print(json.dumps({"ways": {name: way.in_batches for name, way in ways.items()}}), file=answers)
        for line in sys.stdin:
            print(json.dumps(_answer(ways, job, json.loads(line))), file=answers)


def _answer(ways: dict[str, Way], job: dict[str, Any], asked: dict[str, Any]) -> dict[str, Any]:
    """An error is an answer too: the other ways go on."""
    prompts = job["prompts"][asked["first"] : asked["first"] + asked["rows"]]
    start = time.perf_counter()
    try:
        tokens = ways[asked["way"]].decode(prompts, job["num_tokens"])
    except Exception as error:  # of any library, of any kind
        return {"error": _told(error)}
    return {"seconds": time.perf_counter() - start, "tokens": tokens}


def _told(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())
