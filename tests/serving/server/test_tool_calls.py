"""Tools that must be called: the answer is a call in the model's own form, with speculation too."""

import copy
import json

import openai
import pytest

from hf_smartspec.serving.server.chat_template.rendering import MessageReader, render
from hf_smartspec.serving.server.chat_template.tool_calls import forced_form
from hf_smartspec.serving.server.request.fields import ChatFields
from hf_smartspec.serving.server.request.grammar import Grammars

from ...covering import IS_EXHAUSTIVE
from .running import running

_CONTENT = {"close_pattern": r"\s*(?:<\|end\|>)", "content": "text"}
_REASONING = {"open": "<think>", "close": "</think>", "content": "text"}
_JSON_CALLS = {
    "open_pattern": r"\s*<tool_call>", "close": "</tool_call>", "repeats": True, "content": "json",
    "transform": {"type": "function", "function": "{content}"},
}  # fmt: skip
_XML_CALLS = {
    "open_pattern": r"\s*<tool_call>\s*<function=(?P<name>[^>\n]+)>", "close_pattern": r"</function>\s*</tool_call>",
    "repeats": True, "content": "xml-inline",
    "content_args": {"tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\s*(?P<value>.*?)\s*</parameter>"},
    "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
}  # fmt: skip
_CHAT = """{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% for call in m.tool_calls or [] %}
CALL{% endfor %}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"""
_JSON_CALL = """<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>"""
_XML_CALL = """<tool_call>
<function={{ call.function.name }}>
{% for key, value in call.function.arguments.items() %}<parameter={{ key }}>
{{ value if value is string else value | tojson }}
</parameter>
{% endfor %}</function>
</tool_call>"""
_DIALECT = "<tool_call>{name: '{{ call.function.name }}', arguments: {{ call.function.arguments }}}</tool_call>"
FORMS = {"json": (_JSON_CALLS, _JSON_CALL), "xml": (_XML_CALLS, _XML_CALL)}

COLOURS = ["red", "green"]
PAINT = {
    "type": "object",
    "properties": {
        "layers": {"type": "integer", "minimum": 1, "maximum": 9},
        "colour": {"type": "string", "enum": COLOURS},
        "shiny": {"type": "boolean"},
    },
    "required": ["layers", "colour"],
}
TOOLS = [
    {"type": "function", "function": {"name": "paint", "parameters": PAINT}},
    {"type": "function", "function": {"name": "look_up"}},
]
NONSENSE = {"type": "function", "function": {"name": "a", "parameters": {"properties": {"x": {"type": "nothing"}}}}}


def with_parameters(**schema):
    return {"type": "function", "function": {"name": "a", "parameters": {"type": "object", **schema}}}


PAINTING = {"type": "function", "function": {"name": "paint"}}
MESSAGES = [{"role": "user", "content": "Paint the door."}]
ASKED = {"model": "demo", "messages": MESSAGES, "tools": TOOLS, "temperature": 0, "max_tokens": 400}


def with_form(demo, calls, written, chat=_CHAT, **fields):
    served = copy.copy(demo)
    served.tokenizer = copy.deepcopy(demo.tokenizer)
    served.tokenizer.chat_template = chat.replace("CALL", written)
    fields |= {"tool_calls": calls, "content": _CONTENT}
    served.tokenizer.response_template = {"defaults": {}, "start_anchor": "<|assistant|>", "fields": fields}
    return served


@pytest.fixture(scope="module", params=FORMS)
def painter(demo, request):
    """A server whose model writes calls as JSON, or as tags."""
    with running(with_form(demo, *FORMS[request.param])) as started:
        yield started


def ask(server, stream=False, **fields):
    """The calls of an answer, its text, and why it ended."""
    result = server.client().chat.completions.create(**ASKED | fields, stream=stream)
    if not stream:
        message = result.choices[0].message
        return message.tool_calls or [], message.content, result.choices[0].finish_reason
    choices = [chunk.choices[0] for chunk in result]
    calls = [call for choice in choices for call in choice.delta.tool_calls or ()]
    return calls, "".join(choice.delta.content or "" for choice in choices), choices[-1].finish_reason


def check_paints(call):
    arguments = json.loads(call.function.arguments)
    assert call.function.name == "paint" and set(arguments) <= set(PAINT["properties"])
    assert 1 <= arguments["layers"] <= 9 and arguments["colour"] in COLOURS
    assert isinstance(arguments.get("shiny", True), bool)


@pytest.mark.parametrize("stream", [False, True])
def test_a_named_function_is_called_once(painter, stream):
    calls, text, reason = ask(painter, stream, tool_choice=PAINTING)
    assert len(calls) == 1 and text == "" and reason == "tool_calls"
    check_paints(calls[0])
    calls, _, _ = ask(painter, stream, tool_choice={"type": "function", "function": {"name": "look_up"}})
    assert [(call.function.name, json.loads(call.function.arguments)) for call in calls] == [("look_up", {})]


