"""
How a peer is asked: it reads a job (JSON), loads the model, and says what it is and which ways to decode it has. Then,
for every line that names a way and rows, it decodes once and answers in one line. All lines are JSON.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

Prompts = Sequence[Sequence[int]]
Decode = Callable[[Prompts, int], list[list[int]]]  # (prompts, number of new tokens) -> new tokens of each row


def _nothing(num_rows: int) -> None:
    pass


class Way(NamedTuple):
    """
    How a peer decodes, greedily and beyond ends of sequence.

    Args:
        decode (callable): The function that is timed.
        in_batches (`bool`): Whether it takes several rows at once.
        prepare (callable): Called with the number of rows before every decoding, off the clock: forgets what has been
            decoded before.
    """

    decode: Decode
    in_batches: bool = False
    prepare: Callable[[int], object] = _nothing


class Engine(NamedTuple):
    """
    Args:
        ways (dict): The ways by name.
        about (`str`): Versions, and the instructions of the CPU that its kernels use.
    """

    ways: dict[str, Way]
    about: str


def serve(load: Callable[[dict[str, Any]], Engine]) -> None:
    """
    Answer lines of stdin until it ends. Output that libraries print goes to stderr.

    Args:
        load (callable): From a job, `{"files", "kind", "prompts", "num_tokens", "threads", "heads", "settings"}`.
    """
    with os.fdopen(os.dup(1), "w", buffering=1) as answers:
        os.dup2(2, 1)
        with open(sys.argv[1], encoding="utf-8") as file:
            job = json.load(file)
        try:
            engine = load(job)
        except Exception as error:  # of any library, of any kind
            print(json.dumps({"error": _told(error)}), file=answers)
            return
        ways = {name: way.in_batches for name, way in engine.ways.items()}
        print(json.dumps({"ways": ways, "about": engine.about}), file=answers)
        for line in sys.stdin:
            print(json.dumps(_answer(engine.ways, job, **json.loads(line))), file=answers)


def _answer(ways: dict[str, Way], job: dict[str, Any], way: str, rows: list[int]) -> dict[str, Any]:
    """Decode once; an error is an answer too, so that the other ways go on."""
    prompts = [job["prompts"][row] for row in rows]
    try:
        ways[way].prepare(len(rows))
        start = time.perf_counter()
        tokens = ways[way].decode(prompts, job["num_tokens"])
        return {"seconds": time.perf_counter() - start, "tokens": tokens}
    except Exception as error:  # of any library, of any kind
        return {"error": _told(error)}


def _told(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())
