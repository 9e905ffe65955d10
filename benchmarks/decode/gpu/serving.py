"""Ways to answer a batch of requests: this library's engine, and transformers' own, each to the same lengths."""

import copy
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel

from hf_smartspec.commands.common.models import left_padded
from hf_smartspec.commands.common.replaying import RecordedText, ReplayEngine
from hf_smartspec.commands.common.runs import synchronize
from hf_smartspec.prepare.config import SmartSpecConfig

from ...kit.tables import Row
from ...kit.ways import continuous_config, serve_lengths
from .bandwidth import peak_bytes
from .shapes import Workload, World

_WARM_UP = 8  # new tokens
_NO_END = -1
_PAGE = 256  # tokens of a page of transformers' cache, as it has by default;
_LEAST_CACHED = 4096  # it captures graphs of large batches, for which there must be room

# Answers a workload at a batch size with a model; what it returns is kept beside the seconds.
Answer = Callable[[PreTrainedModel, Workload, int], Row]


class Way(NamedTuple):
    """
    A way to answer, which is timed as often as the plan says.

    Args:
        answer (`Answer`): Does it.
        warms_itself (`bool`): Then it is called once, and times itself.
        is_compiled (`bool`): Then it is warmed up by all that is timed, twice: what is compiled depends on lengths.
    """

    answer: Answer
    warms_itself: bool = False
    is_compiled: bool = False


def measure(world: World, shape: str, work: Callable[[], Workload], batch_size: int, way: Way) -> Row:
    """Return seconds, tokens per second and memory of a way to answer."""
    model, texts = world.target(shape), work()
    implementation = model.config._attn_implementation
    with torch.no_grad(), peak_bytes(world.device) as peak:
        try:
            for short in _warm_ups(texts, way):
                way.answer(model, short, batch_size)
            num_runs = 1 if way.warms_itself else world.plan.runs
            rows = [_timed(world, model, texts, batch_size, way.answer) for _ in range(num_runs)]
        finally:
            if model.config._attn_implementation != implementation:  # `generate_batch` was interrupted
                model.set_attn_implementation(implementation)
    seconds = median(row["seconds"] for row in rows)
    return rows[-1] | {
        "seconds": seconds,
        "runs": [row["seconds"] for row in rows],
        "tokens": texts.num_tokens,
        "tokens_per_second": texts.num_tokens / seconds,
        "peak_bytes": peak.value,
        "parameters": model.num_parameters(),
    }


def _warm_ups(texts: Workload, way: Way) -> list[Workload]:
    if way.warms_itself:
        return []
    return [texts, texts] if way.is_compiled else [texts.cut(_WARM_UP)]


def _timed(world: World, model: PreTrainedModel, texts: Workload, batch_size: int, answer: Answer) -> Row:
    synchronize(world.device)
    start = time.perf_counter()
    row = answer(model, texts, batch_size)
    synchronize(world.device)
    return {"seconds": time.perf_counter() - start} | row


def engine(make: Callable[[PreTrainedModel, Workload], SmartSpecConfig]) -> Way:
    """
    Return this library's engine. Each run makes a new one with a new source, and is timed from the first request on:
    the recording of forwards is part of the time.
    The target runs at its cost, arg max included, and picks the given answers.
    """

    def answer(model: PreTrainedModel, work: Workload, batch_size: int) -> Row:
        served = ReplayEngine(model, make(model, work), batch_size, work.prompts, work.responses, _NO_END)
        start = time.perf_counter()
        names = [served.add_request(prompt, max_new_tokens=len(response)) for prompt, response in zip(*work)]
        with served:
            outputs = [served.get_result(name) for name in names]
        seconds = time.perf_counter() - start
        for output, response in zip(outputs, work.responses):
            assert output is not None and output.generated_tokens == response.tolist(), f"answered otherwise: {output}"
        counts = served.statistics
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

    return Way(answer)


def generate(is_compiled: bool = False, **arguments: Any) -> Way:
    """
    Return transformers' `generate`, in batches that are as long as their longest answer. Which tokens it generates
    makes no difference to its time.
    """

    def answer(model: PreTrainedModel, work: Workload, batch_size: int) -> Row:
        for first in range(0, len(work.prompts), batch_size):
            rows = slice(first, first + batch_size)
            inputs: dict[str, Any] = left_padded(work.prompts[rows], 0, model.device)
            longest = max(map(len, work.responses[rows]))
            found = model.generate(**inputs, do_sample=False, max_new_tokens=longest, **arguments)
            assert found.shape[1] == inputs["input_ids"].shape[1] + longest, "nothing ends a text"
        return {}

    return Way(answer, is_compiled=is_compiled)


def assisted(make_arguments: Callable[[], dict[str, Any]]) -> Way:
    """Return transformers' assisted `generate`, one request at a time; the target picks the given answers."""

    def answer(model: PreTrainedModel, work: Workload, batch_size: int) -> Row:
        arguments = make_arguments()
        draft = arguments.get("assistant_model")
        for prompt, response in zip(*work):
            inputs = left_padded([prompt], 0, model.device)
            text = RecordedText(inputs["input_ids"], [response], 0)
            with text.replaying(model, draft), _unchanged(draft):
                found = model.generate(
                    **inputs, do_sample=False, max_new_tokens=len(response), logits_processor=[text], **arguments
                )
            answered = found[0, len(prompt) :].tolist()
            assert answered == response.tolist(), f"answered otherwise: {answered}"
        return {}

    return Way(answer)


@contextmanager
def _unchanged(draft: PreTrainedModel | None) -> Iterator[None]:
    """
    Restore the draft's generation config, on which transformers leaves the draft length that it has learnt, and more.
    """
    before: Any = None if draft is None else copy.deepcopy(draft.generation_config)
    try:
        yield
    finally:
        if draft is not None:
            draft.generation_config = before


def continuous(**options: Any) -> Way:
    """
    Return transformers' `generate_batch`, timed from the first request on, when its memory is allocated, its graphs are
    captured, and it has answered some requests. It generates its own tokens, as many as the given answers have.
    """

    def answer(model: PreTrainedModel, work: Workload, batch_size: int) -> Row:
        longest = max(len(prompt) + len(response) for prompt, response in zip(*work))
        room = max(longest, -(-_LEAST_CACHED // batch_size))
        # Nothing is kept of the prompts, which come twice.
        config = continuous_config(batch_size, room, page=_PAGE, allow_block_sharing=False, **options)
        own: Any = copy.deepcopy(model.generation_config)  # it is written to
        own.eos_token_id = _NO_END
        with model.continuous_batching_context_manager(own, timeout=5, continuous_batching_config=config) as manager:
            lengths = [len(response) for response in work.responses]
            serve_lengths(manager, work.prompts, [min(length, _WARM_UP) for length in lengths])
            start = time.perf_counter()
            found = serve_lengths(manager, work.prompts, lengths)
            seconds = time.perf_counter() - start
        errors = [output.error for output in found.values() if output.error is not None]
        numbers = [len(output.generated_tokens) for output in found.values()]
        assert not errors and numbers == lengths, f"served {sum(numbers)} of {sum(lengths)} tokens; {errors[:1]}"
        return {"seconds": seconds}

    return Way(answer, warms_itself=True)
