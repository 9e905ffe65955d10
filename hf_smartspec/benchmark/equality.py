"""Is what speculation returns what plain `generate` returns: tokens, scores and logits."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedModel
from transformers.generation import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from ..generate import enabled
from ..processors import SeededGumbelLogitsProcessor, add_gumbel_noise
from ..request import GenerationStatistics
from .drafts import Drafting

# How far the logits of two correct computations may lie apart: so many units in the last place of the largest logit.
# Sums run in another order in a batch of another shape, and every layer adds its own rounding.
_UNITS = {torch.float32: 64, torch.bfloat16: 4, torch.float16: 8}


def rounding(dtype: torch.dtype, largest: float) -> float:
    """The difference that rounding explains between two logits of magnitude `largest`."""
    return _UNITS[dtype] * torch.finfo(dtype).eps * max(largest, 1.0)


@dataclass(frozen=True)
class Decoding:
    """How the target picks its tokens: greedily, or sampled with a seed."""

    seed: int | None = None
    temperature: float = 0.8
    top_k: int = 50
    top_p: float = 0.95

    @property
    def name(self) -> str:
        return "greedy" if self.seed is None else "sampled"

    def plain_processors(self, recorder: LogitsProcessor | None = None) -> LogitsProcessorList:
        """What makes plain greedy `generate` pick the tokens that sampling with this library's seed picks."""
        recorders = [recorder] if recorder is not None else []
        if self.seed is None:
            return LogitsProcessorList(recorders)
        warpers = [
            TemperatureLogitsWarper(self.temperature),
            TopKLogitsWarper(self.top_k),
            TopPLogitsWarper(self.top_p),
        ]
        return LogitsProcessorList([*warpers, *recorders, SeededGumbelLogitsProcessor(self.seed)])

    def own_arguments(self) -> dict[str, Any]:
        if self.seed is None:
            return {"do_sample": False}
        warpers = {"temperature": self.temperature, "top_k": self.top_k, "top_p": self.top_p}
        return {"do_sample": True, "seed": self.seed, **warpers}


class Recorder(LogitsProcessor):
    """Remembers the scores `[rows, vocab_size]` that pass through, one per step."""

    def __init__(self) -> None:
        self.scores: list[torch.Tensor] = []

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        self.scores.append(scores.clone())
        return scores


class Run(NamedTuple):
    """What one `generate` call returned, on the CPU."""

    tokens: torch.Tensor  # [rows, new], without the prompt
    logits: torch.Tensor | None  # [rows, new, vocab_size] float32
    scores: torch.Tensor | None  # the same, processed; without noise
    statistics: GenerationStatistics


def decode_plainly(
    model: PreTrainedModel,
    inputs: dict[str, torch.Tensor],
    decoding: Decoding,
    max_new_tokens: int,
    records: bool = False,
) -> Run:
    """transformers' own `generate`, without an assistant."""
    recorder = Recorder() if records else None
    output = model.generate(
        **inputs,
        do_sample=False,
        logits_processor=decoding.plain_processors(recorder),
        max_new_tokens=max_new_tokens,
        return_dict_in_generate=True,
        output_logits=records,
    )
    scores = torch.stack(recorder.scores, dim=1).float().cpu() if recorder else None
    return Run(_new_tokens(model, inputs, output.sequences), _stacked(output.logits), scores, GenerationStatistics())


def decode_speculatively(
    model: PreTrainedModel,
    inputs: dict[str, torch.Tensor],
    decoding: Decoding,
    max_new_tokens: int,
    assistant: Any,
    records: bool = False,
) -> Run:
    """`generate` with `assistant=`."""
    with enabled(model):
        output = model.generate(
            **inputs,
            **decoding.own_arguments(),
            assistant=assistant,
            max_new_tokens=max_new_tokens,
            return_dict_in_generate=True,
            output_logits=records,
            output_scores=records,
        )
    tokens = _new_tokens(model, inputs, output.sequences)
    # Models that cannot speculate are decoded plainly, and return transformers' own output.
    statistics = getattr(output, "statistics", None) or GenerationStatistics()
    return Run(tokens, _stacked(output.logits), _stacked(output.scores), statistics)


def tokens_by_default(
    model: PreTrainedModel,
    inputs: dict[str, torch.Tensor],
    decoding: Decoding,
    max_new_tokens: int,
    assistant: Any,
) -> torch.Tensor:
    """New tokens of `generate` with `assistant=` where nothing but tokens is asked for: rows are freed as they end."""
    with enabled(model):
        arguments = decoding.own_arguments()
        sequences = model.generate(**inputs, **arguments, assistant=assistant, max_new_tokens=max_new_tokens)
    return _new_tokens(model, inputs, sequences)


