"""Ways to answer a batch of requests: this library's engine, and transformers' own, each to the same lengths."""

import copy
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from hf_smartspec.commands.common.models import left_padded
from hf_smartspec.commands.common.replaying import RecordedText, ReplayEngine
from hf_smartspec.commands.common.runs import synchronize, unchanged
from hf_smartspec.prepare.config import SmartSpecConfig

from ...kit.tables import Row
from ...kit.time_limit import OutOfTimeError
from ...kit.ways import continuous_config, serve_lengths
from .bandwidth import peak_bytes
from .shapes import Workload, World

_NO_END = -1
_PAGE = 256  # tokens of a page of transformers' cache, as it has by default;
_LEAST_CACHED = 4096  # it captures graphs of large batches, for which there must be room

Run = Callable[[], Row]  # answers a workload once; what it returns is kept beside the seconds
# Takes a model, a workload and a batch size; yields a run, which is called several times.
Way = Callable[[PreTrainedModel, Workload, int], AbstractContextManager[Run]]


def measure(world: World, shape: str, work: Callable[[], Workload], batch_size: int, way: Way) -> Row:
    """
    Return seconds, tokens per second and memory of a way to answer. It answers the whole workload before it is timed,
    several times if it is fast, so that all shapes of its forwards are compiled or recorded.
    """
    model, texts = world.target(shape), work()
    implementation = model.config._attn_implementation
    rows: list[Row] = []
    with torch.no_grad(), peak_bytes(world.device) as peak:
        try:
            with way(model, texts, batch_size) as run:
                warm_ups = list(_repeated(world, run, world.plan.warm_ups))
                try:
                    for row in _repeated(world, run, world.plan.runs):
                        rows.append(row)
                except OutOfTimeError:
                    if not rows:
                        raise
        finally:
            if model.config._attn_implementation != implementation:  # `generate_batch` was interrupted
                model.set_attn_implementation(implementation)
    seconds = median(row["seconds"] for row in rows)
    return rows[-1] | {
        "seconds": seconds,
        "runs": [row["seconds"] for row in rows],
        "warm_ups": [row["seconds"] for row in warm_ups],
        "tokens": texts.num_tokens,
        "tokens_per_second": texts.num_tokens / seconds,
        "peak_bytes": peak.value,
        "parameters": model.num_parameters(),
    }


def _repeated(world: World, run: Run, most: int) -> Iterator[Row]:
    """Yield the rows of up to `most` runs. After the first, they end with the section's time, and if they are long."""
    total, is_first = 0.0, True
    while is_first or (most > 0 and total < world.plan.repeated_for and world.has_time()):
        synchronize(world.device)
        start = time.perf_counter()
        row = run()
        synchronize(world.device)
        row = {"seconds": time.perf_counter() - start} | row
        total, most, is_first = total + row["seconds"], most - 1, False
        yield row


def engine(make: Callable[[PreTrainedModel, Workload], SmartSpecConfig]) -> Way:
    """
    Return this library's engine. One engine answers again and again, as a service does: forwards are recorded, and
    costs and rates are known, while nothing is left of earlier texts. It is timed from the first request on.
    The target runs at its cost, arg max included, and picks the given answers.
    """

    @contextmanager
    def begin(model: PreTrainedModel, work: Workload, batch_size: int) -> Iterator[Run]:
        served = ReplayEngine(model, make(model, work), batch_size, work.prompts, work.responses, _NO_END)
        yield partial(_serve, served, work)

    return begin


