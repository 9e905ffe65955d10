"""Text of tokens as they come, and where it ends."""

from collections.abc import Sequence
from typing import Any

import torch
from tokenizers.decoders import DecodeStream
from transformers import PreTrainedTokenizerBase, StoppingCriteria


class TextStream:
    """
    The text of tokens as they come, up to the first stop string. What may yet become a stop string, and bytes that are
    no character yet, are held back.

    Args:
        tokenizer (`PreTrainedTokenizerBase`): One of the `tokenizers` library.
        stops (sequence of `str`): Where the text ends.
        keeps_special (`bool`): Whether special tokens are text, too.
        keeps_stop (`bool`): Whether the stop string is part of the text.

    Attributes:
        stop_reason (`str`, *optional*): The stop string that the text has come to.
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
        self._unread: list[int] = []  # tokens that make no characters yet
        self._held = ""
        self.stop_reason: str | None = None

    def feed(self, tokens: Sequence[int]) -> str:
        """Further text; none any more behind a stop string."""
        for token in tokens:
            if self.stop_reason is not None:
                break
            self._held += self._step(token)
            self._find_stop()
        return self._released(_longest_beginning(self._held, self._stops))

    def end(self) -> str:
        """What was held back."""
        if self._unread and self.stop_reason is None:
            self._held += str(self._tokenizer.decode(self._unread, skip_special_tokens=self._skips_special))
            self._find_stop()
        return self._released(0)

    def _step(self, token: int) -> str:
        self._unread.append(token)
        try:
            text = self._decoder.step(self._backend, token)
        except Exception:  # of a decoder that has lost its place: begin anew with this token
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


def _longest_beginning(text: str, stops: Sequence[str]) -> int:
    """Characters at the text's end that some stop string begins with."""
    for length in range(min(len(text), max(map(len, stops), default=1) - 1), 0, -1):
        if any(stop.startswith(text[-length:]) for stop in stops):
            return length
    return 0


def _backend_of(tokenizer: PreTrainedTokenizerBase) -> Any:
    return tokenizer._tokenizer  # as transformers' own server takes it


class StopTexts(StoppingCriteria):
    """
    Ends a request of one row where its own text comes to a stop string. transformers' `StopStringCriteria` looks at
    the prompt's end too, which clients do not expect, and prepares seconds for every new string.

    Args:
        text (`TextStream`): Of the request, for nobody else.
        prompt_len (`int`): Where its own text begins.
    """

    def __init__(self, text: TextStream, prompt_len: int):
        self.text, self._num_seen = text, prompt_len

    def __call__(self, input_ids: torch.LongTensor, scores: Any, **kwargs: Any) -> torch.BoolTensor:
        self.text.feed(input_ids[0, self._num_seen :].tolist())
        self._num_seen = input_ids.shape[1]
        return torch.tensor([self.text.stop_reason is not None], device=input_ids.device)  # type: ignore[return-value]
