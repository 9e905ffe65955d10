"""How the target picks a token: logits processors as plain decoding applies them, and noise that can be repeated."""

import copy
from collections.abc import Hashable, Sequence
from itertools import groupby
from typing import Protocol

import numpy as np
import torch
from transformers import LogitsProcessor, LogitsProcessorList
from transformers.generation import logits_process as hf

from ..device import to_device
from .noise import SeededGumbelLogitsProcessor

# Look at the scores alone: one call serves rows of different lengths.
_SCORE_ONLY = (
    hf.TemperatureLogitsWarper,
    hf.TopKLogitsWarper,
    hf.TopPLogitsWarper,
    hf.TopHLogitsWarper,
    hf.MinPLogitsWarper,
    hf.TypicalLogitsWarper,
    hf.EpsilonLogitsWarper,
    hf.EtaLogitsWarper,
    hf.InfNanRemoveLogitsProcessor,
    hf.LogitNormalization,
    hf.SuppressTokensLogitsProcessor,
)

# Look at one row's own tokens and keep no state: every row can be served by itself, at its own length.
_ROW_ONLY = (
    hf.RepetitionPenaltyLogitsProcessor,
    hf.NoRepeatNGramLogitsProcessor,
    hf.SequenceBiasLogitsProcessor,
    hf.NoBadWordsLogitsProcessor,
    hf.MinLengthLogitsProcessor,
    hf.MinNewTokensLengthLogitsProcessor,
    hf.ForcedBOSTokenLogitsProcessor,
    hf.ForcedEOSTokenLogitsProcessor,
    hf.ExponentialDecayLengthPenalty,
    hf.SuppressTokensAtBeginLogitsProcessor,
)


class PickedRow(Protocol):
    """What a `TokenPicker` reads of a request."""

    index: int  # row of the caller's batch

    @property
    def num_generated(self) -> int: ...

    def padded_ids(self) -> torch.Tensor: ...  # [t], left padding included, on the CPU


class PaddedBatch(Protocol):
    """What a `TokenPicker` reads of the batch."""

    def padded_batch(self, num_generated: int) -> torch.Tensor: ...  # [batch_size, prompt_len + num_generated]


class TokenPicker:
    """
    The target's own choice of token for rows of one `generate` call (docs/design.md, "Exact processors and criteria").
    A processor of one's own that looks at each row's own tokens and keeps no state may say so by an attribute
    `keeps_no_state = True`: rows then need not wait for one another.

    Args:
        processors (`LogitsProcessorList`): As `generate` prepared them for the whole batch.
        batch_size, prompt_length (`int`): Of the caller's padded batch.

    Attributes:
        is_known (`bool`): Whether no processor can keep state, so that it does not matter when they are called.
        signature (`tuple`, *optional*): Equal for pickers that do the same to scores, which look at nothing else.
        needs_lockstep (`bool`): True if some processor is of unknown kind in a batch of several rows. It may keep
            state across rows, so rows may be picked for only when all unfinished rows have logits for one length.
    """

    def __init__(self, processors: LogitsProcessorList, batch_size: int, prompt_length: int):
        self.processors, self.batch_size = processors, batch_size
        known = (*_SCORE_ONLY, *_ROW_ONLY, SeededGumbelLogitsProcessor)
        self.score_only = all(type(processor) in _SCORE_ONLY for processor in processors)
        self.is_known = all(type(item) in known or getattr(item, "keeps_no_state", False) for item in processors)
        self.needs_lockstep = batch_size > 1 and not self.is_known
        self.signature = _signature(processors) if self.score_only else None
        self._rows: list[LogitsProcessorList] = []
        if self.is_known and not self.score_only:
            for row in range(batch_size):
                split = (_for_row(processor, row, prompt_length, batch_size) for processor in processors)
                self._rows.append(LogitsProcessorList(split))

    def process(self, rows: Sequence[PickedRow], logits: torch.Tensor, batch: PaddedBatch) -> torch.Tensor:
        """
        Processed scores `[len(rows), vocab_size]` for the next token of each row from float32 logits of that shape.
        Processors of unknown kind see the whole batch, as plain decoding would show it to them.
        """
        if not self.processors:
            return logits
        if self.score_only:
            for processor in self.processors:
                logits = processor(None, logits)
            return logits
        if self._rows:
            scored = []
            for row, ids, line in zip(rows, _texts(rows, logits.device), logits):
                scored.append(self._rows[row.index](ids, line[None].clone()))  # type: ignore[arg-type]
            return torch.cat(scored)
        return self._process_batch(rows, logits, batch)

    def _process_batch(self, rows: Sequence[PickedRow], logits: torch.Tensor, batch: PaddedBatch) -> torch.Tensor:
        input_ids = batch.padded_batch(rows[0].num_generated)
        lines = [row.index for row in rows]
        # Finished rows have no logits; plain decoding passes something nobody reads, here it is zeros.
        full = logits.new_zeros(self.batch_size, logits.shape[1])
        full[lines] = logits
        return self.processors(input_ids, full)[lines]  # type: ignore[arg-type]


