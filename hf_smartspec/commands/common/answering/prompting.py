"""Prompts and chats as token ids."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from ....serving.prompts import prompt_ids

Message = dict[str, Any]


@dataclass(frozen=True)
class Prompter:
    """
    Tokenizer of prompts, with or without the chat template.

    Args:
        system (`str`, *optional*): System prompt, before the conversation.
        is_raw (`bool`): Whether text is continued as it is, even where the tokenizer has a chat template.
    """

    tokenizer: PreTrainedTokenizerBase
    system: str | None = None
    is_raw: bool = False

    def token_ids(self, prompt: str | Sequence[Mapping[str, Any]]) -> list[int]:
        """
        Return the token ids of a chat, or of a text, which is a user's turn where there is a chat template.

        Raises:
            ValueError: for an empty prompt, a chat without a template, or an object that is neither text nor chat.
        """
        if isinstance(prompt, str):
            if not prompt.strip():
                raise ValueError("the prompt is empty")
            if self.is_raw or not self.tokenizer.chat_template:
                return self._ids(prompt)
            prompt = [{"role": "user", "content": prompt}]
        messages = [_message(item) for item in prompt]
        while messages and messages[-1]["role"] == "assistant":
            messages.pop()  # the answer that the model is to generate
        if not messages:
            raise ValueError("the chat is empty")
        if not self.tokenizer.chat_template:
            raise ValueError("the tokenizer has no chat template: name one with --chat-template")
        if self.system and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": self.system}, *messages]
        return self._ids(messages)

    def _ids(self, prompt: str | list[Message]) -> list[int]:
        try:
            ids: list[int] = prompt_ids(prompt, self.tokenizer)[0].tolist()
        except TemplateError as error:
            raise ValueError(f"the chat template refuses it: {error}") from error
        return ids


def _message(item: Any) -> Message:
    """Return one turn without the keys that are None: tables fill in those of other rows."""
    if not isinstance(item, Mapping) or not isinstance(item.get("role"), str):
        raise ValueError('a chat is a list of {"role": ..., "content": ...}')
    return {key: value for key, value in item.items() if value is not None}
