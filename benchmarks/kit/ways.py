"""
Ways to answer a queue of prompts, transformers' own and this library's, which share one interface, `answer(prompts)`.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np
from transformers import ContinuousBatchingConfig

from hf_smartspec.commands.common.arguments import UsageError
from hf_smartspec.commands.common.models import left_padded
from hf_smartspec.commands.common.replaying import RecordedText
from hf_smartspec.commands.common.runs import eos_ids, up_to_end
from hf_smartspec.commands.common.setup import Setup
from hf_smartspec.generate import enabled
from hf_smartspec.goodput import BatchLookupTable, LengthPolicy, NoSpeculation
from hf_smartspec.prepare.config import SmartSpecConfig

from .sources import sources_by_name
from .tables import Column, Row, Rows

_WARM_UP = 8  # new tokens
CONTINUOUS = "transformers, generate_batch"

Prompts = Sequence[np.ndarray]
Outputs = list[list[int]]
Answer = Callable[[Setup, Prompts], Outputs]


class Way(NamedTuple):
    """
    Args:
        name (`str`): Shown.
        function (`Callable`): Returns the new tokens of each prompt.
    """

    name: str
    function: Answer

    def answer(self, setup: Setup, prompts: Prompts) -> Outputs:
        return self.function(setup, prompts)

    def measure(self, setup: Setup) -> Row:
        """Answer all prompts of the set-up; of the outputs, checksums are kept."""
        start = time.perf_counter()
        outputs = self.answer(setup, setup.prompts)
        seconds = time.perf_counter() - start
        checksums = [crc32(np.array(tokens, np.int64).tobytes()) for tokens in outputs]
        return {"seconds": seconds, "tokens": sum(map(len, outputs)), "checksums": checksums}


def warm_up(ways: Iterable[Way], setup: Setup) -> None:
    """Answer a first batch in each way, with few tokens: what is measured or compiled once is so by then."""
    short = replace(setup, max_new_tokens=_WARM_UP)
    for way in ways:
        way.answer(short, setup.prompts[: setup.max_batch_size])


# What ways have in common when they are compared: the first one is the reference.


def summary(runs: Sequence[Row]) -> Row:
    """Return the row of a way that was measured in several turns."""
    seconds = median(row["seconds"] for row in runs)
    return dict(runs[-1]) | {"seconds": seconds, "tokens_per_second": runs[-1]["tokens"] / seconds}


def speed_up(row: Row, rows: Rows) -> float:
    """Return tokens per second by those of the first way."""
    first = next(iter(rows.values()))
    return float(row["tokens_per_second"] / first["tokens_per_second"])


def num_same(row: Row, rows: Rows) -> int:
    """Return the number of outputs that are those of the first way."""
    first = next(iter(rows.values()))
    return sum(own == other for own, other in zip(row["checksums"], first["checksums"]))


def _same_outputs(row: Row, rows: Rows) -> str:
    return f"{num_same(row, rows)} / {len(row['checksums'])}"


COLUMNS = (
    Column("seconds", "seconds", "{:.1f}"),
    Column("tokens", "tokens"),
    Column("tokens / s", "tokens_per_second", "{:.1f}"),
    Column("speed-up", speed_up, "{:.2f}"),
    Column("same outputs", _same_outputs),
)
HALF_PRECISION = (
    "In half precision, batches of different shapes round differently, and near-ties then go on with other tokens; in "
    "float32 all outputs are the same."
)


# The ways.


def static() -> Way:
    """
    Return `generate` on batches of prompts in their order, padded on the left, each as long as its longest output.
    """
    return Way("transformers, static batches", partial(_static, None))


def static_with_drafts(name: str, policy: str) -> Way:
    """
    Return the same with drafts, as Su et al.'s server has it (section 5.3).

    Args:
        policy (`str`): "none", "k=NUMBER" (chains of so many tokens, or fewer), "table" (which `smartspec profile
            --table` has kept) or "auction".
    """
    policies: dict[str, LengthPolicy | str | None] = {"none": NoSpeculation(), "table": "table", "auction": None}
    chosen = policies[policy] if policy in policies else BatchLookupTable({1: int(policy.removeprefix("k="))})

    def answer(setup: Setup, prompts: Prompts) -> Outputs:
        return _static(replace(sources_by_name([name], setup)[name](), policy=chosen), setup, prompts)

    return Way(f"static batches, {name}, {policy}", answer)


def continuous(hint: str = "", **options: Any) -> Way:
    """
    Return `generate_batch`. It cannot replay recorded texts; it generates as many tokens as they have.

    Args:
        hint (`str`): Ends the message where it fails.
        options: Of its configuration.
    """
    return Way(CONTINUOUS, partial(_continuous, hint, options))


def assisted(name: str, **options: Any) -> Way:
    """Return `generate_batch` of an enabled model, where an engine drafts."""
    return Way(name, partial(_assisted, name, options))


def engine(name: str) -> Way:
    """Return a new engine, whose source has learnt nothing but what the set-up remembers."""
    return Way(f"engine, {name}", partial(_engine, name))


def _static(config: SmartSpecConfig | None, setup: Setup, prompts: Prompts) -> Outputs:
    outputs: Outputs = []
    pad_id, ends = setup.model.generation_config.pad_token_id, set(eos_ids(setup.model))
    for first in range(0, len(prompts), setup.max_batch_size):
        rows = prompts[first : first + setup.max_batch_size]
        inputs: dict[str, Any] = left_padded(rows, pad_id, setup.model.device)
        if setup.replays:
            texts = [_responses(setup)[prompt.tobytes()] for prompt in rows]
            inputs["logits_processor"] = [RecordedText(inputs["input_ids"], texts, setup.end_id)]
        if config is not None:
            inputs["assistant"] = config
        with nullcontext() if config is None else enabled(setup.model):
            found = setup.model.generate(**inputs, max_new_tokens=setup.max_new_tokens)
        outputs += [up_to_end(row, ends) for row in found[:, inputs["input_ids"].shape[1] :].tolist()]
    return outputs


def _continuous(hint: str, options: dict[str, Any], setup: Setup, prompts: Prompts) -> Outputs:
    """
    Answer with `generate_batch`.

    Raises:
        UsageError: if transformers, which only logs what goes wrong, leaves requests out or unfinished.
    """
    longest = max(map(len, setup.prompts)) + setup.max_new_tokens
    config = continuous_config(setup.max_batch_size, longest, **options)  # room for as many rows as the others have
    if setup.replays:
        found: Any = _continuous_of_lengths(setup, prompts, config)
    else:
        found = setup.model.generate_batch(
            [prompt.tolist() for prompt in prompts],
            max_new_tokens=setup.max_new_tokens,
            continuous_batching_config=config,
        )
    errors = [output.error for output in found.values() if output.error is not None]
    if errors or len(found) != len(prompts):
        reason = f" ({errors[0]})" if errors else ""
        raise UsageError(f"generate_batch served {len(found) - len(errors)} of {len(prompts)} prompts{reason}{hint}")
    return [output.generated_tokens for output in found.values()]


def _continuous_of_lengths(setup: Setup, prompts: Prompts, config: Any) -> dict[str, Any]:
    """Do what `generate_batch` does, with a length of its own for every request."""
    responses, ends = _responses(setup), set(eos_ids(setup.model))
    texts = [up_to_end([*responses[prompt.tobytes()].tolist(), setup.end_id], ends) for prompt in prompts]
    lengths = [min(len(text), setup.max_new_tokens) for text in texts]
    with setup.model.continuous_batching_context_manager(continuous_batching_config=config, timeout=5) as manager:
        return serve_lengths(manager, prompts, lengths)


def _assisted(name: str, options: dict[str, Any], setup: Setup, prompts: Prompts) -> Outputs:
    with enabled(setup.model, sources_by_name([name], setup)[name]()):
        return _continuous("", options, setup, prompts)


def _engine(name: str, setup: Setup, prompts: Prompts) -> Outputs:
    config = sources_by_name([name], setup)[name]()
    engine = setup.new_engine(config.assistant, config.policy)
    outputs = engine.generate(list(prompts), max_new_tokens=setup.max_new_tokens)
    return [output.generated_tokens for output in outputs]


def _responses(setup: Setup) -> dict[bytes, np.ndarray]:
    """Return what was recorded, by prompt; nothing where that is not replayed."""
    responses = setup.responses if setup.replays else None
    return {prompt.tobytes(): response for prompt, response in zip(setup.prompts, responses or ())}


# transformers' continuous batching.


def continuous_config(num_rows: int, longest: int, page: int = 32, **options: Any) -> ContinuousBatchingConfig:
    """
    Return a configuration whose cache has room for `num_rows` rows of the longest text, in tokens, and whose steps have
    up to 512 tokens.
    """
    num_pages = num_rows * -(-longest // page)
    return ContinuousBatchingConfig(page_size=page, num_blocks=num_pages, max_batch_tokens=512, **options)


def serve_lengths(manager: Any, prompts: Sequence[np.ndarray], lengths: Sequence[int]) -> dict[str, Any]:
    """
    Return the outputs of `generate_batch` by request, in order, where each request has a length of its own. Outputs are
    missing where the manager, which only logs errors, has stopped.
    """
    names = [
        manager.add_request(prompt.tolist(), max_new_tokens=length, eos_token_id=-1)
        for prompt, length in zip(prompts, lengths)
    ]
    found: dict[str, Any] = {}
    while len(found) < len(names):
        output = manager.get_result(timeout=1)
        if output is not None and output.is_finished():
            found[output.request_id] = output
        elif output is None and not manager.is_running():
            break
    return {name: found[name] for name in names if name in found}
