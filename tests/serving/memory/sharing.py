"""Requests whose prompts begin alike."""

import numpy as np

from hf_smartspec import Engine, EngineOutput

from ...generate.helpers import VOCAB_SIZE
from ..helpers import SETTINGS, TIMEOUT, Asked, all_alone

PREFIX = np.random.default_rng(5).integers(3, VOCAB_SIZE, 90).tolist()
FIRST = [*PREFIX, 4, 9]
LONG = {"max_new_tokens": 120, "eos_token_id": None}
LONGER = {"max_new_tokens": 300, "eos_token_id": None}  # for what is to happen before they end

_fetched: dict[str, EngineOutput] = {}


def alike(count: int, seed: int = 0, prefix: list[int] = PREFIX, longest: int = 20, **settings) -> list[Asked]:
    """Requests of all settings whose prompts begin alike."""
    rng = np.random.default_rng(seed)
    asked = []
    for index in range(count):
        own = rng.integers(3, VOCAB_SIZE, rng.integers(1, longest)).tolist()
        given = {"max_new_tokens": int(rng.integers(2, 20))} | SETTINGS[index % len(SETTINGS)] | settings
        asked.append(Asked(prefix + own, given, int(rng.integers(1000)) if given.get("do_sample") else None))
    return asked


def begin(engine: Engine, asked: Asked) -> str:
    """A request that has come to its first token; on a busy machine, perhaps to its end, which is thereby fetched."""
    name = engine.add_request(asked.prompt, streaming=True, **asked.arguments)
    output = next(engine.request_id_iter(name))
    if output.is_finished():
        _fetched[name] = output
    return name


def end(engine: Engine, model, asked: Asked, name: str) -> None:
    output = _fetched.pop(name, None) or engine.get_result(name, timeout=TIMEOUT)
    assert output.error is None and output.generated_tokens == asked.alone(model)


def end_all(engine: Engine, model, requests: list[Asked], names: list[str]) -> None:
    all_alone(model, requests)  # in few calls
    for asked, name in zip(requests, names):
        end(engine, model, asked, name)


def check_rows(engine: Engine) -> None:
    """Nothing runs: every row is a kept one, and those in which others begin know how many these are."""
    memory = engine._memory
    rows = memory.cache.rows
    assert len(rows) == len(memory.prefixes) and all(row in memory.prefixes for row in rows)
    for row in rows:
        assert row.num_sharers == sum(other.prefix_row is row for other in rows)
        assert row.prefix_row is None or (row.prefix_row in rows and row.prefix_row.prefix_row is None)
