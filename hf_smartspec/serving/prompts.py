"""Prompts of requests: token ids, or with a tokenizer, text and chats."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase


def prompt_ids(prompt: Any, tokenizer: PreTrainedTokenizerBase | None = None) -> torch.Tensor:
    """
    Return the token ids of a prompt, int64 `[1, length]`.

    Args:
        prompt: Token ids, text, or the messages of a chat that is to be answered.
        tokenizer (`PreTrainedTokenizerBase`, *optional*): For text and chats. Texts get the tokenizer's special tokens,
            chats those of its chat template.

    Raises:
        TypeError: for text and chats without a tokenizer, and for values that are no prompt, such as floats.
        ValueError: for prompts without tokens, several prompts, and chats without a chat template or that it refuses.
    """
    if isinstance(prompt, Mapping):
        if "input_ids" in prompt:
            raise TypeError("A prompt must be token ids, got an encoding: pass its `input_ids`.")
        raise TypeError("A prompt must be token ids, text or a list of messages, got one message: put it in a list.")
    is_chat = _is_chat(prompt)
    if not isinstance(prompt, str) and not is_chat:
        return _as_ids(prompt)
    if tokenizer is None:
        raise TypeError(
            f"The prompt is {'a chat' if is_chat else 'text'}, which needs a tokenizer: `Engine(model, "
            "tokenizer=...)`. Without one, pass token ids: `tokenizer(text).input_ids`."
        )
    if not is_chat:
        return _as_ids(tokenizer(prompt).input_ids, prompt)
    for message in prompt:
        if not isinstance(message, Mapping) or "role" not in message:
            raise ValueError(f'Messages of a chat must be {{"role": ..., "content": ...}}, got {message!r}.')
    try:
        encoding: Any = tokenizer.apply_chat_template(list(prompt), add_generation_prompt=True, return_dict=True)
    except TemplateError as error:
        raise ValueError(f"The chat template refuses the messages: {error}.") from error
    return _as_ids(encoding["input_ids"])


def check_prompts(prompts: Any) -> None:
    """Raise `TypeError` for a single prompt in place of a list of prompts."""
    if isinstance(prompts, str | Mapping) or _is_chat(prompts):
        raise TypeError("The prompts must be a list, got a single one: put it in a list, or use `add_request`.")


def _is_chat(prompt: Any) -> bool:
    return isinstance(prompt, Sequence) and not isinstance(prompt, str) and any(isinstance(x, Mapping) for x in prompt)


def _as_ids(prompt: Any, text: str | None = None) -> torch.Tensor:
    """Return token ids as int64 `[1, length]`. `text` is the text that they stand for, if any, for error messages."""
    what = "`input_ids` must be the token ids of one prompt"
    try:
        ids = torch.as_tensor(prompt)
    except (TypeError, ValueError, RuntimeError) as error:  # no numbers, or too large for 64 bits
        raise TypeError(f"{what}, got {type(prompt).__name__}: {error}.") from None
    if ids.dim() == 2 and len(ids) == 1:
        ids = ids[0]
    if ids.dim() != 1:
        raise ValueError(f"{what}, got shape {list(ids.shape)}. For several prompts, use `add_requests`.")
    if not len(ids):
        got = "an empty one" if text is None else f"{text!r}, for which the tokenizer returns none"
        raise ValueError(f"{what}, of at least one token; got {got}.")
    if ids.dtype == torch.bool or ids.is_floating_point() or ids.is_complex():
        raise TypeError(f"{what}, which are integers; got {ids.dtype}.")
    return ids.long()[None]
