"""`generate` calls to compare: plain ones and those with an assistant."""

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedModel
from transformers.generation import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from ...decoding.statistics import GenerationStatistics
from ...generate import enabled
from ...sampling.noise import SeededGumbelLogitsProcessor


@dataclass(frozen=True)
class Decoding:
    """Decoding of the target: greedy, or sampled with a seed."""

    seed: int | None = None
    temperature: float = 0.8
    top_k: int = 50
    top_p: float = 0.95

    @property
    def name(self) -> str:
        return "greedy" if self.seed is None else "sampled"

    def filters(self) -> list[LogitsProcessor]:
        """Return the processors that change scores before a token is sampled."""
        if self.seed is None:
            return []
        return [TemperatureLogitsWarper(self.temperature), TopKLogitsWarper(self.top_k), TopPLogitsWarper(self.top_p)]

    def plain_processors(self, recorder: LogitsProcessor | None = None) -> LogitsProcessorList:
        """Return processors by which plain greedy `generate` picks the tokens of sampling with this library's seed."""
        noise = [] if self.seed is None else [SeededGumbelLogitsProcessor(self.seed)]
        recorders = [recorder] if recorder is not None else []
        return LogitsProcessorList([*self.filters(), *recorders, *noise])

    def own_arguments(self) -> dict[str, Any]:
        if self.seed is None:
            return {"do_sample": False}
        warpers = {"temperature": self.temperature, "top_k": self.top_k, "top_p": self.top_p}
        return {"do_sample": True, "seed": self.seed, **warpers}


class Recorder(LogitsProcessor):
    """Processor that records the scores `[rows, vocab_size]` of every step."""

    def __init__(self) -> None:
        self.scores: list[torch.Tensor] = []

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        self.scores.append(scores.clone())
        return scores


class Run(NamedTuple):
    """Result of one `generate` call, on the CPU."""

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
    """Run transformers' own `generate`, without an assistant."""
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
    """Run `generate` with `assistant=`."""
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
    # Models that cannot speculate are decoded without speculation, and return transformers' own output.
    statistics = getattr(output, "statistics", None) or GenerationStatistics()
    return Run(tokens, _stacked(output.logits), _stacked(output.scores), statistics)


def tokens_by_default(
    model: PreTrainedModel,
    inputs: dict[str, torch.Tensor],
    decoding: Decoding,
    max_new_tokens: int,
    assistant: Any,
    seeds: list[int] | None = None,
) -> torch.Tensor:
    """
    Return the new tokens of `generate` with `assistant=` and no other output: rows are then freed as they end. `seeds`
    has one seed for each row that samples.
    """
    with enabled(model):
        arguments = decoding.own_arguments() | ({} if seeds is None else {"seed": seeds})
        sequences = model.generate(**inputs, **arguments, assistant=assistant, max_new_tokens=max_new_tokens)
    return _new_tokens(model, inputs, sequences)


def _new_tokens(model: PreTrainedModel, inputs: dict[str, torch.Tensor], sequences: torch.Tensor) -> torch.Tensor:
    start = 1 if model.config.is_encoder_decoder else inputs["input_ids"].shape[1]
    return sequences[:, start:].cpu()


def _stacked(columns: Sequence[torch.Tensor] | None) -> torch.Tensor | None:
    return None if columns is None else torch.stack(tuple(columns), dim=1).float().cpu()


def eos_ids(model: PreTrainedModel) -> list[int]:
    ids = model.generation_config.eos_token_id
    return [] if ids is None else ids if isinstance(ids, list) else [ids]


def pad_id(model: PreTrainedModel) -> int:
    """Return the token that rows are padded with: the model's, else its first end of sequence, else 0."""
    own = model.generation_config.pad_token_id
    return own if own is not None else next(iter(eos_ids(model)), 0)


def up_to_end(tokens: list[int], ends: set[int]) -> list[int]:
    """Return the tokens up to and with the first that ends a sequence."""
    last = next((index for index, token in enumerate(tokens) if token in ends), len(tokens))
    return tokens[: last + 1]


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@contextmanager
def unchanged(draft: PreTrainedModel | None) -> Iterator[None]:
    """Restore the draft's generation config, in which transformers leaves its learnt draft length and more."""
    before: Any = None if draft is None else copy.deepcopy(draft.generation_config)
    try:
        yield
    finally:
        if draft is not None:
            draft.generation_config = before
