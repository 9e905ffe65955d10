"""Logits processors for rows of different lengths, with the results that plain `generate` would get from them."""

import copy
import math
from collections import defaultdict
from collections.abc import Hashable, Sequence
from itertools import groupby
from typing import Protocol

import numpy as np
import torch
from transformers import LogitsProcessor, LogitsProcessorList
from transformers.generation import logits_process as hf

from ..device import to_device
from .noise import SeededGumbelLogitsProcessor

# These read the scores alone: one call serves rows of different lengths.
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

# These read one row's own tokens and keep no state: every row can be served by itself, at its own length.
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
    """Attributes of a request that a `TokenPicker` reads."""

    index: int  # row of the caller's batch

    @property
    def num_generated(self) -> int: ...

    def padded_ids(self) -> torch.Tensor: ...  # [t], left padding included, on the CPU


class PaddedBatch(Protocol):
    """Method of the batch that a `TokenPicker` calls."""

    def padded_batch(self, num_generated: int) -> torch.Tensor: ...  # [batch_size, prompt_len + num_generated]


class TokenPicker:
    """
    The target's choice of token for rows of one `generate` call (docs/design.md, "Exact processors and criteria"). A
    custom processor that reads each row's own tokens and keeps no state may set an attribute `keeps_no_state = True`:
    rows then need not wait for one another.

    Args:
        processors (`LogitsProcessorList`): As `generate` prepared them for the whole batch.
        batch_size, prompt_length (`int`): Of the caller's padded batch.

    Attributes:
        is_known (`bool`): True if no processor can keep state, so that the order of calls does not matter.
        signature (`tuple`, *optional*): Equal for pickers whose processors do the same to scores; None where a
            processor reads more than scores or is set by more than numbers.
        needs_lockstep (`bool`): True if a batch of several rows has a processor of unknown kind. It may keep state
            across rows, so tokens are picked only when all unfinished rows have logits for the same length.
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
        self._are_set_by_row = any(one is not other for row in self._rows for one, other in zip(row, processors))

    def process(self, rows: Sequence[PickedRow], logits: torch.Tensor, batch: PaddedBatch) -> torch.Tensor:
        """
        Return processed scores `[len(rows), vocab_size]` for the next token of each row, from float32 logits of that
        shape. Processors of unknown kind get the whole padded batch, as without speculation.
        """
        if not self.processors:
            return logits
        if self.score_only:
            for processor in self.processors:
                logits = processor(None, logits)
            return logits
        if self._rows:
            texts = _texts(rows, logits.device)
            scored: dict[int, torch.Tensor] = {}  # lines are taken one by one: lists of them would go to the device
            for lines in self._served_together(rows, texts):
                ids = torch.cat([texts[line] for line in lines])
                scores = torch.stack([logits[line] for line in lines])
                scored |= zip(lines, self._rows[rows[lines[0]].index](ids, scores))  # type: ignore[arg-type]
            return torch.stack([scored[line] for line in range(len(rows))])
        return self._process_batch(rows, logits, batch)

    def _served_together(self, rows: Sequence[PickedRow], texts: Sequence[torch.Tensor]) -> list[list[int]]:
        """Return lines whose rows one call of the processors serves: all of one length, unless they are set by row."""
        if self._are_set_by_row:
            return [[line] for line in range(len(rows))]
        by_length: defaultdict[int, list[int]] = defaultdict(list)
        for line, text in enumerate(texts):
            by_length[text.shape[1]].append(line)
        return list(by_length.values())

    def _process_batch(self, rows: Sequence[PickedRow], logits: torch.Tensor, batch: PaddedBatch) -> torch.Tensor:
        input_ids = batch.padded_batch(rows[0].num_generated)
        lines = [row.index for row in rows]
        # Finished rows have no logits, and their scores are not read: zeros stand for them.
        full = logits.new_zeros(self.batch_size, logits.shape[1])
        full[lines] = logits
        return self.processors(input_ids, full)[lines]  # type: ignore[arg-type]


def _texts(rows: Sequence[PickedRow], device: torch.device) -> list[torch.Tensor]:
    """Return every row's text, `[1, t]` each, on `device`, copied at once."""
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
    """Return the types and settings of the processors; None where a setting is more than a number."""
    settings = [(type(processor), *sorted(vars(processor).items())) for processor in processors]
    if all(isinstance(value, bool | int | float) for _, *items in settings for _, value in items):
        return tuple(settings)
    return None


def _for_row(processor: LogitsProcessor, row: int, prompt_length: int, batch_size: int) -> LogitsProcessor:
    """Return a processor for one row of the batch by itself, from one that serves the whole batch."""
    if isinstance(processor, SeededGumbelLogitsProcessor):
        return processor.for_row(row, prompt_length)
    ignored = getattr(processor, "prompt_ignore_length", None)
    if isinstance(ignored, torch.Tensor) and len(ignored) == batch_size:
        processor = copy.copy(processor)
        processor.prompt_ignore_length = ignored[row : row + 1]  # type: ignore[attr-defined]
    return processor


def score_processors(processors: LogitsProcessorList) -> LogitsProcessorList:
    """Return the processors that read scores alone, which a drafter can apply to its own scores as well."""
    return LogitsProcessorList([processor for processor in processors if type(processor) in _SCORE_ONLY])


class ScoreProcessing:
    """
    The processors of a request that read scores alone, for drafters to apply to their own scores.

    Attributes:
        signature (`tuple`, *optional*): Types and settings of the processors; None where a setting is more than a
            number.
        key (`Hashable`): Equal for processors that do the same; without a `signature`, for the same objects only.
        temperature (`float`): What they divide scores by.
    """

    def __init__(self, processors: Sequence[LogitsProcessor] = ()):
        self.processors = score_processors(LogitsProcessorList(processors))
        self.signature = _signature(self.processors)
        self.key: Hashable = tuple(map(id, self.processors)) if self.signature is None else self.signature
        warpers = [item for item in self.processors if isinstance(item, hf.TemperatureLogitsWarper)]
        self.temperature = float(math.prod([item.temperature for item in warpers]))


def process_lines(
    scores: torch.Tensor, owners: Sequence[tuple[ScoreProcessing, int]], ids: torch.Tensor | None = None
) -> torch.Tensor:
    """
    Return scores `[lines, columns]` after their owners' processors. Owners are given in the order of their lines,
    each with its number of lines; neighbours whose processors do the same are processed together.

    Args:
        ids (`torch.Tensor` of shape `[columns]`, *optional*): The tokens that the columns are, where these are not all
            tokens in order: the others have a score of -inf.
    """
    parts, first = [], 0
    for _, group in groupby(owners, key=lambda owner: owner[0].key):
        members = list(group)
        end = first + sum(num for _, num in members)
        part, first = scores[first:end], end
        for processor in members[0][0].processors:
            if ids is not None and isinstance(processor, hf.SuppressTokensLogitsProcessor):
                suppressed = processor.suppress_tokens.to(ids.device)  # the only one that reads which tokens they are
                part = part.masked_fill(torch.isin(ids, suppressed), -torch.inf)
            else:
                part = processor(None, part)
        parts.append(part)
    return parts[0] if len(parts) == 1 else torch.cat(parts)
