"""Side-by-side measurement of ways to call `generate`: the same prompts, dtype, threads and number of tokens."""

import copy
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_smartspec import SmartSpecConfig, enabled
from hf_smartspec.commands.common.models import left_padded
from hf_smartspec.commands.common.runs import synchronize
from hf_smartspec.prepare.presets import suffix_trees


@dataclass(frozen=True)
class Method:
    """A way to call `generate`: a name to show, and the arguments that make it."""

    name: str
    arguments: dict[str, Any] = field(default_factory=dict)

    @property
    def is_ours(self) -> bool:
        return "assistant" in self.arguments


def all_methods(draft: PreTrainedModel) -> list[Method]:
    """Everybody's defaults; plain `generate` comes first."""
    return [
        Method("plain generate"),
        Method("transformers, draft model", {"assistant_model": draft}),
        Method("transformers, prompt lookup", {"prompt_lookup_num_tokens": 10}),
        Method("ours, draft model", {"assistant": draft}),
        Method("ours, draft model, trees", {"assistant": SmartSpecConfig(draft, num_nodes=8, width=3)}),
        Method("ours, prompt lookup", {"assistant": "prompt_lookup"}),
        Method("ours, auto", {"assistant": "auto"}),
    ]


@dataclass
class Result:
    """
    What one method did at one batch size. `num_steps` counts target forwards of single rows; of a refused call there
    is nothing but the message.
    """

    name: str
    batch_size: int
    is_ours: bool
    refusal: str | None = None
    seconds: list[float] = field(default_factory=list)  # of every repetition, all prompts together
    num_tokens: int = 0
    num_steps: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    num_rows: int = 0
    different_rows: set[int] = field(default_factory=set)  # rows with other tokens than plain generate's, in any run

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / median(self.seconds)

    def speedup(self, plain: "Result") -> float:
        """Against plain decoding in the same turn, which met the same load of the machine; the median of all turns."""
        ratios = [before / after for before, after in zip(plain.seconds, self.seconds)]
        return median(ratios) * self.num_tokens / plain.num_tokens

    @property
    def spread(self) -> float:
        """Median by fastest repetition: well above 1 if other programs were running for long."""
        return median(self.seconds) / min(self.seconds)

    @property
    def mean_accepted_length(self) -> float:
        return self.num_tokens / max(self.num_steps, 1)

    def as_dict(self) -> dict[str, Any]:
        values = {key: value for key, value in vars(self).items() if key != "different_rows"}
        if self.refusal is None:
            values |= {
                "num_different_rows": len(self.different_rows),
                "tokens_per_second": self.tokens_per_second,
                "mean_accepted_length": self.mean_accepted_length,
            }
        return values


class TargetCounter:
    """Counts a model's forwards and the tokens that are fed to it, as needed where no statistics are returned."""

    def __init__(self) -> None:
        self.num_forwards = self.num_fed = 0

    @contextmanager
    def attached_to(self, model: PreTrainedModel) -> Iterator["TargetCounter"]:
        def count(module, args, kwargs):
            ids = kwargs["input_ids"] if "input_ids" in kwargs else args[0]
            self.num_forwards += ids.shape[0]
            self.num_fed += ids.numel()

        hook = model.register_forward_pre_hook(count, with_kwargs=True)
        try:
            yield self
        finally:
            hook.remove()


