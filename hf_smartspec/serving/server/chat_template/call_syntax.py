"""The syntax in which a model writes tool calls: found in its chat template, and checked with its parser."""

import json
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from transformers.cli.serving.utils import ToolCall, build_response_parser

from ..served import ServedModel
from .rendering import read_events

# Placeholders in the example of a call: for the function's name, and for names and values of its arguments.
NAME, _KEYS, _VALUES = "some_function", ("first_key", "second_key"), ("first value", "second value")


class CallSyntax(NamedTuple):
    """
    The syntax of a call, with `NAME` for the function's name.

    Args:
        before, after (`str`): Text before and after the arguments.
        key_end (`str`, *optional*): Text between an argument's name and its value; None if all arguments are one JSON
            object.
        separator (`str`): Text between two arguments.
        empty (`str`): The whole call without arguments.
    """

    before: str
    after: str
    key_end: str | None = None
    separator: str = ""
    empty: str = ""

    def of(self, name: str) -> "CallSyntax":
        """Return the syntax of a call of this function."""
        before, after, empty = (text.replace(NAME, name) for text in (self.before, self.after, self.empty))
        return self._replace(before=before, after=after, empty=empty)


def find_syntax(served: ServedModel, template: dict[str, Any]) -> CallSyntax | None:
    """
    Return the syntax of the model's calls; None if the parser cannot read any example of one.

    Args:
        template (`dict`): The model's response template.
    """
    for arguments_of in (dict, json.dumps):  # templates differ in the arguments that they accept
        if (call := _read_off(served, template, arguments_of)) is not None:
            return call
    return None


def _read_off(served: ServedModel, template: dict[str, Any], arguments_of: Any) -> CallSyntax | None:
    arguments = dict(zip(_KEYS, _VALUES))
    given: list[dict[str, Any]] = [{}, {_KEYS[0]: _VALUES[0]}, arguments]
    examples = [_example(served, template, item, arguments_of) for item in given]
    if not all(_reads_as(served, text, item) for text, item in zip(examples[1:], given[1:])):
        return None
    empty, _, both = (text or "" for text in examples)
    if (found := _json_in(both, arguments)) is not None:
        return CallSyntax(both[: found[0]], both[found[1] :])
    if template["fields"]["tool_calls"].get("content") == "json":  # in another dialect of JSON
        return None
    pieces = re.split("|".join((*_KEYS, *_VALUES)), both)
    if len(pieces) != 5 or pieces[1] != pieces[3]:
        return None
    before, key_end, separator, _, after = pieces
    return CallSyntax(before, after, key_end, separator, empty if _reads_as(served, empty, {}) else "")


def _example(served: ServedModel, template: dict[str, Any], arguments: dict[str, str], arguments_of: Any) -> str | None:
    """Return the text of a call as written by the chat template, or else as described by the response template."""
    field = template["fields"].get("tool_calls", {})
    begin, end = _delimiter(field, "open"), _delimiter(field, "close")
    if begin is None or end is None:
        return None
    function = {"name": NAME, "arguments": arguments_of(arguments)}
    asked: dict[str, Any] = {"role": "user", "content": "x"}
    answer: dict[str, Any] = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": function}],
    }
    try:
        asked_text, text = (
            str(served.tokenizer.apply_chat_template(turns, tokenize=False)) for turns in ([asked], [asked, answer])
        )
    except Exception:  # templates raise errors of many kinds
        asked_text = text = ""
    first = begin.search(text, length_in_common(asked_text, text))
    last = end.search(text, first.end()) if first else None
    if first and last and NAME in text[first.start() : last.end()]:
        return text[first.start() : last.end()].lstrip()
    whole = json.dumps({"name": NAME, "arguments": arguments})
    if isinstance(field.get("open"), str) and isinstance(field.get("close"), str):
        return field["open"] + whole + field["close"]
    return None


def _delimiter(field: Mapping[str, Any], name: str) -> re.Pattern[str] | None:
    """Return the pattern that opens or closes a field; None if there is none."""
    if f"{name}_pattern" in field:
        return re.compile(field[f"{name}_pattern"], re.DOTALL)
    literals = field.get(name)
    literals = [literals] if isinstance(literals, str) else literals
    return re.compile("|".join(map(re.escape, literals))) if literals else None


def _reads_as(served: ServedModel, text: str | None, arguments: dict[str, str]) -> bool:
    """Return whether the parser finds in a text the call of the example only."""
    parser = build_response_parser(served.tokenizer, served.model, [])
    if not text or parser is None:
        return False
    try:
        items = read_events([*parser.feed(text), *parser.finalize()[1]])
    except Exception:  # of many kinds
        return False
    calls = [item for item in items if isinstance(item, ToolCall)]
    return len(calls) == len(items) == 1 and (calls[0].name, json.loads(calls[0].arguments)) == (NAME, arguments)


def _json_in(text: str, value: Any) -> tuple[int, int] | None:
    """Return the start and end of a value's JSON in a text; None if it is not there."""
    for start in (match.start() for match in re.finditer(r"\{", text)):
        try:
            found, end = json.JSONDecoder().raw_decode(text, start)
        except ValueError:
            continue
        if found == value:
            return start, end
    return None


def length_in_common(first: str, second: str) -> int:
    """Return the length of the common beginning of two texts."""
    differing = (place for place, (one, other) in enumerate(zip(first, second)) if one != other)
    return next(differing, min(len(first), len(second)))
