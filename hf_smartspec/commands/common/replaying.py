"""Replay of recorded responses through a model, which computes all its forwards, but picks the recorded tokens."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from transformers import LogitsProcessor, PreTrainedModel

from ...decoding.call import Request
from ...prepare.config import SmartSpecConfig
from ...prepare.sources import Assistant
from ...serving.engine import Engine
from ...serving.memory.budget import Budget
from ...serving.memory.kv_memory import EngineMemory
from ...target_model.forward.packed import PackedForward
from ...target_model.layout.rows import CacheRow, RowInput
from ...target_model.written import written_decoder

_HIGHEST = 1e6  # above any logit; the others stay finite, since prompt lookup of transformers asks which are not


class RecordedText(LogitsProcessor):
    """
    Processor that gives the recorded token of every row the highest score and, after the end of the response, the
    end-of-sequence token. Rows are found by their prompts: rows of the same prompt replay the first one's response.

    Args:
        prompts (`torch.Tensor` of shape `[rows, length]`): The prompts that are passed to `generate`.
        responses (sequence of `np.ndarray` of shape `[n]`): Recorded token ids of each row.
        end_id (`int`): The end-of-sequence token.
    """

    keeps_no_state = True

    def __init__(self, prompts: torch.Tensor, responses: Sequence[np.ndarray], end_id: int):
        self.is_paused = False
        self._prompt_len = prompts.shape[1]
        self._texts: dict[bytes, list[int]] = {}
        for name, response in zip(self._names(prompts), responses):
            self._texts.setdefault(name, [*response.tolist(), end_id])

    def _names(self, input_ids: torch.Tensor) -> list[bytes]:
        return [row.tobytes() for row in input_ids[:, : self._prompt_len].cpu().numpy()]

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        if self.is_paused:
            return scores
        texts = [self._texts[name] for name in self._names(input_ids)]
        at = input_ids.shape[1] - self._prompt_len
        scores = scores.clone()  # type: ignore[assignment]
        scores[range(len(texts)), [text[min(at, len(text) - 1)] for text in texts]] = _HIGHEST
        return scores

    @contextmanager
    def replaying(self, model: PreTrainedModel, draft: PreTrainedModel | None = None) -> Iterator[None]:
        """
        Within the context, change the target's scores only: transformers applies the target's processors to its draft
        model (`draft`) too, which would then draft the recorded text. Without a draft model, no hook is needed.
        """
        with ExitStack() as stack:
            if draft is not None:
                stack.enter_context(model.register_forward_hook(lambda *_: self._pause(False)))
                stack.enter_context(draft.register_forward_hook(lambda *_: self._pause(True)))
            yield

    def _pause(self, value: bool) -> None:
        self.is_paused = value


class RecordedForward(PackedForward):
    """
    Forward of a target that computes all logits and their arg max, but picks the tokens of recorded texts, and `end_id`
    after their end. Picks after a wrong draft node are wrong too, and never used.
    """

    def __init__(self, model: PreTrainedModel, num_rows: int, capacity: int, end_id: int):
        written_decoder(model, thoroughly=True)
        super().__init__(model, num_rows, capacity, choose=lambda may_wait: written_decoder(model, may_wait=may_wait))
        self._end_id = end_id
        self._texts: dict[CacheRow, np.ndarray] = {}
        self._picks: list[int] = []

    def set_text(self, row: CacheRow, text: np.ndarray) -> None:
        """Set the text of a row's request, from its prompt on, int64 `[length]`."""
        self._texts[row] = np.append(text, self._end_id)

    def forward(self, inputs: Sequence[RowInput]) -> tuple[Any, list[int]]:
        logits, offsets = super().forward(inputs)
        lines = [item.row.length + np.append(0, item.tree.depths) for item in inputs]
        self._picks = [self._end_id] * sum(map(len, lines))
        for item, first, positions in zip(inputs, offsets, lines):
            text = self._texts[item.row]
            self._picks[first : first + len(positions)] = text[np.minimum(positions, len(text) - 1)].tolist()
        return logits, offsets

    def argmax(self, logits: Any) -> list[int]:
        super().argmax(logits)
        return self._picks

    def top(self, logits: Any, count: int, num_lines: int, with_argmax: bool) -> None:
        """Do nothing: the picks are not those of the logits."""


class _RecordedMemory(EngineMemory):
    """Memory of an engine that passes the recorded texts of its rows to the forward."""

    def __init__(self, model: PreTrainedModel, max_batch_size: int, budget: Budget, engine: "ReplayEngine"):
        super().__init__(model, max_batch_size, budget)
        self.texts = engine.texts
        self.forward: RecordedForward = RecordedForward(model, 1, 1, engine.end_id)
        self._clear()

    def place(self, request: Request, running: list[Request]) -> None:
        super().place(request, running)
        text = np.concatenate([request.prompt, self.texts[request.prompt.tobytes()]])
        self.forward.set_text(request.cache_row, text)

    def drop_kept(self) -> None:
        """Drop the rows of ended requests; none must be running."""
        for row in sorted(self.prefixes.clear(), key=lambda row: row.num_sharers > 0):  # rows that others share last
            self.cache.remove(row)

    def _shrink(self) -> None:
        """Keep all memory, also after `drop_kept`: recorded forwards are valid for its addresses only."""

    def expire(self) -> None:
        """Keep all memory when the engine is started again: the model does not change meanwhile."""


class ReplayEngine(Engine):
    """
    Engine whose target computes all its forwards, but picks recorded responses.

    Args:
        model, assistant, max_batch_size: Arguments of `Engine`.
        prompts, responses (sequences of `np.ndarray`, int64): All requests that will be added: distinct prompts
            `[prompt_len]`, and responses `[n]`.
        end_id (`int`): The end-of-sequence token, which follows every response.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        assistant: SmartSpecConfig,
        max_batch_size: int,
        prompts: Sequence[np.ndarray],
        responses: Sequence[np.ndarray],
        end_id: int,
    ):
        self.texts = {prompt.tobytes(): response for prompt, response in zip(prompts, responses)}
        self.end_id = end_id
        self._num_forgotten = 0
        super().__init__(model, assistant, max_batch_size)

    def _new_memory(self, max_batch_size: int, budget: Budget) -> EngineMemory:
        self._replayed = _RecordedMemory(self.model, max_batch_size, budget, self)
        return self._replayed

    def forget_texts(self) -> Assistant:
        """
        Forget the texts of all requests so far, which must have ended, while the engine is stopped. Memory, recorded
        forwards, and measured costs and rates stay.

        Returns:
            The assistant for the requests that follow: its sources draft nothing from earlier texts.
        """
        self._replayed.drop_kept()
        self._replayed.scheduler.lends_rows = True  # none are reserved for namespaces of before
        self._num_forgotten += 1
        config, source = self._assistant
        return Assistant(replace(config, namespace=f"texts {self._num_forgotten}"), source)
