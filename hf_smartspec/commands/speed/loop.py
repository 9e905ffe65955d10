"""Measurement of ways to call `generate` side by side: the same prompts, in turns, call by call."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import PreTrainedModel

from ...decoding.statistics import GenerationStatistics
from ...generate import enabled
from ...prepare.config import SmartSpecConfig
from ...prepare.sources import resolve
from ..common.console import track
from ..common.exactness import Difference, Rounding, find_differences, measure_rounding
from ..common.models import left_padded
from ..common.recordings import DataSet, remember
from ..common.replaying import RecordedText
from ..common.runs import Decoding, decode_plainly, eos_ids, unchanged, up_to_end
from .monitors import HookMonitor, Monitor

PLAIN = "plain generate"
_ROUNDED_TOKENS = 16


@dataclass(frozen=True)
class Method:
    """A way to call `generate`: this library's, if it has an `assistant`, or transformers' with the given arguments."""

    name: str
    assistant: Any = None  # a preset name, a draft model, a learned drafter, or a list of these
    # Arguments of transformers' `generate`, whose assistants serve batches of one.
    arguments: dict[str, Any] = field(default_factory=dict)
    draft: PreTrainedModel | None = None
    options: dict[str, Any] = field(default_factory=dict)  # options of the assistant's `SmartSpecConfig`

    @property
    def is_own(self) -> bool:
        return self.assistant is not None

    def serves(self, batch_size: int) -> bool:
        return batch_size == 1 or not self.arguments


class Settings(NamedTuple):
    """Settings that all methods share."""

    max_new_tokens: int
    replays: bool  # whether the target picks the recorded responses
    repetitions: int


class Call(NamedTuple):
    """One timed `generate` call; times in seconds."""

    seconds: float
    prefill_seconds: float  # up to the end of the target's forward over the prompts
    num_rows: int
    num_tokens: int  # generated, of all rows, up to and with each row's end-of-sequence token

    @property
    def seconds_per_token(self) -> float:
        return self.seconds / self.num_tokens

    @property
    def decode_seconds_per_token(self) -> float:
        """Seconds per token, without prefill and the first token of every row, which it yields; NaN if no others."""
        num_tokens = self.num_tokens - self.num_rows
        return (self.seconds - self.prefill_seconds) / num_tokens if num_tokens else np.nan


@dataclass
class Tally:
    """
    Results of one method on one data set at one batch size. `statistics` are those of a first round, which is not
    timed; `differences` are those of all rounds, by row.
    """

    calls: list[Call] = field(default_factory=list)
    statistics: GenerationStatistics = field(default_factory=GenerationStatistics)
    differences: dict[int, Difference] = field(default_factory=dict)

    @property
    def tokens_per_second(self) -> float:
        """Median over the calls, so that calls on a busy machine do not count."""
        return median(1 / call.seconds_per_token for call in self.calls)

    @property
    def seconds_per_request(self) -> float:
        """Median over the calls; the rows of a batch share its time."""
        return median(call.seconds / call.num_rows for call in self.calls)

    def speedup(self, plain: "Tally") -> float:
        """Return the median of plain decoding's time per token by this method's, over calls with the same prompts."""
        pairs = list(zip(plain.calls, self.calls))
        return median(before.seconds_per_token / after.seconds_per_token for before, after in pairs)

    def decode_speedup(self, plain: "Tally") -> float:
        """Return the speedup without prefill; NaN if no call generated more than one token per row."""
        pairs = zip(plain.calls, self.calls)
        ratios = [before.decode_seconds_per_token / after.decode_seconds_per_token for before, after in pairs]
        return float(np.nanmedian(ratios)) if not np.isnan(ratios).all() else np.nan


Results = dict[tuple[str, int], dict[str, Tally]]  # by data set and batch size; then by method, plain decoding first


def measure(
    model: PreTrainedModel,
    methods: Sequence[Method],
    data: Sequence[DataSet],
    batch_sizes: Sequence[int],
    settings: Settings,
    results: Results,
) -> None:
    """
    Decode every data set greedily at every batch size, with plain `generate` and every method, and fill in `results`.
    The methods take turns, call by call, so that changes of the machine's load meet all alike.

    Suffix trees keep outputs from call to call: requests arrive in the order of the data set, and drafts improve.
    Every method, data set, batch size and round has trees of its own, which begin with the data set's past.
    """
    rounding = _rounding(model, data, max(batch_sizes))
    sizes = [dict.fromkeys(min(size, len(item.prompts)) for size in batch_sizes) for item in data]
    groups = [
        _Group(model, methods, item, size, settings, rounding) for item, sizes in zip(data, sizes) for size in sizes
    ]
    with track(total=sum(group.num_calls for group in groups), desc="generating") as progress:
        for group in groups:
            results[group.data.name, group.batch_size] = group.tallies
            progress.set_postfix_str(f"{group.data.name}, batch {group.batch_size}")
            for _ in group.run():
                progress.update()


def _rounding(model: PreTrainedModel, data: Sequence[DataSet], num_prompts: int) -> Rounding:
    prompts = [prompt for item in data for prompt in item.prompts][:num_prompts]
    inputs = left_padded(prompts, model.generation_config.pad_token_id, model.device)
    run = decode_plainly(model, inputs, Decoding(), _ROUNDED_TOKENS, records=True)
    assert run.logits is not None, "recorded"
    return measure_rounding(model, prompts, run.tokens, run.logits)


class _Group:
    """One data set at one batch size."""

    def __init__(
        self,
        model: PreTrainedModel,
        methods: Sequence[Method],
        data: DataSet,
        batch_size: int,
        settings: Settings,
        rounding: Rounding,
    ):
        self.model, self.data, self.batch_size = model, data, batch_size
        self.settings, self.rounding = settings, rounding
        self.methods = [method for method in (Method(PLAIN), *methods) if method.serves(batch_size)]
        self.tallies = {method.name: Tally() for method in self.methods}
        self.starts = range(0, len(data.prompts), batch_size)

    @property
    def num_calls(self) -> int:
        return len(self.methods) * len(self.starts) * (1 + self.settings.repetitions)

    def run(self) -> Iterator[None]:
        """Run all calls; yield after each."""
        for turn in range(1 + self.settings.repetitions):
            for start in self.starts:
                plain: list[list[int]] = []
                for method in self.methods:
                    rows = self._call(method, start, turn)
                    plain = plain or rows
                    self._compare(self.tallies[method.name], start, plain, rows)
                    yield

    def _call(self, method: Method, start: int, turn: int) -> list[list[int]]:
        """Return the generated tokens of every row; add statistics (turn 0) or times (later turns) to the tally."""
        prompts = self.data.prompts[start : start + self.batch_size]
        inputs = left_padded(prompts, self.model.generation_config.pad_token_id, self.model.device)
        arguments = dict(method.arguments)
        if method.is_own:
            namespace = f"{self.data.name} {self.batch_size} {method.name} {turn}"
            config = arguments["assistant"] = SmartSpecConfig(method.assistant, namespace=namespace, **method.options)
            if start == 0 and self.data.past:
                remember(resolve(config, self.model).source, self.data.past, namespace)
        num_prompt_tokens, is_assisted = sum(map(len, prompts)), bool(method.arguments)
        monitor = Monitor(self.model) if method.is_own else HookMonitor(self.model, num_prompt_tokens, is_assisted)
        with ExitStack() as stack:
            if self.settings.replays:
                responses = self.data.responses[start : start + self.batch_size]
                recorded = RecordedText(inputs["input_ids"], responses, eos_ids(self.model)[0])
                arguments["logits_processor"] = [recorded]
                stack.enter_context(recorded.replaying(self.model, arguments.get("assistant_model")))
            stack.enter_context(unchanged(method.draft))
            stack.enter_context(enabled(self.model))
            stack.enter_context(monitor.watching())
            output = self.model.generate(
                **inputs, **arguments, do_sample=False, max_new_tokens=self.settings.max_new_tokens
            )
        ends = set(eos_ids(self.model))
        rows = [up_to_end(row, ends) for row in output[:, inputs["input_ids"].shape[1] :].tolist()]
        tally, num_tokens = self.tallies[method.name], sum(map(len, rows))
        if turn == 0:
            tally.statistics += monitor.statistics(num_tokens)
        else:
            tally.calls.append(Call(monitor.seconds, monitor.prefill_seconds, len(rows), num_tokens))
        return rows

    def _compare(self, tally: Tally, start: int, plain: list[list[int]], rows: list[list[int]]) -> None:
        for index, (expected, found) in enumerate(zip(plain, rows), start):
            for item in find_differences(torch.tensor([expected]), torch.tensor([found])):
                tally.differences[index] = replace(self._judged(item, index, expected), row=index)

    @torch.no_grad()
    def _judged(self, item: Difference, index: int, plain: list[int]) -> Difference:
        """Return the difference with its gaps, measured by one forward over the common text."""
        if self.settings.replays or item.plain_token < 0 or item.own_token < 0:
            return item
        text = torch.tensor([self.data.prompts[index] + plain[: item.position]], device=self.model.device)
        logits = self.model(input_ids=text, logits_to_keep=1).logits[0, -1].float()
        gap = float(logits[item.plain_token] - logits[item.own_token])
        tolerance = self.rounding.tolerance(float(logits.abs().max()))
        return replace(item, plain_gap=gap, own_gap=-gap, tolerance=tolerance)
