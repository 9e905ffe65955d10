"""Tokens of answers: decoding to text up to stop strings, OpenAI's penalties, and scoring of known texts."""

from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
import torch
from tokenizers.decoders import DecodeStream
from transformers import LogitsProcessor, PreTrainedTokenizerBase, StoppingCriteria

from ...candidates import TreeCandidateGenerator
from ...drafts.tree import DraftTree

KNOWN_NODES = 16  # tokens of a known text per step


class TextStream:
    """
    Decoder of tokens to text, up to the first stop string. Text that may become a stop string, and incomplete
    characters, are held back.

    Args:
        tokenizer (`PreTrainedTokenizerBase`): A tokenizer of the `tokenizers` library.
        stops (sequence of `str`): Stop strings.
        keeps_special (`bool`): Whether the text contains special tokens.
        keeps_stop (`bool`): Whether the text includes the stop string.

    Attributes:
        stop_reason (`str`, *optional*): The stop string that has ended the text.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        stops: Sequence[str] = (),
        keeps_special: bool = False,
        keeps_stop: bool = False,
    ):
        self._tokenizer, self._backend = tokenizer, _backend_of(tokenizer)
        self._stops, self._skips_special, self._keeps_stop = stops, not keeps_special, keeps_stop
        self._decoder = DecodeStream([], skip_special_tokens=self._skips_special)
        self._unread: list[int] = []  # tokens of an incomplete character
        self._held = ""
        self.stop_reason: str | None = None

    def feed(self, tokens: Sequence[int]) -> str:
        """Return the text of further tokens; none after a stop string."""
        for token in tokens:
            if self.stop_reason is not None:
                break
            self._held += self._step(token)
            self._find_stop()
        return self._released(_num_chars_of_stop(self._held, self._stops))

    def end(self) -> str:
        """Return the text that was held back."""
        if self._unread and self.stop_reason is None:
            self._held += str(self._tokenizer.decode(self._unread, skip_special_tokens=self._skips_special))
            self._find_stop()
        return self._released(0)

    def _step(self, token: int) -> str:
        self._unread.append(token)
        try:
            text = self._decoder.step(self._backend, token)
        except Exception:  # the decoder is out of step: start a new one after this token
            text = str(self._tokenizer.decode(self._unread, skip_special_tokens=self._skips_special))
            self._decoder = DecodeStream([], skip_special_tokens=self._skips_special)
        if text is None:
            return ""
        self._unread.clear()
        return text

    def _find_stop(self) -> None:
        found = [(place, stop) for stop in self._stops if (place := self._held.find(stop)) >= 0]
        if found:
            place, self.stop_reason = min(found)
            self._held = self._held[: place + (len(self.stop_reason) if self._keeps_stop else 0)]

    def _released(self, num_held: int) -> str:
        end = len(self._held) - (num_held if self.stop_reason is None else 0)
        text, self._held = self._held[:end], self._held[end:]
        return text


def _num_chars_of_stop(text: str, stops: Sequence[str]) -> int:
    """Return the number of characters at the text's end that may be the beginning of a stop string."""
    for length in range(min(len(text), max(map(len, stops), default=1) - 1), 0, -1):
        if any(stop.startswith(text[-length:]) for stop in stops):
            return length
    return 0


def _backend_of(tokenizer: PreTrainedTokenizerBase) -> Any:
    return tokenizer._tokenizer  # as in transformers' own server


class StopTexts(StoppingCriteria):
    """
    Criterion that ends a request of one row at a stop string in its answer. transformers' `StopStringCriteria` also
    looks at the prompt's end, which clients do not expect, and takes seconds to prepare for every new string.

    Args:
        text (`TextStream`): A decoder for this criterion alone.
        prompt_len (`int`): Tokens before the answer.
    """

    def __init__(self, text: TextStream, prompt_len: int):
        self.text, self._num_seen = text, prompt_len

    def __call__(self, input_ids: torch.LongTensor, scores: Any, **kwargs: Any) -> torch.BoolTensor:
        self.text.feed(input_ids[0, self._num_seen :].tolist())
        self._num_seen = input_ids.shape[1]
        return torch.tensor([self.text.stop_reason is not None], device=input_ids.device)  # type: ignore[return-value]


class Penalties(LogitsProcessor):
    """
    OpenAI's penalties: the score of a token that the answer contains is lowered by `presence`, and by `frequency` for
    each occurrence. Tokens of the prompt do not count.

    Args:
        presence, frequency (`float`): The penalties.
        prompt_len (`int`): Tokens before the answer.
    """

    keeps_no_state = True

    def __init__(self, presence: float, frequency: float, prompt_len: int):
        self.presence, self.frequency, self.prompt_len = presence, frequency, prompt_len

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        tokens, counts = torch.unique(input_ids[0, self.prompt_len :], return_counts=True)
        result = scores.clone()
        result[0, tokens] -= self.presence + self.frequency * counts.to(scores.dtype)
        return result  # type: ignore[return-value]


class ForcedText(LogitsProcessor):
    """Processor that allows only the tokens of a known text."""

    keeps_no_state = True

    def __init__(self, text: np.ndarray, prompt_len: int):
        self._text, self._prompt_len = text, prompt_len

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        result = torch.full_like(scores, -torch.inf)
        result[:, int(self._text[input_ids.shape[1] - self._prompt_len])] = 0.0
        return result  # type: ignore[return-value]


class KnownText(TreeCandidateGenerator):
    """Source that drafts a known text, int64 `[length]`, for one request."""

    default_num_nodes = KNOWN_NODES

    def __init__(self, text: np.ndarray):
        self._text, self._num_seen = text, 0

    def start(self, request_id: Hashable, prompt: np.ndarray) -> None:
        self._num_seen = 0

    def propose(self, request_ids: Sequence[Hashable], max_nodes: Sequence[int]) -> list[DraftTree]:
        return [DraftTree.chain(self._text[self._num_seen : self._num_seen + limit]) for limit in max_nodes]

    def observe(self, request_id: Hashable, tokens: np.ndarray) -> None:
        self._num_seen += len(tokens)

    def stop(self, request_id: Hashable) -> None:
        pass
