"""Answers of a given form, with speculation; tool calls."""

import copy
import json
from itertools import combinations

import pytest
from llguidance import LLParserLimits

from hf_smartspec.serving.server.chat_template.rendering import MessageReader
from hf_smartspec.serving.server.errors import ApiError
from hf_smartspec.serving.server.request import grammar
from hf_smartspec.serving.server.request.grammar import Grammars, form_of

from ...covering import exhaustive
from .running import running

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "size": {"type": "integer", "maximum": 99, "minimum": 0},
    },
    "required": ["name", "size"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA}}
MESSAGES = [{"role": "user", "content": "Name a thing."}]


def check_thing(text: str) -> None:
    thing = json.loads(text)
    assert thing.keys() == {"name", "size"} and isinstance(thing["size"], int)


@pytest.mark.parametrize("sampling", [{"temperature": 1.0, "seed": 5}, *exhaustive([{}])])
def test_a_schema_is_kept_and_drafts_change_nothing(server, demo, sampling):
    asked = {"model": "demo", "messages": MESSAGES, "response_format": FORMAT, "max_tokens": 80, **sampling}
    client = server.client()
    plain = client.chat.completions.create(**asked, extra_body={"speculation": {"assistant": "none"}})
    for _ in range(2):
        result = client.chat.completions.create(**asked)
        assert result.choices[0].message.content == plain.choices[0].message.content
    assert result.model_extra["metrics"]["speculative_decoding"]["num_accepted_draft_tokens"] > 0
    check_thing(result.choices[0].message.content)
    assert result.choices[0].finish_reason == "stop"


def test_a_form_is_what_plain_generate_makes_with_the_same_processor(server, demo):
    ids = demo.chat_ids(MESSAGES[0]["content"])
    grammars = Grammars(demo.tokenizer, demo.model.config.vocab_size, [3])
    processor = grammars.processor(form_of(FORMAT))(len(ids))
    expected = demo.text(demo.alone(ids, max_new_tokens=80, logits_processor=[processor]))
    asked = {"model": "demo", "messages": MESSAGES, "response_format": FORMAT, "max_tokens": 80}
    assert server.client().chat.completions.create(**asked).choices[0].message.content == expected


