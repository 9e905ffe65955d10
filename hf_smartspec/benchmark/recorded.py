"""Replaying recorded responses through a model: it runs at its own cost, and picks the tokens that were recorded."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import numpy as np
import torch
from transformers import LogitsProcessor, PreTrainedModel

_HIGHEST = 1e6  # above any logit; the others stay finite, since prompt lookup of transformers asks which are not


class RecordedText(LogitsProcessor):
    """
    Gives the recorded token of every row the highest score; behind the end of the response, the end of sequence. Rows
    are known by their prompts: two of one prompt replay the first one's response.

    Args:
        prompts (`torch.Tensor` of shape `[rows, length]`): As passed to `generate`.
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
        Inside, only the target's own scores are changed: transformers applies the target's processors to its draft
        model too, which would then draft what was recorded.
        """
        with ExitStack() as stack:
            stack.enter_context(model.register_forward_hook(lambda *_: self._pause(False)))
            if draft is not None:
                stack.enter_context(draft.register_forward_hook(lambda *_: self._pause(True)))
            yield

    def _pause(self, value: bool) -> None:
        self.is_paused = value