def _new_tokens(model: PreTrainedModel, inputs: dict[str, torch.Tensor], sequences: torch.Tensor) -> torch.Tensor:
    start = 1 if model.config.is_encoder_decoder else inputs["input_ids"].shape[1]
    return sequences[:, start:].cpu()


def _stacked(columns: Sequence[torch.Tensor] | None) -> torch.Tensor | None:
    return None if columns is None else torch.stack(tuple(columns), dim=1).float().cpu()


@dataclass(frozen=True)
class Difference:
    """
    The first token of a row that is not plain decoding's.

    `plain_gap` says by how much plain decoding prefers its own token, `own_gap` by how much speculation prefers its
    own (in processed scores, noise included; inf where the other token was filtered away; NaN where unknown).
    `logit_error` is the largest difference of the two logits vectors at that position.
    """

    prompt: int
    position: int
    plain_token: int  # -1: the row has ended
    own_token: int
    plain_gap: float = math.nan
    own_gap: float = math.nan
    logit_error: float = math.nan
    tolerance: float = 0.0

    @property
    def is_tie(self) -> bool:
        """Whether rounding alone explains it: nearly equal scores, or a token at the very edge of top-k or top-p."""
        gap = max(self.plain_gap, self.own_gap)  # NaN in either place makes both comparisons false
        if math.isnan(self.plain_gap) or math.isnan(self.own_gap):
            return False
        return gap <= self.tolerance or (gap == math.inf and self.logit_error <= self.tolerance)


@dataclass
class TokenCheck:
    """One way of drafting at one batch size: what was compared, and where it differs."""

    decoding: str
    drafts: str
    batch_size: int
    num_rows: int = 0
    num_tokens: int = 0  # of all rows together, up to the first difference in each
    statistics: GenerationStatistics = field(default_factory=GenerationStatistics)
    differences: list[Difference] = field(default_factory=list)


def find_differences(plain: torch.Tensor, own: torch.Tensor, first_prompt: int = 0) -> list[Difference]:
    """The first difference of every row of two `[rows, new]` token tensors; those may be of different lengths."""
    width = max(plain.shape[1], own.shape[1])
    plain, own = (torch.nn.functional.pad(item, (0, width - item.shape[1]), value=-1) for item in (plain, own))
    differences = []
    for row, column in enumerate((plain != own).int().argmax(dim=1).tolist() if width else []):
        tokens = int(plain[row, column]), int(own[row, column])
        if tokens[0] != tokens[1]:
            differences.append(Difference(first_prompt + row, column, *tokens))
    return differences


def check_batch(
    model: PreTrainedModel,
    inputs: dict[str, torch.Tensor],
    decoding: Decoding,
    max_new_tokens: int,
    plain: torch.Tensor,
    drafting: Drafting,
    check: TokenCheck,
    is_first: bool,
) -> None:
    """Decodes one batch speculatively and adds the comparison with plain decoding's tokens (`[rows, new]`) to `check`."""
    continuations = plain.tolist()
    run = decode_speculatively(model, inputs, decoding, max_new_tokens, drafting.assistant(continuations))
    found = find_differences(plain, run.tokens, check.num_rows)
    if is_first and not found:
        assistant = drafting.assistant(continuations)
        found = find_differences(plain, tokens_by_default(model, inputs, decoding, max_new_tokens, assistant))
    if found:
        assistant = drafting.assistant(continuations)
        found = with_gaps(found, check.num_rows, model, inputs, decoding, max_new_tokens, assistant)
    ended_at = {item.prompt - check.num_rows: item.position for item in found}
    check.num_tokens += sum(ended_at.get(row, num_tokens) for row, num_tokens in enumerate(_lengths(model, plain)))
    check.num_rows += len(plain)
    check.statistics += run.statistics
    check.differences += found


def _lengths(model: PreTrainedModel, tokens: torch.Tensor) -> list[int]:
    """Tokens of every row up to and with its end-of-sequence token."""
    ends = torch.isin(tokens, torch.tensor(eos_ids(model), dtype=tokens.dtype))
    return [int(row.int().argmax()) + 1 if row.any() else len(row) for row in ends]


