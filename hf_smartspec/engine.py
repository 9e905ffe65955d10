"""The decoding loop: draft, forward, verify, commit, observe."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
import torch
from transformers.utils import logging

from .candidates.base import TreeCandidateGenerator
from .decoding import DecodingBatch
from .goodput.selector import LengthPolicy
from .layout import CacheRow, RowInput
from .processors import TokenPicker, argmax
from .request import GenerationStatistics, Request
from .tree import DraftTree

logger = logging.get_logger(__name__)


class ModelForward(Protocol):
    """How the engine runs the target: `PackedForward`, or `RowwiseForward` for models it cannot serve."""

    trees: bool  # whether draft trees can be verified, or chains only

    def add(self) -> CacheRow: ...
    def forward(self, inputs: Sequence[RowInput]) -> tuple[torch.Tensor, list[int]]: ...
    def commit(self, rows: Sequence[CacheRow], paths: Sequence[Sequence[int]]) -> None: ...
    def remove(self, row: CacheRow) -> None: ...
    def swap(self, row: CacheRow, other: CacheRow) -> None: ...
    def cut(self, row: CacheRow, length: int) -> None: ...


class Engine:
    """
    Decodes a batch of requests, each at its own speed, until all have stopped.

    Args:
        forward (`ModelForward`): Runs the target model.
        batch (`DecodingBatch`): The rows and their ends.
        picker (`TokenPicker`): The target's logits processors.
        pick (`Callable`): One of `verify.METHODS`: tokens `[rows]` from requests and processed scores.
        source (`TreeCandidateGenerator`): Proposes draft trees.
        policy (`LengthPolicy`): Says how many nodes are drafted and verified.
        vocab_size (`int`): Draft tokens must lie below.
        keeps_cache (`bool`): Whether finished rows' keys and values are still wanted at the end.
        assignment (`dict`, *optional*): What every request draws on: arguments of `source.assign`.
        num_positions (`int`, *optional*): Positions that the target knows; texts may outgrow them, drafts must not.
    """

    def __init__(
        self,
        forward: ModelForward,
        batch: DecodingBatch,
        picker: TokenPicker,
        pick: Callable[[Sequence[Request], torch.Tensor], list[int]],
        source: TreeCandidateGenerator,
        policy: LengthPolicy,
        vocab_size: int,
        keeps_cache: bool = False,
        num_positions: int | None = None,
        assignment: dict[str, Any] | None = None,
    ):
        self.forward, self.batch, self.picker, self.pick = forward, batch, picker, pick
        self.source, self.policy, self.vocab_size = source, policy, vocab_size
        self.keeps_cache, self.num_positions, self.assignment = keeps_cache, num_positions, assignment
        self.statistics = GenerationStatistics()
        self._has_warned = False
        # Without processors, noise or records, the arg max of every node at once is all there is to picking.
        self._picks_greedily = (
            not picker.processors and not batch.records and all(request.seed is None for request in batch.requests)
        )

    def run(self) -> None:
        """Steps until every row has stopped."""
        start = time.perf_counter()
        try:
            for request in self.batch.requests:
                request.row = request.row or self.forward.add()
                self._guarded(request, self._start_source, request)
            while not self.batch.is_reported:
                self.step()
        finally:
            for request in self.batch.requests:
                self._stop_source(request)
        self.statistics.generated_tokens = sum(request.stopped_at or 0 for request in self.batch.requests)
        self.statistics.seconds_total = time.perf_counter() - start

    def step(self) -> None:
        """One step: rows without a draft under verification get one, and every row advances as far as it can."""
        rows = [request for request in self.batch.active if not request.is_verifying]
        trees = self.draft(rows)
        self.run_model(rows, trees)
        ended = self.verify()
        self.commit(ended)
        self.observe(ended)
        self.batch.report()
        self.release()

    # 1. draft

    def draft(self, rows: Sequence[Request]) -> list[DraftTree]:
        """A tree for each row, pruned to what the policy and the length limit allow."""
        with self._timed("seconds_draft"):
            limits = self.policy.max_nodes(len(rows))
            # The last token needs no draft: the target's own pick comes free.
            if len(limits) != len(rows):
                raise ValueError(f"{type(self.policy).__name__} gave {len(limits)} limits for {len(rows)} rows.")
            wanted = {
                request.request_id: (request, limit)
                for request, limit in zip(rows, limits)
                if request.is_drafting and limit > 0 and request.num_remaining != 1
            }
            padding = {name: item for name, item in wanted.items() if self.batch.is_padding(item[0])}
            wanted = {name: item for name, item in wanted.items() if name not in padding}
            proposals = self._propose(wanted) if wanted else {}
            for name, (_, limit) in padding.items():
                proposals[name] = DraftTree.chain([self.batch.pad_token_id] * limit)
        with self._timed("seconds_select"):
            trees = [proposals.get(request.request_id, DraftTree.empty()) for request in rows]
            trees = self.policy.select(trees)
            if len(trees) != len(rows):
                raise ValueError(f"{type(self.policy).__name__} selected {len(trees)} trees for {len(rows)} rows.")
            return [self._within_limits(request, tree) for request, tree in zip(rows, trees)]

    def _propose(self, wanted: dict, first_error: Exception | None = None) -> dict:
        """Checked proposals by request id; a source that fails is asked row by row, to spare the rows it can serve."""
        ids, limits = list(wanted), [limit for _, limit in wanted.values()]
        try:
            trees = self.source.propose(ids, limits)
            if len(trees) != len(ids):
                raise ValueError(f"{type(self.source).__name__} returned {len(trees)} trees for {len(ids)} requests.")
            for tree in trees:
                tree.check_integrity(self.vocab_size)
            return dict(zip(ids, trees))
        except Exception as error:
            first_error = first_error or error
            if len(ids) == 1:
                self._drop_source(wanted[ids[0]][0], first_error)
                return {}
        proposals: dict = {}
        for request_id in ids:
            proposals |= self._propose({request_id: wanted[request_id]}, first_error)
        return proposals

    def _within_limits(self, request: Request, tree: DraftTree) -> DraftTree:
        if not self.forward.trees:
            tree = tree.best_chain()
        if request.num_remaining is not None and len(tree):
            tree = tree.keep(tree.depths < request.num_remaining)
        # Learned position embeddings end somewhere, and plain decoding may stop just before.
        room = len(tree) if self.num_positions is None else self.num_positions - request.length
        if 0 <= room < len(tree):
            tree = tree.keep(tree.depths <= room)
        return tree

    # 2. forward

    def run_model(self, rows: Sequence[Request], trees: Sequence[DraftTree]) -> None:
        """One packed forward; leaves every row with its tree and the target's logits at each node."""
        if not rows:
            return
        with self._timed("seconds_forward"):
            inputs = [RowInput(request.cache_row, request.uncached(), tree) for request, tree in zip(rows, trees)]
            logits, offsets = self.forward.forward(inputs)
        with self._timed("seconds_verify"):
            picks = argmax(logits) if self._picks_greedily else []
        for request, tree, offset in zip(rows, trees, offsets):
            lines = slice(offset, offset + len(tree) + 1)
            request.tree, request.cursor, request.path = tree, -1, []
            request.logits, request.picks = logits[lines], picks[lines]
        self.statistics.forwards += 1
        self.statistics.steps += len(rows)
        self.statistics.drafted_tokens += sum(map(len, trees))

    # 3. verify

    def verify(self) -> list[Request]:
        """Advances rows along their trees; returns those whose path has ended."""
        with self._timed("seconds_verify"):
            ready = [request for request in self.batch.active if request.is_verifying]
            if self._picks_greedily:
                return self._verify_greedily(ready)
            ended: list[Request] = []
            while ready and not (self.picker.needs_lockstep and len(ready) < len(self.batch.active)):
                tokens = self._pick_next(ready)
                still = [request for request, token in zip(ready, tokens) if self._advance(request, token)]
                if not self.picker.is_known:  # processors and criteria may share state: they take turns
                    self.batch.report()
                    still = [request for request in still if self.batch.is_active(request)]
                ended += [request for request in ready if request not in still]
                ready = still
            return ended

    def _verify_greedily(self, rows: list[Request]) -> list[Request]:
        for request in rows:
            while self._advance(request, request.picks[request.cursor + 1]):
                pass
        return rows

    def _pick_next(self, rows: list[Request]) -> list[int]:
        """The target's next token for each row, from its logits at the row's cursor."""
        logits = torch.stack([request.node_logits[request.cursor + 1] for request in rows]).to(torch.float32)
        scores = self.picker.process(rows, logits, self.batch)
        for request, raw, line in zip(rows, logits, scores):
            if self.batch.records_logits:
                request.raw_logits.append(raw)
            if self.batch.records_scores:
                request.scores.append(line)
        tokens = self.pick(rows, scores)
        padding = self.batch.pad_token_id
        return [padding if self.batch.is_padding(request) else token for request, token in zip(rows, tokens)]

    def _advance(self, request: Request, token: int) -> bool:
        """Appends the token; True if the draft holds it: the next token can then be picked from the same forward."""
        request.append(token)
        self.batch.check_stop(request)
        if not self.batch.is_active(request):
            return False
        assert request.tree is not None, "the request has no draft under verification"
        child = request.tree.child(request.cursor, token)
        if child is None:
            return False
        request.cursor = child
        request.path.append(child)
        return True

    # 4. commit

    def commit(self, rows: Sequence[Request]) -> None:
        """Keeps keys and values of the accepted paths."""
        with self._timed("seconds_verify"):
            self.forward.commit([request.cache_row for request in rows], [request.path for request in rows])
            for request in rows:
                self.statistics.accepted_tokens += len(request.path)
                request.tree = request.logits = None

    # 5. observe

    def observe(self, rows: Sequence[Request]) -> None:
        """Tells the source what was committed."""
        with self._timed("seconds_observe"):
            for request in rows:
                end = request.stopped_at if self.batch.pads_finished else None  # behind it stands padding
                tokens = np.array(request.tokens[request.num_observed : end], np.int64)
                request.num_observed += len(tokens)
                if len(tokens):
                    self._guarded(request, self.source.observe, request.request_id, tokens)

    def release(self) -> None:
        """Rows that need no further tokens leave the first slots, so that they cost nothing."""
        active = self.batch.active
        beyond = [request.cache_row for request in active if request.cache_row.slot >= len(active)]
        for request in self.batch.requests:
            if request.row is None or request in active:
                continue
            request.tree = request.logits = None
            self._stop_source(request)
            if not self.keeps_cache:
                self.forward.remove(request.row)
                request.row = None
            elif request.row.slot < len(active):
                self.forward.swap(request.row, beyond.pop())

    # Sources are guests: whatever they do wrong costs their request its drafts, nothing more.

    def _start_source(self, request: Request) -> None:
        request.is_known_to_source = True
        if self.assignment:
            self.source.assign(request.request_id, **self.assignment)
        self.source.couple(request.request_id, self.picker.processors, request.seed)
        self.source.start(request.request_id, request.prompt)

    def _stop_source(self, request: Request) -> None:
        if request.is_known_to_source:
            request.is_known_to_source = False
            try:
                self.source.stop(request.request_id)
            except Exception as error:
                self._drop_source(request, error)

    def _guarded(self, request: Request, call: Callable, *args: Any) -> None:
        if not request.is_drafting:
            return
        try:
            call(*args)
        except Exception as error:
            self._drop_source(request, error)

    def _drop_source(self, request: Request, error: Exception) -> None:
        request.is_drafting = False
        if not self._has_warned:
            logger.warning(
                f"{type(self.source).__name__} failed and was dropped for row {request.index}, which goes "
                f"on without speculation (further failures of this call are not reported): {error!r}"
            )
        self._has_warned = True

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            setattr(self.statistics, name, getattr(self.statistics, name) + time.perf_counter() - start)
