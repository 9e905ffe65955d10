"""Arguments of tools that a model writes in tags: what the grammar allows is read as the schema says."""

import json

import pytest

from hf_smartspec.serving.server.chat_template import arguments, tool_calls
from hf_smartspec.serving.server.chat_template.arguments import with_types
from hf_smartspec.serving.server.chat_template.rendering import MessageReader, render
from hf_smartspec.serving.server.chat_template.tool_calls import forced_form
from hf_smartspec.serving.server.errors import ApiError
from hf_smartspec.serving.server.request.fields import ChatFields

from .running import running
from .test_tool_calls import ASKED, FORMS, MESSAGES, PAINTING, with_form

NO = object()  # not allowed
DEFINED = {
    "Count": {"type": "integer", "minimum": 3},
    "Colour": {"enum": ["red", "green"], "title": "Colour"},
    "Tree": {"type": "object", "properties": {"kids": {"type": "array", "items": {"$ref": "#/$defs/Tree"}}},
             "additionalProperties": False},
    "Again": {"$ref": "#/$defs/Again"},
}  # fmt: skip


@pytest.fixture(scope="module")
def served(demo):
    """A model that writes arguments in tags."""
    with running(with_form(demo, *FORMS["xml"])) as server:
        yield server.models["demo"]


def tools_of(value):
    schema = {"type": "object", "properties": {"x": value}, "required": ["x"], "$defs": DEFINED}
    return [{"type": "function", "function": {"name": "f", "parameters": schema}}]


def form_of(served, value):
    tools = tools_of(value)
    fields = ChatFields.model_validate({"messages": MESSAGES, "tools": tools, "tool_choice": "required"})
    return forced_form(served, fields, tools, render(served, MESSAGES, tools, {}))


@pytest.mark.parametrize(
    ("value", "texts"),
    [
        ({"type": "string"}, {"5": "5", "null": "null", "any text": "any text"}),
        ({}, {"5": "5", "any text": "any text"}),
        (True, {"any text": "any text"}),
        ({"type": "integer", "maximum": 7}, {"5": 5, "9": NO, "text": NO}),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, {"5": 5, "null": None, "text": NO, '"5"': NO}),
        ({"type": ["string", "null"]}, {"text": "text", "null": None, "5": "5"}),
        ({"anyOf": [{"type": "string", "maxLength": 9}, {"type": "null"}]}, {"text": "text", "null": None}),
        ({"anyOf": [{"type": "string"}, {"type": "number"}]}, {"text": "text", "0.5": 0.5}),
        ({"enum": [1, 20]}, {"1": 1, "20": 20, "2": NO, "text": NO}),
        ({"enum": ["red", "green"]}, {"red": "red", "blue": NO}),
        ({"enum": ["red", None]}, {"red": "red", "null": None, "None": NO}),
        ({"type": "string", "enum": ["1", 1, ""]}, {"1": "1", "": "", "2": NO}),
        ({"enum": [1, True]}, {"1": 1, "true": True, "false": NO}),
        ({"const": 5}, {"5": 5, "6": NO}),
        ({"$ref": "#/$defs/Count"}, {"5": 5, "2": NO, "text": NO}),
        ({"$ref": "#/$defs/Colour", "description": "which"}, {"green": "green", "blue": NO}),
        ({"allOf": [{"$ref": "#/$defs/Colour"}], "default": "red"}, {"green": "green", "blue": NO}),
        ({"anyOf": [{"$ref": "#/$defs/Tree"}, {"type": "null"}]},
         {'{"kids": [{"kids": []}]}': {"kids": [{"kids": []}]}, "null": None, '{"x": 1}': NO, "text": NO}),
        ({"type": "array", "items": {"$ref": "#/$defs/Count"}}, {"[5, 6]": [5, 6], "[1]": NO}),
        ({"type": "boolean"}, {"true": True, "yes": NO}),
    ],
)  # fmt: skip
def test_what_is_allowed_is_read_as_the_schema_says(served, value, texts):
    make = served._grammars.processor(form_of(served, value))
    for text, expected in texts.items():
        call = f"<tool_call>\n<function=f>\n<parameter=x>\n{text}\n</parameter>\n</function>\n</tool_call>"
        ids = served.tokenizer(call, add_special_tokens=False).input_ids
        matcher = make(0)._matcher
        is_whole = matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()
        assert is_whole == (expected is not NO), text
        if is_whole:
            (read,) = MessageReader(served, [], with_types(tools_of(value))).feed(call, "stop")
            found = json.loads(read.arguments)["x"]
            assert found == expected and type(found) is type(expected), text


