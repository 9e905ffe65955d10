"""A chat: turns, answers that grow, and what can be changed between them."""

from dataclasses import replace
from typing import Any

from rich.text import Text

from ...decoding.statistics import GenerationStatistics
from ...sampling.noise import row_seed
from ...serving.engine import Engine
from ...serving.outputs import EngineOutput
from ..common.answering.arguments import Sampling
from ..common.answering.speaker import Speaker, new_seed, shown
from ..common.answering.statistics import summary
from ..common.answering.text import GrowingText
from .conversation import Conversation
from .screen import ACCEPTED, Screen


class Session:
    """
    Args:
        max_new_tokens (`int`): Of an answer.
        seed (`int`, *optional*): Gives the same conversation again; otherwise every answer has a new one.
    """

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
        """Ends what still runs."""
        self._engine.stop(drain=False)

    def use_assistant(self, assistant: Any) -> None:
        """
        Raises:
            UsageError: if it cannot draft for the model; the former one stays.
        """
        speaker = replace(self.speaker, assistant=assistant)
        engine = speaker.new_engine()
        self.stop()
        self._engine, self.speaker = engine, speaker

    def answer(self, text: str) -> None:
        """Says `text` and shows what the model answers; Ctrl-C ends the answer."""
        self.conversation.say(text)
        try:
            try:
                request_id = self._ask()
            except (TypeError, ValueError) as error:
                self._fail(str(error))
                return
            output, growing = self._followed(request_id)
        except KeyboardInterrupt:  # before it began, or once more, while it was being stopped
            self.conversation.take_back()
            raise
        if output.error and output.finish_reason != "cancelled":
            self._fail(output.error)
            return
        self.conversation.answer(growing.text)
        self.last = output.statistics
        self.total = self.total + output.statistics
        self._say_how_it_ended(output)

    def _ask(self) -> str:
        """The name of the request."""
        ids = self.conversation.token_ids()
        room = self.speaker.room(len(ids), self.max_new_tokens)
        if room < 1:
            limit = self.speaker.num_positions
            raise ValueError(f"the conversation has {len(ids)} tokens and the model reads {limit}: /reset")
        arguments = self.sampling.arguments()
        if self.conversation.stop_strings:
            arguments["stop_strings"] = self.conversation.stop_strings
        seed = new_seed() if self.seed is None else row_seed(self.seed, self.conversation.num_answers)
        arguments["trace"] = self.screen.is_interactive  # for colours
        return self._engine.add_request(ids, max_new_tokens=room, streaming=True, seed=seed, **arguments)

    def _followed(self, request_id: str) -> tuple[EngineOutput, GrowingText]:
        """The last output of a request, and its text, which has been shown."""
        growing = GrowingText(self.speaker.tokenizer, self.conversation.stop_strings)
        try:
            output = self._follow(request_id, growing)
        except KeyboardInterrupt:
            self._engine.cancel_request(request_id)
            if not self.screen.is_interactive:  # nobody sits there to go on
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

    def _say_how_it_ended(self, output: EngineOutput) -> None:
        ends = {"cancelled": "stopped; ", "length": f"cut after {len(output.generated_tokens)} tokens; "}
        self.screen.note(f"{ends.get(output.finish_reason or '', '')}{summary(output.statistics)}\n")

    def _fail(self, reason: str) -> None:
        self.conversation.take_back()
        self.num_failed += 1
        self.screen.tell(f"error: {reason}")

    def report(self) -> dict[str, Any]:
        """The conversation as JSON knows it."""
        system = [{"role": "system", "content": self.conversation.system}] if self.conversation.system else []
        return {
            "model": self.speaker.name,
            "assistant": shown(self.speaker.assistant),
            "messages": [*system, *self.conversation.messages],
            "statistics": self.total.as_dict(),
        }

    def greet(self) -> None:
        """What is there, once."""
        self.screen.note(f"{self.speaker.name}, assistant {shown(self.speaker.assistant)}")
        line = Text("Green", ACCEPTED).append(
            " was drafted and accepted. /help tells more, Ctrl-D leaves.\n", "default"
        )
        self.screen.note(line)
        if not self.conversation.has_template:
            self.screen.tell(
                "The model has no chat template: it continues a text of lines that begin with User: and Assistant:."
            )