def compare(
    model: PreTrainedModel,
    methods: Sequence[Method],
    prompts: Sequence[list[int]],
    batch_size: int,
    max_new_tokens: int,
    repetitions: int,
    max_seconds: float = math.inf,
) -> list[Result]:
    """
    Decodes all prompts greedily with every method. The methods take turns, and a first round, which is not timed,
    warms up (what is compiled or measured on first use) and counts. Past `max_seconds`, the round that runs is the last
    one; one is timed in any case.
    """
    start = time.perf_counter()
    pad_id = _pad_id(model)
    batches = [
        left_padded(prompts[start : start + batch_size], pad_id, model.device)
        for start in range(0, len(prompts), batch_size)
    ]
    results = [Result(method.name, batch_size, method.is_ours, num_rows=len(prompts)) for method in methods]
    common = {"do_sample": False, "max_new_tokens": max_new_tokens, "pad_token_id": pad_id}
    plain = [model.generate(**inputs, **common) for inputs in batches]
    for turn in range(1 + repetitions):
        if turn > 1 and time.perf_counter() - start > max_seconds:
            break
        for method, result in zip(methods, results):
            if result.refusal is not None:
                continue
            try:
                if turn == 0:
                    _count(model, method, batches, common, plain, result)
                else:
                    result.seconds.append(_time(model, method, batches, common, plain, result))
            except ValueError as error:
                if turn > 0 or method.is_ours:
                    raise
                result.refusal = str(error)
    return results


def _pad_id(model: PreTrainedModel) -> int:
    config = model.generation_config
    ids = config.pad_token_id if config.pad_token_id is not None else config.eos_token_id
    return 0 if ids is None else ids[0] if isinstance(ids, list) else ids


def _time(model, method, batches, common, plain, result: Result) -> float:
    seconds = 0.0
    for index, inputs in enumerate(batches):
        with ready_for(model, method):
            synchronize(model.device)
            start = time.perf_counter()
            output = model.generate(**inputs, **common, **method.arguments)
            synchronize(model.device)
            seconds += time.perf_counter() - start
        _note_differences(result, index, plain[index], output)
    return seconds


def _count(model, method, batches, common, plain, result: Result) -> None:
    for index, inputs in enumerate(batches):
        counter = TargetCounter()
        needs_counter = bool(method.arguments) and not method.is_ours  # hooks would change how ours is run
        with ready_for(model, method), counter.attached_to(model) if needs_counter else nullcontext():
            output = model.generate(**inputs, **common, **method.arguments, return_dict_in_generate=True)
        _note_differences(result, index, plain[index], output.sequences)
        prompt_len = inputs["input_ids"].shape[1]
        num_tokens = sum(_row_lengths(model, output.sequences[:, prompt_len:]))
        result.num_tokens += num_tokens
        statistics = getattr(output, "statistics", None)
        if statistics is not None:
            result.num_steps += statistics.steps
            result.num_drafted += statistics.drafted_tokens
            result.num_accepted += statistics.accepted_tokens
        elif method.arguments:  # transformers' assisted decoding: one row; every forward yields one token of its own
            result.num_steps += counter.num_forwards
            result.num_drafted += counter.num_fed - prompt_len - (counter.num_forwards - 1)
            result.num_accepted += num_tokens - counter.num_forwards
        else:
            result.num_steps += num_tokens


def _note_differences(result: Result, batch: int, plain: torch.Tensor, output: torch.Tensor) -> None:
    for row, (expected, found) in enumerate(zip(plain.tolist(), output.tolist())):
        if expected != found:
            result.different_rows.add(batch * result.batch_size + row)


def _row_lengths(model: PreTrainedModel, tokens: torch.Tensor) -> list[int]:
    """Generated tokens of every row, up to and with its end-of-sequence token."""
    ids = model.generation_config.eos_token_id
    ends = {ids} if isinstance(ids, int) else set(ids or ())
    return [next((i + 1 for i, token in enumerate(row) if token in ends), len(row)) for row in tokens.tolist()]


@contextmanager
def ready_for(model: PreTrainedModel, method: Method) -> Iterator[None]:
    """
    `assistant=` is understood inside, no answer is remembered from the turn before, and the draft is as it was before
    afterwards: transformers leaves the draft length that it has learnt, and more, on the draft's generation config.
    """
    if method.arguments.get("assistant") == "auto":
        suffix_trees(model).remove_namespace("")
    draft = method.arguments.get("assistant_model")
    before = None if draft is None else copy.deepcopy(draft.generation_config)
    try:
        with enabled(model):
            yield
    finally:
        if draft is not None:
            draft.generation_config = before
