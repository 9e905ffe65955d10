"""A chat session: turns, streamed answers, and settings that may change between them."""

from dataclasses import dataclass, field, replace
from typing import Any

from rich.text import Text
from transformers import PreTrainedTokenizerBase

from ...decoding.statistics import GenerationStatistics
from ...sampling.noise import row_seed
from ...serving.engine import Engine
from ...serving.outputs import EngineOutput
from ..common.answering.arguments import Sampling
from ..common.answering.speaker import Message, Prompter, Speaker, TooLongError, new_seed, shown, summary
from ..common.answering.text import GrowingText
from .screen import ACCEPTED, Screen

_USER, _ASSISTANT = "User:", "Assistant:"


@dataclass
class Conversation:
    """The turns of a chat."""

    tokenizer: PreTrainedTokenizerBase
    system: str | None = None
    messages: list[Message] = field(default_factory=list)  # the turns; before an answer, the last one is the user's

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

    def token_ids(self) -> list[int]:
        """Return the token ids of all turns; raises `ValueError` if the chat template refuses the turns."""
        if self.has_template:
            return Prompter(self.tokenizer, self.system).token_ids(self.messages)
        names = {"user": _USER, "assistant": _ASSISTANT}
        lines = [f"{names[message['role']]} {message['content'].strip()}" for message in self.messages]
        text = "\n".join([*([self.system] if self.system else []), *lines, _ASSISTANT])
        return Prompter(self.tokenizer, is_raw=True).token_ids(text)


class Session:
    """A chat with one model; with `seed`, a conversation can be repeated, without it every answer has a new seed."""

    def __init__(
        self,
        speaker: Speaker,
        conversation: Conversation,
        screen: Screen,
        sampling: Sampling,
        max_new_tokens: int,
        seed: int | None = None,
    ):
        self.speaker, self.conversation, self.screen = speaker, conversation, screen
        self.sampling, self.max_new_tokens, self.seed = sampling, max_new_tokens, seed
        self.last, self.total = GenerationStatistics(), GenerationStatistics()
        self.num_failed = 0
        self._engine: Engine = speaker.new_engine()

    def stop(self) -> None:
        """Stop the engine and the answer that may still be generated."""
        self._engine.stop(drain=False)

    def use_assistant(self, assistant: Any) -> None:
        """Replace the assistant; raises `UsageError` if it cannot draft for the model; the former one is then kept."""
        speaker = replace(self.speaker, assistant=assistant)
        engine = speaker.new_engine()
        self.stop()
        self._engine, self.speaker = engine, speaker

    def answer(self, text: str) -> None:
        """Add the user's turn `text` and print the model's answer; Ctrl-C ends the answer."""
        self.conversation.messages.append({"role": "user", "content": text})
        try:
            output, growing = self._followed(self._ask())
        except (TypeError, ValueError) as error:
            self._fail(f"{error}: /reset" if isinstance(error, TooLongError) else str(error))
            return
        except KeyboardInterrupt:  # before it began, or once more, while it was being stopped
            self.conversation.messages.pop()
            raise
        if output.error and output.finish_reason != "cancelled":
            self._fail(output.error)
            return
        self.conversation.messages.append({"role": "assistant", "content": growing.text})
        self.last = output.statistics
        self.total = self.total + output.statistics
        ends = {"cancelled": "stopped; ", "length": f"cut after {len(output.generated_tokens)} tokens; "}
        self.screen.note(f"{ends.get(output.finish_reason or '', '')}{summary(output.statistics)}\n")

    def _ask(self) -> str:
        """Send the conversation to the engine; return the name of the request."""
        ids, stops = self.conversation.token_ids(), self.conversation.stop_strings
        seed = new_seed() if self.seed is None else row_seed(self.seed, self.conversation.num_answers)
        options = {"streaming": True, "trace": self.screen.is_interactive}  # traced for colours
        return self.speaker.add_request(self._engine, ids, self.sampling, self.max_new_tokens, seed, stops, **options)

    def _followed(self, request_id: str) -> tuple[EngineOutput, GrowingText]:
        """Print an answer as it grows; return its last output and its text."""
        growing = GrowingText(self.speaker.tokenizer, self.conversation.stop_strings)
        try:
            output = self._follow(request_id, growing)
        except KeyboardInterrupt:
            self._engine.cancel_request(request_id)
            if not self.screen.is_interactive:  # no user who could go on
                raise
            output = self._follow(request_id, growing)
        self.screen.write(growing.end())
        self.screen.end_answer(growing.text)
        return output, growing

    def _follow(self, request_id: str, growing: GrowingText) -> EngineOutput:
        output = None
        for output in self._engine.request_id_iter(request_id):
            self.screen.write(growing.feed(output.generated_tokens, output.token_sources))
        assert output is not None, "a request has at least its last output"
        return output

    def _fail(self, reason: str) -> None:
        self.conversation.messages.pop()
        self.num_failed += 1
        self.screen.report(f"error: {reason}")

    def report(self) -> dict[str, Any]:
        """Return the conversation for JSON."""
        system = [{"role": "system", "content": self.conversation.system}] if self.conversation.system else []
        return {
            "model": self.speaker.name,
            "assistant": shown(self.speaker.assistant),
            "messages": [*system, *self.conversation.messages],
            "statistics": self.total.as_dict(),
        }

    def greet(self) -> None:
        """Print the model, the assistant and the meaning of colours."""
        self.screen.note(f"{self.speaker.name}, assistant {shown(self.speaker.assistant)}")
        green = Text("Green", ACCEPTED)
        self.screen.note(green.append(" was drafted and accepted. /help lists commands, Ctrl-D leaves.\n", "default"))
        if not self.conversation.has_template:
            self.screen.report(
                "The model has no chat template: it continues a text of lines that begin with User: and Assistant:."
            )