def _texts(rows: Sequence[PickedRow], device: torch.device) -> list[torch.Tensor]:
    """Every row's text, `[1, t]` each, which are sent together."""
    texts = [row.padded_ids()[None] for row in rows]
    if device.type == "cpu":
        return texts
    lengths = [text.shape[1] for text in texts]
    padded = np.zeros((len(texts), max(lengths)), np.int64)
    for line, text, length in zip(padded, texts, lengths):
        line[:length] = text[0]
    sent = to_device(padded, device)
    return [sent[line : line + 1, :length] for line, length in enumerate(lengths)]


def _signature(processors: LogitsProcessorList) -> tuple | None:
    """What the processors are and how they are set; None where a setting is more than a number."""
    settings = [(type(processor), *sorted(vars(processor).items())) for processor in processors]
    if all(isinstance(value, bool | int | float) for _, *items in settings for _, value in items):
        return tuple(settings)
    return None


def _for_row(processor: LogitsProcessor, row: int, prompt_length: int, batch_size: int) -> LogitsProcessor:
    """A processor for one row of the batch by itself, from one that serves the whole batch."""
    if isinstance(processor, SeededGumbelLogitsProcessor):
        return processor.for_row(row, prompt_length)
    ignored = getattr(processor, "prompt_ignore_length", None)
    if isinstance(ignored, torch.Tensor) and len(ignored) == batch_size:
        processor = copy.copy(processor)
        processor.prompt_ignore_length = ignored[row : row + 1]  # type: ignore[attr-defined]
    return processor


def score_processors(processors: LogitsProcessorList) -> LogitsProcessorList:
    """Those of the processors that look at scores alone, which a drafter can apply to its own scores as well."""
    return LogitsProcessorList([processor for processor in processors if type(processor) in _SCORE_ONLY])


class ScoreProcessing:
    """
    A request's processors as far as they look at scores alone, for drafters to apply to their own scores.

    Attributes:
        signature (`tuple`, *optional*): What they are and how they are set; None where that is more than numbers.
        key (`Hashable`): Equal for those that do the same, whether or not they are the same objects.
    """

    def __init__(self, processors: Sequence[LogitsProcessor] = ()):
        self.processors = score_processors(LogitsProcessorList(processors))
        self.signature = _signature(self.processors)
        self.key: Hashable = tuple(map(id, self.processors)) if self.signature is None else self.signature


def process_lines(scores: torch.Tensor, owners: Sequence[tuple[ScoreProcessing, int]]) -> torch.Tensor:
    """
    Scores `[lines, vocab_size]` of owners that have so many lines each, in order, after their own processors.
    Neighbours whose processors do the same are processed together.
    """
    parts, first = [], 0
    for _, group in groupby(owners, key=lambda owner: owner[0].key):
        members = list(group)
        end = first + sum(num for _, num in members)
        part, first = scores[first:end], end
        for processor in members[0][0].processors:
            part = processor(None, part)
        parts.append(part)
    return parts[0] if len(parts) == 1 else torch.cat(parts)
