"""Rows of one `generate` call as decoding without speculation has them: a padded batch, one column more per step."""

from collections.abc import Sequence
from typing import Generic, TypeVar

import torch
from transformers import StoppingCriteriaList
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria, StopStringCriteria
from transformers.generation.streamers import BaseStreamer

from .text import RequestText

Row = TypeVar("Row", bound=RequestText, covariant=True)


class DecodingBatch(Generic[Row]):
    """
    Rows of a call, each of which advances at its own speed. Decides where rows stop, and reports their tokens in the
    order of plain decoding.

    Criteria that depend on nothing but one row's tokens (length, EOS, stop strings) are checked the moment a token is
    picked. All others, which may keep state, and the streamer are called for length t, t + 1, ... with all rows in
    their original order, once every row has reached that length: the tokens of rows that are ahead are reported later.

    Args:
        requests (sequence of `RequestText`): All rows, in the caller's order.
        criteria (`StoppingCriteriaList`): As `generate` prepared it.
        pad_token_id (`int`, *optional*): Token that fills finished rows.
        streamer (`BaseStreamer`, *optional*): Gets one column `[batch_size]` at a time.
        records_scores, records_logits (`bool`): Whether `scores` and `logits` will be returned.
        pads_stepwise (`bool`): Whether finished rows keep running on padding, one column per step, since the scores
            of padding are returned and depend on the other rows or on the length.
    """

    def __init__(
        self,
        requests: Sequence[Row],
        criteria: StoppingCriteriaList,
        pad_token_id: int | None,
        streamer: BaseStreamer | None = None,
        records_scores: bool = False,
        records_logits: bool = False,
        pads_stepwise: bool = False,
        device: torch.device | str = "cpu",
    ):
        self.requests = requests
        self.streamer = streamer
        self.records_scores, self.records_logits = records_scores, records_logits
        self.device = torch.device(device)
        # Plain decoding pads finished rows only where it knows an end-of-sequence token; otherwise all rows run on
        # until the last one has stopped.
        self.pads_finished = any(hasattr(item, "eos_token_id") for item in criteria)
        self.pads_stepwise = self.pads_finished and pads_stepwise
        self.pad_token_id = pad_token_id if pad_token_id is not None else 0
        eos_criteria = [item for item in criteria if type(item) is EosTokenCriteria]
        self._eos = {token for item in eos_criteria for token in item.eos_token_id.flatten().tolist()}
        self._row_criteria = [item for item in criteria if type(item) is StopStringCriteria]
        known = (EosTokenCriteria, MaxLengthCriteria, StopStringCriteria)
        self._batch_criteria = [item for item in criteria if type(item) not in known]
        self.reports = bool(self._batch_criteria) or streamer is not None
        self._num_reported = 0
        self._score_columns: tuple[torch.Tensor, ...] = ()

    @property
    def records(self) -> bool:
        return self.records_scores or self.records_logits

    @property
    def num_generated(self) -> int | None:
        """Number of columns that plain decoding generates; None while some row has not stopped."""
        end = 0
        for request in self.requests:
            if request.stopped_at is None:  # mostly the first one: this is asked for every row
                return None
            end = max(end, request.stopped_at)
        return end

    def is_active(self, request: RequestText) -> bool:
        """Return whether the row needs further tokens."""
        if request.stopped_at is None:
            return True
        if self.pads_finished and not self.pads_stepwise:
            return False
        end = self.num_generated
        if end is None:
            return request.num_remaining is None or request.num_remaining > 0
        return request.num_generated < end

    def is_padding(self, request: RequestText) -> bool:
        """Return whether the row has finished and keeps running, on padding."""
        return self.pads_stepwise and request.stopped_at is not None

    @property
    def active(self) -> list[Row]:
        return [request for request in self.requests if self.is_active(request)]

    def check_stop(self, request: RequestText) -> None:
        """Stop the row if its newest token ends it by a criterion that depends on the row alone."""
        if request.stopped_at is None and (
            request.tokens[-1] in self._eos
            or request.num_remaining == 0
            or (self._row_criteria and self._meets_criterion(request))
        ):
            request.stopped_at = request.num_generated

    def cannot_stop_within(self, request: RequestText, tokens: Sequence[int]) -> bool:
        """Return whether it is certain that `check_stop` stops the row at none of these next tokens."""
        left = request.num_remaining
        return (
            request.stopped_at is None
            and not self._row_criteria
            and (left is None or len(tokens) < left)
            and self._eos.isdisjoint(tokens)
        )

    def _meets_criterion(self, request: RequestText) -> bool:
        ids = request.padded_ids()[None]  # on the CPU: no wait for a device at every token
        return any(bool(item(ids, None)) for item in self._row_criteria)

    def ends_text(self, request: RequestText) -> bool:
        """Return whether the row's last token is an end-of-sequence token."""
        return request.tokens[request.num_valid - 1] in self._eos

    def padded_batch(self, num_generated: int) -> torch.Tensor:
        """Return the batch after so many steps of plain decoding, `[batch_size, prompt_len + num_generated]`."""
        rows = []
        for request in self.requests:
            length = num_generated
            if self.pads_finished and request.stopped_at is not None:
                length = min(length, request.stopped_at)
            ids = request.padded_ids(length)
            rows.append(torch.nn.functional.pad(ids, (0, num_generated - length), value=self.pad_token_id))
        return torch.stack(rows).to(self.device)

    def report(self) -> None:
        """Call criteria and streamer for every column that all rows have reached."""
        while self.reports and self.num_generated != self._num_reported:
            column = self._num_reported + 1
            if not all(self._has_column(request, column) for request in self.requests):
                return
            self._num_reported = column
            if self._batch_criteria:
                self._check_batch_criteria(self.padded_batch(column), column)
            if self.streamer is not None:
                self.streamer.put(self._tokens_of(column))

    def _tokens_of(self, column: int) -> torch.Tensor:
        """Return the last column of `padded_batch(column)`, on the CPU."""
        ends = [request.num_valid if self.pads_finished else request.num_generated for request in self.requests]
        tokens = [
            request.tokens[column - 1] if column <= end else self.pad_token_id
            for request, end in zip(self.requests, ends)
        ]
        return torch.tensor(tokens)

    def _has_column(self, request: RequestText, column: int) -> bool:
        if request.num_generated >= column:
            return True
        return self.pads_finished and request.stopped_at is not None

    def _check_batch_criteria(self, ids: torch.Tensor, column: int) -> None:
        scores = None
        if self.records_scores:
            self._score_columns += (self.column_of("scores", column - 1),)
            scores = self._score_columns
        is_done = torch.full((len(ids),), False, device=ids.device)
        for item in self._batch_criteria:
            is_done = is_done | item(ids, scores)
        for request, done in zip(self.requests, is_done.tolist()):
            if done and (request.stopped_at is None or request.stopped_at > column):
                request.stopped_at = column
                if self.pads_finished:
                    request.truncate(column)

    def column_of(self, name: str, column: int) -> torch.Tensor:
        """Return one step's recorded `scores` or `raw_logits`, `[batch_size, vocab_size]`; zeros for rows without."""
        records = [getattr(request, name) for request in self.requests]
        template = next(record[column] for record in records if len(record) > column)
        lines = [record[column] if len(record) > column else torch.zeros_like(template) for record in records]
        return torch.stack(lines)

    @property
    def is_reported(self) -> bool:
        """Return whether all that plain decoding would generate was generated and reported."""
        end = self.num_generated
        return end is not None and not self.active and (not self.reports or self._num_reported >= end)