def eos_ids(model: PreTrainedModel) -> list[int]:
    ids = model.generation_config.eos_token_id
    return [] if ids is None else ids if isinstance(ids, list) else [ids]


def with_gaps(
    differences: Sequence[Difference],
    first_prompt: int,
    model: PreTrainedModel,
    inputs: dict[str, torch.Tensor],
    decoding: Decoding,
    max_new_tokens: int,
    assistant: Any,
) -> list[Difference]:
    """Decodes the batch again both ways, with scores, and adds how clearly each side preferred its token."""
    plain = decode_plainly(model, inputs, decoding, max_new_tokens, records=True)
    own = decode_speculatively(model, inputs, decoding, max_new_tokens, assistant, records=True)
    return [_with_gaps(item, item.prompt - first_prompt, plain, own, decoding, model.dtype) for item in differences]


def _with_gaps(
    item: Difference, row: int, plain: Run, own: Run, decoding: Decoding, dtype: torch.dtype
) -> Difference:
    at = item.position
    if min(item.plain_token, item.own_token) < 0 or own.logits is None or own.scores is None:
        return item
    is_reproduced = at < min(plain.tokens.shape[1], own.tokens.shape[1]) and torch.equal(
        plain.tokens[row, :at], own.tokens[row, :at]
    )
    if not is_reproduced:
        return item
    assert plain.logits is not None and plain.scores is not None, "recorded"
    scores = torch.stack([plain.scores[row, at], own.scores[row, at]])
    if decoding.seed is not None:
        seed = SeededGumbelLogitsProcessor(decoding.seed).seed_of(row)
        scores = add_gumbel_noise(scores, [seed] * 2, [at] * 2)
    plain_logits, own_logits = plain.logits[row, at], own.logits[row, at]
    scale = 1.0 if decoding.seed is None else 1 / decoding.temperature
    return Difference(
        item.prompt,
        at,
        item.plain_token,
        item.own_token,
        plain_gap=float(scores[0, item.plain_token] - scores[0, item.own_token]),
        own_gap=float(scores[1, item.own_token] - scores[1, item.plain_token]),
        logit_error=_largest_error(plain_logits, own_logits),
        tolerance=scale * rounding(dtype, _largest(plain_logits)),
    )


@dataclass(frozen=True)
class ScoreCheck:
    """
    Returned `logits` or `scores` against plain decoding's. `error` is the largest absolute difference of finite
    values, `largest` the largest finite value, `num_edge` counts values that only one side has filtered away.
    """

    decoding: str
    drafts: str
    name: str
    num_columns: int
    error: float
    largest: float
    num_edge: int
    tolerance: float

    @property
    def is_close(self) -> bool:
        return self.error <= self.tolerance and self.num_edge == 0


def check_scores(
    model: PreTrainedModel,
    inputs: dict[str, torch.Tensor],
    decoding: Decoding,
    max_new_tokens: int,
    drafting: Drafting,
) -> list[ScoreCheck]:
    """Compares the `logits` and `scores` of one batch, up to each row's first different token."""
    plain = decode_plainly(model, inputs, decoding, max_new_tokens, records=True)
    assistant = drafting.assistant(plain.tokens.tolist())
    own = decode_speculatively(model, inputs, decoding, max_new_tokens, assistant, records=True)
    end = {item.prompt: item.position + 1 for item in find_differences(plain.tokens, own.tokens)}
    width = min(plain.tokens.shape[1], own.tokens.shape[1])
    lines = [(row, min(end.get(row, width), width)) for row in range(len(plain.tokens))]
    checks = []
    for name in ("logits", "scores"):
        theirs, ours = getattr(plain, name), getattr(own, name)
        first, second = (torch.cat([item[row, :stop] for row, stop in lines]) for item in (theirs, ours))
        largest = _largest(first)
        edge = int((torch.isfinite(first) != torch.isfinite(second)).sum())
        error, tolerance = _largest_error(first, second), rounding(model.dtype, largest)
        checks.append(ScoreCheck(decoding.name, drafting.name, name, len(first), error, largest, edge, tolerance))
    return checks


def _largest(values: torch.Tensor) -> float:
    finite = values[torch.isfinite(values)]
    return float(finite.abs().max()) if len(finite) else 0.0


def _largest_error(first: torch.Tensor, second: torch.Tensor) -> float:
    """Largest absolute difference where both are finite; inf if one side has a NaN."""
    if first.isnan().any() or second.isnan().any():
        return math.inf
    return _largest((first - second)[torch.isfinite(first) & torch.isfinite(second)])
