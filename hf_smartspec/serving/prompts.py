"""What a prompt may be: token ids, or with a tokenizer, text and chats."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase


def prompt_ids(prompt: Any, tokenizer: PreTrainedTokenizerBase | None = None) -> torch.Tensor:
    """
    A prompt as `[1, length]`, int64.

    Args:
        prompt: Token ids, text, or the messages of a chat, whose answer is to begin.
        tokenizer (`PreTrainedTokenizerBase`, *optional*): For text and chats. The former gets the tokens that it adds
            to every text, the latter those of its chat template.

    Raises:
        TypeError: for text and chats where there is no tokenizer, and for what is no prompt.
        ValueError: for prompts without tokens, several prompts, and chats where the tokenizer has no template.
    """
    if isinstance(prompt, Mapping):
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
        return _as_ids(tokenizer(prompt).input_ids)
    for message in prompt:
        if not isinstance(message, Mapping) or "role" not in message:
            raise ValueError(f'Messages of a chat must be {{"role": ..., "content": ...}}, got {message!r}.')
    encoding: Any = tokenizer.apply_chat_template(list(prompt), add_generation_prompt=True, return_dict=True)
    return _as_ids(encoding["input_ids"])


def check_prompts(prompts: Any) -> None:
    """Raises `TypeError` for a single prompt in place of a list of prompts."""
    if isinstance(prompts, str | Mapping) or _is_chat(prompts):
        raise TypeError("The prompts must be a list, got a single one: put it in a list, or use `add_request`.")


def _is_chat(prompt: Any) -> bool:
    return isinstance(prompt, Sequence) and not isinstance(prompt, str) and any(isinstance(x, Mapping) for x in prompt)


def _as_ids(input_ids: Any) -> torch.Tensor:
    ids = torch.as_tensor(input_ids)
    if ids.dim() == 2 and len(ids) == 1:
        ids = ids[0]
    if ids.dim() != 1 or not len(ids) or ids.dtype.is_floating_point:
        raise ValueError(
            f"`input_ids` must be the token ids of one prompt, of at least one token; got shape {list(ids.shape)} and "
            f"dtype {ids.dtype}. For several prompts, use `add_requests`."
        )
    return ids.long()[None]