def test_other_forms(server):
    client = server.client()

    def ask(max_tokens=60, **body):
        asked = client.completions.create(model="demo", prompt="x", max_tokens=max_tokens, extra_body=body)
        return asked.choices[0].text

    assert ask(structured_outputs={"choice": ["yes", "no"]}) in ("yes", "no")
    assert ask(structured_outputs={"regex": "[0-9]{3}"}).isdigit()
    assert ask(structured_outputs={"grammar": 'start: "a" "b"'}) == "ab"
    check_thing(ask(80, structured_outputs={"json": SCHEMA}))
    assert ask(4, response_format={"type": "json_object"}).startswith("{")
    answer = server.client().responses.create(
        model="demo",
        input="x",
        max_output_tokens=80,
        text={"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}},
    )
    check_thing(answer.output_text)


def test_a_form_that_is_too_long_is_refused_before_it_is_read(demo):
    grammars = Grammars(demo.tokenizer, demo.model.config.vocab_size, [3])
    with pytest.raises(ApiError, match="at most 262144 are accepted"):
        grammars.processor(form_of(None, {"regex": "a?" * 2**17}))


@pytest.mark.parametrize(
    "form",
    [
        {"regex": "(((a{100}){100}){100}){100}"},
        {"regex": "x[0-9]{3}(((a{100}){100}){100}){100}"},  # with its first tokens, nothing is wrong
        {"grammar": 'start: L13\nL0: "a"?\n' + "\n".join(f"L{n + 1}: L{n} L{n}" for n in range(13))},
        *exhaustive([{"regex": "a{1000000}"}]),
    ],
)
def test_small_forms_that_unfold_to_millions_of_parts_are_refused(server, form):
    told = server.post("/v1/completions", {"prompt": "a", "max_tokens": 40, "structured_outputs": form})
    assert told.status_code == 400, told.text
    assert "<state>" not in told.text and "Parser" not in told.text, "nothing of the library's state"
    stream = {"prompt": "a", "max_tokens": 40, "structured_outputs": form, "stream": True}
    assert '"code": 500' not in server.post("/v1/completions", stream).text


def test_a_forms_first_mask_is_computed_within_limits_before_the_engine_runs(demo, monkeypatch):
    given = []

    class Failing:
        """A matcher that fails at its first mask."""

        grammar_from_regex = staticmethod(grammar.LLMatcher.grammar_from_regex)
        error = ""

        def __init__(self, *_, limits=None, **__):
            given.append(limits)

        def is_error(self):
            return bool(self.error)

        def get_error(self):
            return self.error

        def deep_copy(self):
            return Failing()

        def compute_logit_bias(self):
            self.error = "too much work\n<state>\ninternals"

    monkeypatch.setattr(grammar, "LLMatcher", Failing)
    grammars = Grammars(demo.tokenizer, demo.model.config.vocab_size, [3])
    with pytest.raises(ApiError, match=r"^response_format: too much work$") as refused:
        grammars.processor(form_of(None, {"regex": "a"}))
    assert refused.value.status == 400
    usual = LLParserLimits()
    assert given[0].step_lexer_fuel < usual.step_lexer_fuel and given[0].max_lexer_states < usual.max_lexer_states
    assert given[0].initial_lexer_fuel < usual.initial_lexer_fuel / 20


def test_forms_of_thousands_of_choices_are_small_enough(demo):
    grammars = Grammars(demo.tokenizer, demo.model.config.vocab_size, [3])
    for form in (
        {"choice": [f"choice number {n}" for n in range(5000)]},
        {"json": {"enum": [f"choice number {n}" for n in range(5000)]}},
        {"regex": r"[\p{L}\p{N} ]{1,500}"},
        {"json": {"type": "object", "properties": {"text": {"type": "string", "maxLength": 20_000}}}},
    ):
        grammars.processor(form_of(None, form))


def test_no_form_is_ready_because_another_tenant_has_used_it(demo, monkeypatch):
    """Neither its lexer, which grows with every text, nor the time that it takes."""
    made, limits = [], grammar._limits  # of every compilation
    monkeypatch.setattr(grammar, "_limits", lambda form: made.append(form) or limits(form))
    grammars = Grammars(demo.tokenizer, demo.model.config.vocab_size, [3])
    for _ in range(2):
        grammars.processor(form_of(None, {"regex": "a+"}))
    assert len(made) == 2


@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize("rule", [{"no_repeat_ngram_size": 1}, {"min_tokens": 30}, {"no_repeat_ngram_size": 2, "n": 2}])
def test_where_a_rule_leaves_nothing_of_a_form_the_form_counts(server, rule, temperature):
    body = {"prompt": "x", "max_tokens": 60, "temperature": temperature, "seed": 3} | rule
    told = server.post("/v1/completions", body | {"structured_outputs": {"choice": ["1 1 1 1 1 1"]}})
    assert [choice["text"] for choice in told.json()["choices"]] == ["1 1 1 1 1 1"] * rule.get("n", 1)
    assert {choice["finish_reason"] for choice in told.json()["choices"]} == {"stop"}


@pytest.fixture(scope="module")
def served_with_tools(demo):
    """A model whose tokenizer says what tool calls and reasoning look like."""
    tokenizer = copy.deepcopy(demo.tokenizer)
    tokenizer.response_template = {
        "defaults": {"role": "assistant"},
        "start_anchor": "<|assistant|>",
        "fields": {
            "reasoning_content": {"open": "<think>", "close": "</think>", "content": "text"},
            "tool_calls": {
                "open": "<tool_call>", "close": "</tool_call>", "repeats": True, "content": "json",
                "transform": {"type": "function", "function": "{content}"},
            },
            "content": {"close_pattern": r"\s*(?:<\|end\|>)", "content": "text"},
        },
    }  # fmt: skip
    served = copy.copy(demo)
    served.tokenizer = tokenizer
    return served


@pytest.fixture(scope="module")
def with_tools(served_with_tools):
    with running(served_with_tools) as started:
        yield started


_CALL = '<tool_call>{"name": "add", "arguments": {"of": 1}}</tool_call>'


@pytest.mark.parametrize("before", ["", "ab ", "<think>a b</think>", "<think>in</think>hi", _CALL, f"{_CALL} and "])
@pytest.mark.parametrize("call", ["nope", '{"name": "add"}', '{"name": 3, "arguments": {}}'])
def test_no_text_of_what_is_no_tool_call_is_lost_wherever_its_pieces_end(served_with_tools, before, call):
    """Pieces may have a beginning of the call, in which the text before it stands once more, such as a space."""
    text = f"{before}<tool_call>{call}</tool_call> c"
    for first, second in combinations(range(len(text)), 2):
        reader, pieces = MessageReader(served_with_tools, [], None), (text[:first], text[first:second], text[second:])
        items = [item for piece in pieces for item in reader.feed(piece, None)]
        items += reader.feed("", "stop")
        said = "".join([item for item in items if type(item) is str])
        # What stands before it in the same piece is text, too.
        assert text.endswith(said) and said.endswith(text.removeprefix(before if "<" in before else "")), pieces


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("call", ["nope", '{"name": "add"}', '{"name": 3, "arguments": {}}'])
def test_what_is_no_tool_call_is_text(with_tools, call, stream):
    text = f"ab <tool_call>{call}</tool_call>"
    form = {"structured_outputs": {"choice": [text]}}
    asked = {"model": "demo", "messages": MESSAGES, "max_tokens": 100, "stream": stream}
    result = with_tools.client().chat.completions.create(**asked, extra_body=form)
    choices = [chunk.choices[0] for chunk in result] if stream else result.choices
    messages = [choice.delta if stream else choice.message for choice in choices]
    assert text in "".join(message.content or "" for message in messages)
    assert choices[-1].finish_reason == "stop"
    told = with_tools.client().responses.create(model="demo", input="x", stream=stream, extra_body=form)
    assert text in (list(told)[-1].response if stream else told).output_text


@pytest.mark.parametrize("stream", [False, True])
def test_tool_calls_and_reasoning(with_tools, stream):
    call = '{"name": "add", "arguments": {"a": 1}}'
    text = f"<think>hm</think><tool_call>{call}</tool_call>"
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
    asked = {"model": "demo", "messages": MESSAGES, "tools": tools, "max_tokens": 100, "stream": stream}
    result = with_tools.client().chat.completions.create(**asked, extra_body={"structured_outputs": {"choice": [text]}})
    if stream:
        chunks = list(result)
        deltas = [chunk.choices[0].delta for chunk in chunks]
        calls = [item for delta in deltas for item in delta.tool_calls or ()]
        reasoning = "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas)
        reason = chunks[-1].choices[0].finish_reason
    else:
        message, reason = result.choices[0].message, result.choices[0].finish_reason
        calls, reasoning = message.tool_calls, message.reasoning_content
    assert reason == "tool_calls" and reasoning == "hm"
    responses = with_tools.client().responses
    asked = {"model": "demo", "input": "x", "tools": [{"type": "function", "name": "add", "parameters": {}}]}
    told = responses.create(**asked, extra_body={"structured_outputs": {"choice": [text]}}, stream=stream)
    output = (list(told)[-1].response if stream else told).output
    assert [item.type for item in output] == ["reasoning", "message", "function_call"]
    assert output[2].name == "add" and json.loads(output[2].arguments) == {"a": 1}
    cut = responses.create(**asked, max_output_tokens=12, extra_body={"structured_outputs": {"choice": [text]}})
    assert cut.status == "incomplete", "in the middle of a call"
    assert [item.function.name for item in calls] == ["add"] and json.loads(calls[0].function.arguments) == {"a": 1}
