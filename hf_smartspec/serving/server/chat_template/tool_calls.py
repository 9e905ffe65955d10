"""Forced tool calls: a grammar for calls in the model's own syntax."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from transformers import PreTrainedTokenizerBase
from transformers.cli.serving.utils import get_response_template

from ..errors import ApiError
from ..request.fields import NamedTool, ToolFields
from ..request.grammar import LAYOUT, MOST_CHARS
from ..served import ServedModel
from .arguments import accepted_text, with_types
from .call_syntax import CallSyntax, find_syntax, length_in_common
from .rendering import parser_of

_FUNCTION_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_TEXT = r"/(.|\n)*/"
_REASONING = ("reasoning_content", "reasoning", "thinking")  # fields of response templates


def forced_form(
    served: ServedModel, fields: ToolFields, tools: Sequence[dict[str, Any]] | None, prompt: Sequence[int]
) -> str | None:
    """
    Return the form, as in `form_of`, of an answer that must call tools; None if it need not.

    Args:
        fields (`ToolFields`): The request, with `tool_choice`.
        tools (sequence of `dict`, *optional*): Tools in the format of chats.
        prompt (sequence of `int`): Token ids of the prompt, in which reasoning may have begun.

    Raises:
        ApiError: 400, for missing tools, and for a model whose syntax of calls is unknown.
    """
    choice = fields.tool_choice
    if choice in (None, "auto", "none"):
        return None
    functions = [_function_of(tool) for tool in tools or ()]
    if isinstance(choice, NamedTool):
        functions = [function for function in functions if function["name"] == choice.called]
    if not functions:
        missing = repr(choice.called) if isinstance(choice, NamedTool) else "tools to choose from"
        raise ApiError(400, f"tool_choice: there is no {missing} in tools", param="tool_choice")
    template = get_response_template(served.tokenizer, served.model)
    call = None if template is None else _cached_syntax(served, template)
    if template is None or call is None:
        raise ApiError(
            400,
            f"tool_choice: no tool can be forced, since it is not known how {served.name} writes a call (its tokenizer "
            "needs a `response_template` with `tool_calls`): choose 'auto'",
            param="tool_choice",
        )
    if call.key_end is not None:
        functions = [tool["function"] for tool in with_types([{"function": function} for function in functions]) or ()]
    writer = _Writer(served.tokenizer)
    rules = [writer.call_rules(f"call_{number}", call, function) for number, function in enumerate(functions)]
    repeats = fields.parallel_tool_calls is not False and not isinstance(choice, NamedTool)
    repeats = repeats and bool(template["fields"]["tool_calls"].get("repeats"))
    reasoning = writer.reasoning_rules(template, _is_reasoning(served, prompt))
    start = ("reasoning " if reasoning else "") + "call" + (r" (/\n?/ call)*" if repeats else "")
    any_call = " | ".join(f"call_{number}" for number in range(len(functions)))
    return json.dumps(["tools", "\n".join([f"start: {start}", reasoning, f"call: {any_call}", *rules])])


_SYNTAXES: WeakKeyDictionary[ServedModel, tuple[dict[str, Any], CallSyntax | None]] = WeakKeyDictionary()


def _cached_syntax(served: ServedModel, template: dict[str, Any]) -> CallSyntax | None:
    """Return the cached result of `find_syntax`, which is slow, for the model's present template."""
    known = _SYNTAXES.get(served)
    if known is None or known[0] is not template:
        known = _SYNTAXES[served] = template, find_syntax(served, template)
    return known[1]


def _function_of(tool: Mapping[str, Any]) -> dict[str, Any]:
    function = tool.get("function")
    if not isinstance(function, dict) or not _FUNCTION_NAME.fullmatch(str(function.get("name"))):
        raise ApiError(400, "tools: a function must have a name of letters, digits, '_', '-' and '.'", param="tools")
    schema = function.get("parameters") or {}
    is_schema = isinstance(schema, dict) and isinstance(schema.get("properties", {}), dict)
    if not is_schema or not isinstance(schema.get("required", []), list):
        raise ApiError(400, f"tools: parameters of {function['name']!r} must be a JSON schema", param="tools")
    return function


def _is_reasoning(served: ServedModel, prompt: Sequence[int]) -> bool:
    """Return whether the prompt ends within reasoning."""
    parser = parser_of(served, prompt)
    assert parser is not None, "there is a template"
    events = [event["type"] for event in parser.initial_events if event.get("field") in _REASONING]
    return events.count("region_open") > events.count("region_close")


# As a grammar


