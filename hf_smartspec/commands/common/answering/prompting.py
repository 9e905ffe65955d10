"""From what a user gives to the tokens that the model reads."""

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
    Args:
        system (`str`, *optional*): What the model is told before the conversation.
        is_raw (`bool`): Whether text is continued as it is, where the tokenizer knows chats, too.
    """

    tokenizer: PreTrainedTokenizerBase
    system: str | None = None
    is_raw: bool = False

    def token_ids(self, prompt: str | Sequence[Mapping[str, Any]]) -> list[int]:
        """
        The tokens of a text, as a user's turn where the tokenizer knows chats, or those of a chat.

        Raises:
            ValueError: for empty prompts, chats without a template, and what is no chat.
        """
        if isinstance(prompt, str):
            if not prompt.strip():
                raise ValueError("the prompt is empty")
            if self.is_raw or not self.tokenizer.chat_template:
                return self._ids(prompt)
            prompt = [{"role": "user", "content": prompt}]
        messages = [_message(item) for item in prompt]
        while messages and messages[-1]["role"] == "assistant":
            messages.pop()  # it is what the model is to say
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
    """One turn; tables write the keys that other rows have as None."""
    if not isinstance(item, Mapping) or not isinstance(item.get("role"), str):
        raise ValueError('a chat is a list of {"role": ..., "content": ...}')
    return {key: value for key, value in item.items() if value is not None}
