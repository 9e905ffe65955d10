"""Render chats as prompts and parse answers as messages, with transformers' own templates and parsers."""

import inspect
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

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

if TYPE_CHECKING:
    from transformers.utils.chat_parsing import ResponseParser

logger = get_logger(__name__)

_TEXT_PARTS = ("text", "input_text", "output_text")


def render(
    served: ServedModel,
    messages: Sequence[Message | dict[str, Any]],
    tools: Sequence[dict[str, Any]] | None,
    template_kwargs: Mapping[str, Any],
) -> list[int]:
    """
    Return the token ids of a chat, up to the beginning of the answer.

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
    except Exception as error:  # templates raise errors of many kinds
        raise ApiError(400, f"messages: cannot be rendered: {error}", param="messages") from None
    return served.encode(text, "messages", add_special_tokens=False)  # the template adds its own


def template_kwargs(
    defaults: Mapping[str, Any], kwargs: Mapping[str, Any] | None, reasoning_effort: str | None
) -> dict[str, Any]:
    """
    Return the arguments of the chat template: the server's defaults, overridden by the client's. A client may not set
    parameters of `apply_chat_template`, such as the template itself, which is a program.

    Args:
        reasoning_effort (`str`, *optional*): The template's argument of this name.

    Raises:
        ApiError: 400, for such a parameter.
    """
    own = inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters
    for name in kwargs or {}:
        if name in own or name == "messages":
            raise ApiError(400, f"chat_template_kwargs: {name!r} is not for clients", param="chat_template_kwargs")
    effort = {} if reasoning_effort is None else {"reasoning_effort": reasoning_effort}
    return {**defaults, **(kwargs or {}), **effort}


def has_parser(served: ServedModel) -> bool:
    """Return whether transformers has a parser for tool calls and reasoning in the model's messages."""
    return get_response_template(served.tokenizer, served.model) is not None


def parser_of(
    served: ServedModel, prompt: Sequence[int], tools: Sequence[dict[str, Any]] | None = None
) -> "ResponseParser | None":
    """
    Return transformers' parser for the answer to a prompt; None where it has none. A parser that does not find in the
    prompt how answers begin, as after the chat template of a fine-tuned Qwen, would take it for text of the answer: it
    gets no prompt.
    """
    anchor = (get_response_template(served.tokenizer, served.model) or {}).get("start_anchor")
    if isinstance(anchor, str) and anchor not in served.tokenizer.decode(list(prompt)):
        prompt = ()
    return build_response_parser(served.tokenizer, served.model, list(prompt), tools=tools)


class MessageReader:
    """
    Reader that splits an answer into text, reasoning and tool calls, as its text comes. Items are `str`, and
    `ReasoningText` and `ToolCall` of transformers. Parts that its parser cannot read, such as a call with invalid JSON,
    are text.

    Args:
        served (`ServedModel`): The model that answers.
        prompt (sequence of `int`): Token ids of the prompt.
        tools (sequence of `dict`, *optional*): Tools with types (`with_types`), by which the parser converts arguments
            that are written as text.
    """

    def __init__(self, served: ServedModel, prompt: Sequence[int], tools: Sequence[dict[str, Any]] | None):
        self._parser = parser_of(served, prompt, tools)
        self._first = [] if self._parser is None else response_events_to_chunks(self._parser.initial_events)
        self._unread = ""  # text since the last item
        template = get_response_template(served.tokenizer, served.model) or {}
        fields = template.get("fields", {})
        self._call_end = fields.get("tool_calls", {}).get("close")
        both = [field.get(name) for field in fields.values() for name in ("open", "close")]
        self._delimiters = [item for item in both if isinstance(item, str) and item]
        self._specials = [] if self._parser is None else served.tokenizer.all_special_tokens

    def feed(self, text: str, finish_reason: str | None) -> list[Any]:
        """
        Return the items that have become complete.

        Args:
            finish_reason (`str`, *optional*): The answer's, with its last text. A call that was cut off ("length") is
                left out: some parsers would return it with incomplete arguments.
        """
        items, self._first = self._first, []
        if self._parser is None:
            return [*items, self._plain(text)] if text else items
        try:
            found = read_events(self._parser.feed(text)) if text else []
        except Exception as error:  # of many kinds, since a model may write anything
            logger.info(f"A message could not be read: {type(error).__name__}")
            self._parser = None
            return [*items, self._plain(self._unread + text)]
        self._unread = _after_last(self._unread + text, found, self._call_end, self._delimiters)
        items = items + found
        if finish_reason is not None:
            try:
                last = read_events(self._parser.finalize()[1])
                is_cut = finish_reason == "length"
                items = items + [item for item in last if not (is_cut and isinstance(item, ToolCall))]
            except Exception as error:  # the answer ended within a tool call, for example
                logger.info(f"The end of a message could not be read: {type(error).__name__}")
        return items

    def _plain(self, text: str) -> str:
        """Return the text without special tokens, which texts for a parser contain."""
        for special in self._specials:
            text = text.replace(special, "")
        return text


def read_events(events: list[dict[str, Any]]) -> list[Any]:
    """Return text, reasoning and calls of a parser's events. Errors of many kinds are raised for invalid calls."""
    items = response_events_to_chunks(events)
    if not all(isinstance(item.name, str) for item in items if isinstance(item, ToolCall)):
        raise ValueError("a tool without a name")
    return items


def _after_last(text: str, items: Sequence[Any], call_end: Any, delimiters: Sequence[str]) -> str:
    """
    Return the part of a text after the last of the items that were read in it, one after the other. Of one after
    something whose end is not known, such as calls without a known `call_end`, the last place in the text counts.
    Delimiters hold no items, if those are found elsewhere.
    """
    said = text
    for delimiter in delimiters:
        said = said.replace(delimiter, "\0" * len(delimiter))
    place: int | None = 0
    for item in items:
        end, found = item if isinstance(item, str) else call_end, -1
        for within in (said, text) if isinstance(item, str) else (text,):
            if isinstance(end, str) and found < 0:
                found = within.rfind(end) if place is None else within.find(end, place)
        place = None if found < 0 else found + len(end)
    return "" if place is None else text[place:]