@pytest.mark.parametrize(
    "value",
    [
        {"$ref": "#/$defs/Again"},
        {"$ref": "https://elsewhere/schema"},
        {"allOf": [{"type": "integer"}, {"minimum": 3}]},
        {"not": {"type": "string"}},
        {"anyOf": [{"type": "string"}, {"type": "integer", "minimum": 3}]},
        {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "integer"}}]},
        {"type": ["boolean", "integer"]},
        {"enum": ["1", 1]},
        {"type": "integer", "enum": ["red"]},
    ],
)
def test_what_could_be_read_as_something_else_is_refused(served, value):
    with pytest.raises(ApiError, match="the parameter 'x' cannot be forced") as refused:
        form_of(served, value)
    assert refused.value.status == 400 and refused.value.param == "tools"


def test_schemas_that_unfold_without_an_end_are_left_as_they_are():
    chain = {f"d{n}": {"anyOf": [{"$ref": f"#/$defs/d{n + 1}"}] * 2} for n in range(60)}
    schema = {"properties": {"x": {"$ref": "#/$defs/d0"}}, "$defs": chain}
    odd = [{"function": {"parameters": {"properties": {"x": value}}}}
           for value in (5, {"type": 5}, {"anyOf": 5}, {"enum": 5}, {"allOf": [5]}, {"$ref": {}})]  # fmt: skip
    assert len(with_types([{"function": {"parameters": schema}}, *odd, {}, {"function": 5}])) == 9
    assert with_types(None) is None


@pytest.mark.parametrize(
    ("types", "expected"),
    [
        (["integer"] * 70_000, {"type": ["integer"]}),
        (["number", "integer"] * 70_000, {"type": ["number", "integer"]}),
        ([f"type {n}" for n in range(70_000)], {"$ref": "#"}),
    ],
)
def test_types_are_counted_where_nothing_is_unfolded(types, expected):
    (typed,) = with_types(tools_of({"type": types}))
    assert typed["function"]["parameters"]["properties"] == {"x": expected}


@pytest.mark.parametrize("number", [10, 1000])
def test_a_small_schema_takes_no_more_work_than_a_large_one(monkeypatch, number):
    """It refers to itself in every part of a union, however many there are."""
    asked, declared = [], arguments._declared
    monkeypatch.setattr(arguments, "_declared", lambda *args: asked.append(1) or declared(*args))
    schema = {"properties": {"x": {"$ref": "#/$defs/A"}}, "$defs": {"A": {"anyOf": [{"$ref": "#/$defs/A"}] * number}}}
    (tool,) = with_types([{"function": {"parameters": schema}}])
    assert tool["function"]["parameters"]["properties"] == {"x": {"$ref": "#"}}, "of no type"
    assert len(asked) <= arguments._MOST


@pytest.mark.parametrize(
    "large", [{"enum": ["x"] * 2**14}, {f"key{n}": n for n in range(2**14)}, {"type": ["string"] * 2**14}]
)
def test_copies_of_large_parts_are_bounded(monkeypatch, large):
    """Many parameters may refer to one large part."""
    targets, target = [], arguments._target
    monkeypatch.setattr(arguments, "_target", lambda *args: targets.append(1) or target(*args))
    schema = {"properties": {f"x{n}": {"$ref": "#/$defs/A"} for n in range(1000)}, "$defs": {"A": large}}
    (typed,) = with_types([{"function": {"parameters": schema}}])
    found = typed["function"]["parameters"]["properties"].values()
    assert len([value for value in found if value == {"$ref": "#"}]) > 990
    assert len(targets) < 1010, "once for each, and within few"