class _Writer:
    """Writer of grammar rules in llguidance's dialect of Lark, which names special tokens by their ids."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self._special = {item.content: ident for ident, item in tokenizer.added_tokens_decoder.items() if item.special}
        specials = sorted(self._special, key=len, reverse=True)
        self._specials = re.compile(f"({'|'.join(map(re.escape, specials)) or r'(?!)'})")
        self._num_chars = 0  # of the rules that were written one by one

    def literal(self, text: str) -> str:
        parts = [part for part in self._specials.split(text) if part]
        return " ".join(f"<[{self._special[part]}]>" if part in self._special else _quoted(part) for part in parts)

    def text_until(self, name: str, end: str) -> str:
        """Return a rule for any text up to and including the first `end`."""
        if any(special in end for special in self._special):  # texts contain no special tokens
            return f"{name}: {_TEXT} {self.literal(end)}"
        return f"{name}[suffix={_quoted(end)}]: {_TEXT}"

    def reasoning_rules(self, template: dict[str, Any], has_begun: bool) -> str:
        """Return rules for reasoning before a call, optional unless it has begun; "" for models that do not reason."""
        field: dict[str, Any] = next((item for name, item in template["fields"].items() if name in _REASONING), {})
        begin, end = field.get("open"), field.get("close")
        if not isinstance(begin, str) or not isinstance(end, str):
            return ""
        thoughts = r"thoughts /\s{0,2}/" if has_begun else rf"({self.literal(begin)} thoughts /\s{{0,2}}/)?"
        return f"{self.text_until('thoughts', end)}\nreasoning: {thoughts}\n"

    def call_rules(self, name: str, call: CallSyntax, function: dict[str, Any]) -> str:
        """Return rules for a call of this function; the first one is called `name`."""
        call = call.of(function["name"])
        schema = {"type": "object", "properties": {}} | (function.get("parameters") or {})
        if call.key_end is None:
            schema = {"additionalProperties": False} | schema | {"x-guidance": LAYOUT}
            whole = f"{name}: {self.literal(call.before)} {name}_all {self.literal(call.after)}"
            return f"{whole}\n{name}_all: %json {json.dumps(schema)}"
        return self._rules_by_argument(name, call, call.key_end, schema)

    def _rules_by_argument(self, name: str, call: CallSyntax, key_end: str, schema: dict[str, Any]) -> str:
        """
        Return rules for arguments in the schema's order. `NAME_first_N` stands for the arguments from the Nth on before
        any has been written, `NAME_rest_N` for the same after one has.
        """
        arguments = schema["properties"]
        required = {item for item in schema.get("required") or () if isinstance(item, str)}
        end = _common_end(call)  # of every value
        separator, after = self.literal(call.separator[len(end) :]), self.literal(call.after[len(end) :])
        ways = [f"{self.literal(call.before)} {name}_first_0 {after}"] if arguments else []
        if call.empty and not any(key in required for key in arguments):
            ways.append(self.literal(call.empty))
        if not ways:
            raise ApiError(400, "tools: a function without parameters cannot be forced here", param="tools")
        rules = [f"{name}: {' | '.join(ways)}"]
        for number, (key, value) in enumerate(arguments.items()):
            this, following, is_last = f"{name}_argument_{number}", number + 1, number + 1 == len(arguments)
            rest = "" if is_last else f" {name}_rest_{following}"
            can_skip = key not in required and not is_last
            rules.append(f"{name}_first_{number}: {this}{rest}" + (f" | {name}_first_{following}" if can_skip else ""))
            if number:
                lacking = ' | ""' if is_last else f" | {name}_rest_{following}"
                lacking = lacking if key not in required else ""
                rules.append(f"{name}_rest_{number}: {separator} {this}{rest}{lacking}")
            rules.append(f"{this}: {self.literal(key + key_end)} {this}_value")
            rules.append(self._value_rule(f"{this}_value", key, value, schema, end))
            self._count(sum(map(len, rules[-4:])))
        return "\n".join(rules)

    def _value_rule(self, name: str, key: str, value: Any, schema: dict[str, Any], end: str) -> str:
        """Return a rule for a value and its end: strings are written unquoted, other values as JSON."""
        form = accepted_text(key, value)
        if isinstance(form, list):
            self._count(sum(map(len, form)))
            texts = [self.literal(text) or _quoted("") for text in form]
            return f"{name}: ({' | '.join(texts)}) {self.literal(end)}"
        if form == "text":
            return self.text_until(name, end)
        shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
        return f"{name}: %json {json.dumps(value | shared | {'x-guidance': LAYOUT})} {self.literal(end)}"

    def _count(self, num_chars: int) -> None:
        """Refuse rules that are too long together, before the next one is written: each may contain all `$defs`."""
        self._num_chars += num_chars
        if self._num_chars > MOST_CHARS:
            raise ApiError(400, f"tools: their schemas make a grammar of more than {MOST_CHARS} characters", "tools")


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _common_end(call: CallSyntax) -> str:
    """Return the text after every value, up to a tag boundary."""
    common = call.separator[: length_in_common(call.separator, call.after)]
    border = re.match(r".*[>\s]", common, re.DOTALL)
    return common if border is None else border[0]
