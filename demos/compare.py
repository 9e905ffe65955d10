"""Side-by-side measurement of ways to call `generate`: the same prompts, dtype, threads and number of tokens."""

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_smartspec import enabled
from hf_smartspec.commands.common.models import left_padded, name_of
from hf_smartspec.commands.common.runs import eos_ids, pad_id, synchronize, unchanged, up_to_end
from hf_smartspec.prepare.presets import suffix_trees

PLAIN, NO_DRAFTS = "plain generate", "ours, no drafts"
_WARM_UP = 16  # new tokens


@dataclass(frozen=True)
class Method:
    """A way to call `generate`: a name to show, and the arguments that make it."""

    name: str
    arguments: dict[str, Any] = field(default_factory=dict)

    @property
    def is_ours(self) -> bool:
        return "assistant" in self.arguments


def all_methods(draft: PreTrainedModel | None, heads: str | None = None) -> list[Method]:
    """
    Return the methods to compare, with everybody's defaults: plain `generate`, then transformers' methods, then ours.

    Args:
        draft (`PreTrainedModel`, *optional*): A draft model of the target.
        heads (`str`, *optional*): Folder of EAGLE-3 heads that were trained for the target.
    """
    methods = [
        Method(PLAIN),
        Method("transformers, prompt lookup", {"prompt_lookup_num_tokens": 10}),
        Method(NO_DRAFTS, {"assistant": "none"}),
        Method("ours, prompt lookup", {"assistant": "prompt_lookup"}),
        Method("ours, auto", {"assistant": "auto"}),
    ]
    if draft is not None:
        methods.insert(1, Method("transformers, draft model", {"assistant_model": draft}))
        methods.insert(4, Method("ours, draft model", {"assistant": draft}))
    if heads is not None:
        methods.append(Method("ours, EAGLE-3", {"assistant": heads}))
        methods.append(Method("ours, auto and EAGLE-3", {"assistant": ["auto", heads]}))
    return methods


@dataclass
class Result:
    """Results of one method for all prompts, in one dtype and batch size; for a refused call, its message only."""

    name: str
    dtype: str
    batch_size: int
    is_ours: bool
    refusal: str | None = None
    seconds: list[list[float]] = field(default_factory=list)  # of every repetition, those of each batch
    rows: list[list[list[int]]] = field(default_factory=list)  # of every repetition, each prompt's new tokens
    num_steps: int = 0  # forwards, counted by row; this and the next two of ours only, of all repetitions
    num_drafted: int = 0
    num_accepted: int = 0

    def num_tokens(self, places: Sequence[int] | None = None) -> int:
        """Return the number of new tokens of some of the prompts, or of all."""
        rows = self.rows[-1]
        return sum(len(rows[place]) for place in (range(len(rows)) if places is None else places))

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens() / median(map(sum, self.seconds))

    def speedup(self, plain: "Result", places: Sequence[int] | None = None) -> float:
        """
        Return the speed relative to plain decoding in the same repetition, which met the same load of the machine; the
        median over repetitions.

        Args:
            places: Prompts to compare, at batch 1; all where not given.
        """
        ratios = [_total(before, places) / _total(after, places) for before, after in zip(plain.seconds, self.seconds)]
        return median(ratios) * self.num_tokens(places) / plain.num_tokens(places)

    @property
    def spread(self) -> float:
        """Median by fastest repetition: well above 1 if other programs were running for long."""
        totals = list(map(sum, self.seconds))
        return median(totals) / min(totals)

    @property
    def tokens_per_step(self) -> float | None:
        """New tokens per forward of a row; None where unknown."""
        num_tokens = sum(len(row) for rows in self.rows for row in rows)
        return num_tokens / self.num_steps if self.num_steps else None

    def num_different(self, reference: "Result") -> int:
        """Return how many prompts got other tokens than in the first repetition of `reference`, in any repetition."""
        expected = reference.rows[0]
        return sum(any(rows[place] != row for rows in self.rows) for place, row in enumerate(expected))

    def as_dict(self) -> dict[str, Any]:
        values = {key: value for key, value in vars(self).items() if key != "rows"}
        if self.refusal is None:
            values |= {"num_tokens": self.num_tokens(), "tokens_per_second": self.tokens_per_second}
        return values


def _total(seconds: list[float], places: Sequence[int] | None) -> float:
    return sum(seconds) if places is None else sum(seconds[place] for place in places)


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
    Decode all prompts greedily with every method. The methods take turns at every batch, after a few tokens of each
    that warm up (what is compiled or measured on first use). Repetitions after the first begin only where they would
    end within `max_seconds`.
    """
    padding = pad_id(model)
    batches = [
        left_padded(prompts[start : start + batch_size], padding, model.device)
        for start in range(0, len(prompts), batch_size)
    ]
    common = {"do_sample": False, "pad_token_id": padding, "max_new_tokens": max_new_tokens}
    pairs = [(method, Result(method.name, name_of(model.dtype), batch_size, method.is_ours)) for method in methods]
    for method, result in pairs:
        try:
            _decode(model, method, batches[0], common | {"max_new_tokens": min(_WARM_UP, max_new_tokens)})
        except ValueError as error:
            if method.is_ours:
                raise
            result.refusal = str(error)
    start = time.perf_counter()
    for turn in range(repetitions):
        if turn and (time.perf_counter() - start) * (turn + 1) / turn > max_seconds:
            break
        for _, result in pairs:
            if result.refusal is None:
                result.seconds.append([])
                result.rows.append([])
        for inputs in batches:
            for method, result in pairs:
                if result.refusal is None:
                    _measure(model, method, inputs, common, result)
    return [result for _, result in pairs]


def _measure(
    model: PreTrainedModel, method: Method, inputs: dict[str, torch.Tensor], common: dict[str, Any], result: Result
) -> None:
    seconds, rows, statistics = _decode(model, method, inputs, common)
    result.seconds[-1].append(seconds)
    result.rows[-1] += rows
    if statistics is not None:
        result.num_steps += statistics.steps
        result.num_drafted += statistics.drafted_tokens
        result.num_accepted += statistics.accepted_tokens


def _decode(
    model: Any, method: Method, inputs: dict[str, torch.Tensor], arguments: dict[str, Any]
) -> tuple[float, list[list[int]], Any]:
    """Return the seconds of one call, its rows' new tokens up to their end, and the statistics of ours."""
    with ready_for(model, method):
        synchronize(model.device)
        start = time.perf_counter()
        output = model.generate(**inputs, **arguments, **method.arguments)
        synchronize(model.device)
        seconds = time.perf_counter() - start
        statistics = model.smartspec_statistics.last if method.is_ours else None
    ends = set(eos_ids(model))
    rows = [up_to_end(row, ends) for row in output[:, inputs["input_ids"].shape[1] :].tolist()]
    return seconds, rows, statistics


@contextmanager
def ready_for(model: PreTrainedModel, method: Method) -> Iterator[None]:
    """
    `assistant=` is understood inside, no answer is remembered from the turn before, and the draft is as it was before
    afterwards.
    """
    if method.is_ours:
        suffix_trees(model).remove_namespace("")
    with unchanged(method.arguments.get("assistant_model")), enabled(model):
        yield