def _serve(served: ReplayEngine, work: Workload) -> Row:
    assistant, before = served.forget_texts(), replace(served.statistics)
    start = time.perf_counter()
    names = [
        served.add_request(prompt, assistant=assistant, max_new_tokens=len(response)) for prompt, response in zip(*work)
    ]
    with served:
        outputs = [served.get_result(name) for name in names]
    seconds = time.perf_counter() - start
    for output, response in zip(outputs, work.responses):
        assert output is not None and output.generated_tokens == response.tolist(), f"answered otherwise: {output}"
    counts = served.statistics - before
    return {
        "seconds": seconds,
        "steps": counts.forwards,
        "seconds_per_step": counts.seconds_total / max(counts.forwards, 1),
        "seconds_prefill": counts.seconds_prefill,
        "acceptance_rate": counts.acceptance_rate,
        "drafted_tokens": counts.drafted_tokens,
        "tokens_per_row_and_step": counts.mean_accepted_length,
        "shares": {
            name: getattr(counts, f"seconds_{name}") / max(counts.seconds_total, 1e-9)
            for name in ("draft", "select", "forward", "verify", "observe")
        },
    }


def generate(is_compiled: bool = False, **arguments: Any) -> Way:
    """
    Return transformers' `generate`, in batches that are as long as their longest answer. Which tokens it generates
    makes no difference to its time.
    """

    @contextmanager
    def begin(model: PreTrainedModel, work: Workload, batch_size: int) -> Iterator[Run]:
        def run() -> Row:
            for first in range(0, len(work.prompts), batch_size):
                rows = slice(first, first + batch_size)
                inputs: dict[str, Any] = left_padded(work.prompts[rows], 0, model.device)
                longest = max(map(len, work.responses[rows]))
                found = model.generate(**inputs, do_sample=False, max_new_tokens=longest, **arguments)
                assert found.shape[1] == inputs["input_ids"].shape[1] + longest, "nothing ends a text"
            return {}

        if is_compiled:
            run()  # what is compiled in the next run may depend on the lengths of two
        yield run

    return begin


def assisted(make_arguments: Callable[[], dict[str, Any]]) -> Way:
    """Return transformers' assisted `generate`, one request at a time; the target picks the given answers."""

    @contextmanager
    def begin(model: PreTrainedModel, work: Workload, batch_size: int) -> Iterator[Run]:
        def run() -> Row:
            for prompt, response in zip(*work):
                _assist(model, prompt, response, make_arguments())
            return {}

        yield run

    return begin


def _assist(model: PreTrainedModel, prompt: np.ndarray, response: np.ndarray, arguments: dict[str, Any]) -> None:
    inputs = left_padded([prompt], 0, model.device)
    text, draft = RecordedText(inputs["input_ids"], [response], 0), arguments.get("assistant_model")
    with text.replaying(model, draft), unchanged(draft):
        found = model.generate(
            **inputs, do_sample=False, max_new_tokens=len(response), logits_processor=[text], **arguments
        )
    answered = found[0, len(prompt) :].tolist()
    assert answered == response.tolist(), f"answered otherwise: {answered}"


def continuous(**options: Any) -> Way:
    """
    Return transformers' `generate_batch`, timed from the first request on, when its memory is allocated and its graphs
    are captured. It generates its own tokens, as many as the given answers have.
    """

    @contextmanager
    def begin(model: PreTrainedModel, work: Workload, batch_size: int) -> Iterator[Run]:
        longest = max(len(prompt) + len(response) for prompt, response in zip(*work))
        room = max(longest, -(-_LEAST_CACHED // batch_size))
        # Nothing is kept of the prompts, which come again.
        config = continuous_config(batch_size, room, page=_PAGE, allow_block_sharing=False, **options)
        own: Any = copy.deepcopy(model.generation_config)  # it is written to
        own.eos_token_id = _NO_END
        with model.continuous_batching_context_manager(own, timeout=5, continuous_batching_config=config) as manager:
            yield partial(_serve_continuously, manager, work)

    return begin


def _serve_continuously(manager: Any, work: Workload) -> Row:
    lengths = [len(response) for response in work.responses]
    found = serve_lengths(manager, work.prompts, lengths)
    errors = [output.error for output in found.values() if output.error is not None]
    numbers = [len(output.generated_tokens) for output in found.values()]
    assert not errors and numbers == lengths, f"served {sum(numbers)} of {sum(lengths)} tokens; {errors[:1]}"
    return {}
