"""Chats as prompts, and answers as messages: by transformers' own templates and parsers."""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase
from transformers.cli.serving.utils import (
    BaseHandler,
    Modality,
    ToolCall,
    build_response_parser,
    get_response_template,
    response_events_to_chunks,
)

from ....log import get_logger
from ..errors import ApiError
from ..request.fields import Message
from ..served import ServedModel

logger = get_logger(__name__)

_TEXT_PARTS = ("text", "input_text", "output_text")


def render(
    served: ServedModel,
    messages: Sequence[Message | dict[str, Any]],
    tools: Sequence[dict[str, Any]] | None,
    template_kwargs: Mapping[str, Any],
) -> list[int]:
    """
    Token ids of a chat whose answer is to begin.

    Raises:
        ApiError: 400, for chats that the model's template cannot render.
    """
    turns = [item.model_dump(exclude_none=True) if isinstance(item, Message) else item for item in messages]
    for message in turns:
        content = message.get("content")
        for part in content if isinstance(content, list) else ():
            if not isinstance(part, dict) or part.get("type") not in _TEXT_PARTS:
                raise ApiError(400, f"messages: {served.name} reads text only", param="messages")
    try:
        turns = BaseHandler.get_processor_inputs_from_messages(turns, Modality.LLM)
        text: Any = served.tokenizer.apply_chat_template(
            turns, add_generation_prompt=True, tools=list(tools) if tools else None, tokenize=False, **template_kwargs
        )
    except Exception as error:  # of many kinds, which templates raise for what they do not know
        raise ApiError(400, f"messages: cannot be rendered: {error}", param="messages") from None
    return served.encode(text, "messages", add_special_tokens=False)  # the template writes its own


def template_kwargs(
    defaults: Mapping[str, Any], kwargs: Mapping[str, Any] | None, reasoning_effort: str | None
) -> dict[str, Any]:
    """
    What the template gets: of the server, and of a client, which comes first; not what runs it: a template of the
    client's own would be a program.

    Args:
        reasoning_effort (`str`, *optional*): By the name that templates know it by.

    Raises:
        ApiError: 400
    """
    own = inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters
    for name in kwargs or {}:
        if name in own or name == "messages":
            raise ApiError(400, f"chat_template_kwargs: {name!r} is not for clients", param="chat_template_kwargs")
    effort = {} if reasoning_effort is None else {"reasoning_effort": reasoning_effort}
    return {**defaults, **(kwargs or {}), **effort}


def has_parser(served: ServedModel) -> bool:
    """Whether transformers knows how the model's messages tell tool calls and reasoning from text."""
    return get_response_template(served.tokenizer, served.model) is not None


class MessageReader:
    """
    Tells text, reasoning and tool calls of an answer apart, as its text comes. Items are `str`, `ReasoningText` and
    `ToolCall` of transformers. What its parser cannot read, such as a call that is no JSON, is text. It makes values of
    arguments that are written as text by the types that `tools` declare (`with_types`).
    """

    def __init__(self, served: ServedModel, prompt: Sequence[int], tools: Sequence[dict[str, Any]] | None):
        self._parser = build_response_parser(served.tokenizer, served.model, list(prompt), tools=tools)
        self._first = [] if self._parser is None else response_events_to_chunks(self._parser.initial_events)
        self._unread = ""  # text since the last item
        self._specials = [] if self._parser is None else served.tokenizer.all_special_tokens

    def feed(self, text: str, finish_reason: str | None) -> list[Any]:
        """
        What has become readable.

        Args:
            finish_reason (`str`, *optional*): Of the answer, with its last text. A call that was cut off ("length") is
                none: parsers of some forms would make one of what there is of its arguments.
        """
        items, self._first = self._first, []
        if self._parser is None:
            return [*items, self._plain(text)] if text else items
        try:
            found = read_events(self._parser.feed(text)) if text else []
        except Exception as error:  # of many kinds: a model may write anything
            logger.info(f"A message could not be read: {type(error).__name__}")
            self._parser = None
            return [*items, self._plain(self._unread + text)]
        self._unread = _behind(self._unread + text, found)
        items = items + found
        if finish_reason is not None:
            try:
                last = read_events(self._parser.finalize()[1])
                is_cut = finish_reason == "length"
                items = items + [item for item in last if not (is_cut and isinstance(item, ToolCall))]
            except Exception as error:  # the answer ended within a tool call, say
                logger.info(f"The end of a message could not be read: {type(error).__name__}")
        return items

    def _plain(self, text: str) -> str:
        """Where there is a parser, texts have special tokens in them."""
        for special in self._specials:
            text = text.replace(special, "")
        return text


def read_events(events: list[dict[str, Any]]) -> list[Any]:
    """Text, reasoning and calls in a parser's events. Raises errors of many kinds for calls that are none."""
    items = response_events_to_chunks(events)
    if not all(isinstance(item.name, str) for item in items if isinstance(item, ToolCall)):
        raise ValueError("a tool without a name")
    return items


def _behind(text: str, items: Sequence[Any]) -> str:
    """What of a text no item has shown yet."""
    if not items:
        return text
    last = items[-1]
    return text.rpartition(last)[2] if isinstance(last, str) and last in text else ""