def test_what_unfolds_without_an_end_cannot_be_forced_and_spares_the_others(served):
    endless = {"anyOf": [{"$ref": "#/$defs/Endless"}] * 10}
    properties = {"x": True, "y": {"$ref": "#/$defs/Endless"}, "z": {"enum": [1, 2]}}
    parameters = {"type": "object", "properties": properties, "$defs": {"Endless": endless}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    (typed,) = with_types(tools)
    assert typed["function"]["parameters"]["properties"]["z"] == {"enum": [1, 2], "type": "integer"}
    fields = ChatFields.model_validate({"messages": MESSAGES, "tools": tools, "tool_choice": "required"})
    with pytest.raises(ApiError, match=r"'y' cannot be forced, .* unfolds to too much"):
        forced_form(served, fields, tools, render(served, MESSAGES, tools_of({}), {}))


def test_many_tools_without_references_all_have_their_types():
    parameters = {f"x{n}": {"enum": [1, 2, 3], "description": "a", "default": 1, "title": "t"} for n in range(20)}
    tools = [{"function": {"name": f"f{n}", "parameters": {"properties": parameters}}} for n in range(500)]
    for tool in with_types(tools):
        assert all(value["type"] == "integer" for value in tool["function"]["parameters"]["properties"].values())


@pytest.mark.parametrize("kind", ["enum", "parameters", "deep"])
def test_grammars_are_refused_before_they_are_written(served, kind):
    """Whatever makes them long."""
    properties = {"x": {"enum": [f"choice {n}" for n in range(2**16)]}}
    if kind == "parameters":
        properties = {f"x{n}": {"type": "string"} for n in range(2**14)}
    if kind == "deep":
        value = {"anyOf": [{"type": "string"}] * 2**17}
        for _ in range(40):
            value = {"anyOf": [value]}
        properties = {"x": value}
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"properties": properties}}}]
    fields = ChatFields.model_validate({"messages": MESSAGES, "tools": tools, "tool_choice": "required"})
    with pytest.raises(ApiError, match=r"more than 262144 characters|unfolds to too much") as refused:
        forced_form(served, fields, tools, render(served, MESSAGES, tools_of({}), {}))
    assert refused.value.status == 400 and refused.value.param == "tools"


def test_definitions_are_not_written_once_for_every_parameter(served, monkeypatch):
    """The grammar of a call is refused before it is written."""
    written, dumps = [], json.dumps
    monkeypatch.setattr(tool_calls.json, "dumps", lambda *args, **kwargs: written.append(1) or dumps(*args, **kwargs))
    large = {"type": "string", "description": "x" * 2**16}
    properties = {f"x{n}": {"type": "array", "items": {"$ref": "#/$defs/A"}} for n in range(1000)}
    parameters = {"type": "object", "properties": properties, "$defs": {"A": large}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    fields = ChatFields.model_validate({"messages": MESSAGES, "tools": tools, "tool_choice": "required"})
    with pytest.raises(ApiError, match="characters") as refused:
        forced_form(served, fields, tools, render(served, MESSAGES, tools_of({}), {}))
    assert refused.value.status == 400 and refused.value.param == "tools" and len(written) < 100


def test_how_a_model_writes_calls_is_found_out_once(demo, monkeypatch):
    asked, find_syntax = [], tool_calls.find_syntax
    monkeypatch.setattr(tool_calls, "find_syntax", lambda *args: asked.append(1) or find_syntax(*args))
    with running(with_form(demo, *FORMS["json"])) as server:
        for _ in range(2):
            result = server.client().chat.completions.create(**ASKED, tool_choice=PAINTING)
            assert result.choices[0].message.tool_calls
    assert len(asked) == 1