@pytest.mark.parametrize("stream", [False, True])
def test_what_is_required_is_called(painter, stream):
    first = ask(painter, stream, tool_choice="required", parallel_tool_calls=False)
    assert len(first[0]) == 1 and first[1:] == ("", "tool_calls")
    plain = ask(
        painter,
        stream,
        tool_choice="required",
        parallel_tool_calls=False,
        extra_body={"speculation": {"assistant": "none"}},
    )
    assert [call.function for call in plain[0]] == [call.function for call in first[0]], "whatever drafts"
    for seed in range(3 if IS_EXHAUSTIVE else 1):
        sampled = {"temperature": 1, "seed": seed, "tools": TOOLS[:1]}
        calls, text, reason = ask(painter, stream, tool_choice="required", **sampled)
        assert calls and text == "" and reason in ("tool_calls", "length")
        for call in calls:
            check_paints(call)


def test_without_a_choice_the_model_decides(painter):
    assert ask(painter, max_tokens=4) == ask(painter, max_tokens=4, tool_choice="auto")
    assert ask(painter, max_tokens=4, tool_choice="none")[0] == []


@pytest.mark.parametrize("stream", [False, True])
def test_responses_call_tools_too(painter, stream):
    tools = [{"type": "function"} | tool["function"] for tool in TOOLS]
    asked = {"model": "demo", "input": "Paint the door.", "tools": tools, "temperature": 0, "stream": stream}
    for choice in ("required", {"type": "function", "name": "paint"}):
        told = painter.client().responses.create(**asked, tool_choice=choice, parallel_tool_calls=False)
        output = (list(told)[-1].response if stream else told).output
        calls = [item for item in output if item.type == "function_call"]
        assert len(calls) == 1 and calls[0].name in ("paint", "look_up"), output
        assert choice == "required" or json.loads(calls[0].arguments)["colour"] in COLOURS


def test_a_prompt_that_does_not_begin_answers_as_the_parser_expects_is_no_part_of_them(demo):
    """As of fine-tuned models with a chat template of their own, whose parser is known by their type."""
    other = with_form(demo, *FORMS["json"])
    other.tokenizer.response_template |= {"start_anchor": "<|im_start|>assistant\n"}
    found = MessageReader(other, other.chat_ids("Paint the door."), None).feed("Done.", "stop")
    assert found == ["Done."]


@pytest.mark.parametrize("has_begun", [False, True])
def test_reasoning_may_come_first_and_must_end_where_the_prompt_begins_it(demo, has_begun):
    chat = _CHAT.replace("<|assistant|>{% endif", "<|assistant|><think>{% endif") if has_begun else _CHAT
    thinking = with_form(demo, *FORMS["json"], chat=chat, reasoning_content=_REASONING)
    with running(thinking) as server:
        asked = ASKED | {"max_tokens": 4, "tool_choice": PAINTING}
        message = server.client().chat.completions.create(**asked).choices[0].message
        assert not has_begun or (message.reasoning_content and message.content == "")
        served = server.models["demo"]
        prompt = render(served, MESSAGES, TOOLS, {})
        form = forced_form(served, ChatFields.model_validate(ASKED | {"tool_choice": PAINTING}), TOOLS, prompt)
    call = '<tool_call>\n{"name": "paint", "arguments": {"layers": 1, "colour": "red"}}\n</tool_call>'
    thoughts = "first {this}</think>\n\n"
    texts = {call: not has_begun, thoughts + call: has_begun, "<think>" + thoughts + call: True, "hm": False}
    for text, is_whole in texts.items():
        matcher = Grammars(demo.tokenizer, demo.model.config.vocab_size, [3]).processor(form)(0)._matcher
        ids = demo.tokenizer(text, add_special_tokens=False).input_ids
        assert (matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()) == is_whole, text


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"tool_choice": {"type": "function", "function": {"name": "sing"}}}, "there is no 'sing' in tools"),
        ({"tool_choice": "required", "tools": None}, "there is no tools to choose from"),
        ({"tool_choice": "any"}, "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
        ({"tool_choice": "required", "tools": [{"type": "function", "function": {"name": "a b"}}]}, "must have a name"),
        ({"tool_choice": "required", "tools": [NONSENSE]}, "tools: "),
        ({"tool_choice": "required", "tools": [with_parameters(properties=None)]}, "must be a JSON schema"),
        ({"tool_choice": "required", "tools": [with_parameters(required=True)]}, "must be a JSON schema"),
        ({"tool_choice": "required", "response_format": {"type": "json_object"}}, "another form as well"),
    ],
)  # fmt: skip
def test_what_cannot_be_forced_is_told(painter, fields, message):
    with pytest.raises(openai.BadRequestError, match=message):
        painter.client().chat.completions.create(**{**ASKED, **fields})


def test_models_whose_calls_are_not_known_refuse(server, demo):
    known = "it is not known how demo writes a call"
    with pytest.raises(openai.BadRequestError, match=known) as told:
        server.client().chat.completions.create(**ASKED, tool_choice="required")
    assert told.value.param == "tool_choice"
    dialect = with_form(demo, _JSON_CALLS | {"content_args": {"unquoted_keys": True}}, _DIALECT)
    with running(dialect) as other, pytest.raises(openai.BadRequestError, match=known):
        other.client().chat.completions.create(**ASKED, tool_choice=PAINTING)
