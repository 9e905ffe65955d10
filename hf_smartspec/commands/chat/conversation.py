"""The turns of a chat, and their token ids."""

from dataclasses import dataclass, field

from transformers import PreTrainedTokenizerBase

from ..common.answering.prompting import Message, Prompter

_USER, _ASSISTANT = "User:", "Assistant:"


@dataclass
class Conversation:
    """
    The turns of a chat.

    Args:
        system (`str`, *optional*): System prompt.
        messages (list of messages): The turns; before an answer, the last one is the user's.
    """

    tokenizer: PreTrainedTokenizerBase
    system: str | None = None
    messages: list[Message] = field(default_factory=list)

    @property
    def has_template(self) -> bool:
        return bool(self.tokenizer.chat_template)

    @property
    def num_answers(self) -> int:
        return sum(message["role"] == "assistant" for message in self.messages)

    @property
    def stop_strings(self) -> list[str]:
        """Strings that end an answer; without a template, the model would write the user's next turn too."""
        return [] if self.has_template else [f"\n{_USER}"]

    def say(self, text: str) -> None:
        self.messages.append({"role": "user", "content": text})

    def answer(self, text: str) -> None:
        self.messages.append({"role": "assistant", "content": text})

    def take_back(self) -> None:
        """Remove the user's last turn, which was not answered."""
        self.messages.pop()

    def token_ids(self) -> list[int]:
        """
        Return the token ids of all turns.

        Raises:
            ValueError: if the chat template refuses the turns.
        """
        if self.has_template:
            return Prompter(self.tokenizer, self.system).token_ids(self.messages)
        return Prompter(self.tokenizer, is_raw=True).token_ids(self._plain())

    def _plain(self) -> str:
        names = {"user": _USER, "assistant": _ASSISTANT}
        lines = [self.system] if self.system else []
        lines += [f"{names[message['role']]} {message['content'].strip()}" for message in self.messages]
        return "\n".join([*lines, _ASSISTANT])
