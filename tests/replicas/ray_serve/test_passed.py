"""Streams that a second replica begins anew."""

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("fastapi")

from hf_smartspec.replicas.ray_serve.passed import CannotContinueError, PassedEvents

DONE = b"data: [DONE]\n\n"


def event(*choices, **extra):
    return b"data: " + json.dumps({"created": 1, "choices": list(choices)} | extra).encode() + b"\n\n"


def chat_events(name, texts, ends, cuts):
    """What a replica sends: `texts` of all choices, each cut where `cuts` say, then how each ends."""
    events = [event({"index": i, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}, id=name)
              for i in range(len(texts))]  # fmt: skip
    for i, (text, end, places) in enumerate(zip(texts, ends, cuts)):
        edges = sorted({0, len(text), *(place % (len(text) + 1) for place in places)})
        for begin, stop in pairwise(edges):
            events.append(event({"index": i, "delta": {"content": text[begin:stop]}, "finish_reason": None}, id=name))
        events.append(event({"index": i, "delta": {}, "finish_reason": end, "stop_reason": None}, id=name))
    return [*events, event(id=name, usage={"total_tokens": 7}), DONE]


def read(raw):
    """All that a client learns from a stream: texts, how they end, ids, and what is there once."""
    texts, ends, roles, names, usages, done = {}, {}, {}, set(), 0, 0
    for data in raw.decode().split("\n\n")[:-1]:
        data = data.removeprefix("data: ")
        if data == "[DONE]":
            done += 1
            continue
        chunk = json.loads(data)
        names.add(chunk["id"])
        usages += "usage" in chunk
        for choice in chunk["choices"]:
            index, delta = choice["index"], choice["delta"]
            texts[index] = texts.get(index, "") + delta.get("content", "")
            roles[index] = roles.get(index, 0) + ("role" in delta)
            if choice["finish_reason"] is not None:
                assert index not in ends
                ends[index] = choice["finish_reason"]
    return texts, ends, roles, names, usages, done


CUTS = st.lists(st.integers(0, 100), max_size=6)


@given(
    st.data(), st.lists(st.tuples(st.text(max_size=20), st.sampled_from(["stop", "length"])), min_size=1, max_size=3)
)
def test_a_client_sees_one_answer_wherever_the_first_replica_dies(data, choices):
    texts, ends = [text for text, _ in choices], [end for _, end in choices]
    first = chat_events("first", texts, ends, [data.draw(CUTS) for _ in texts])
    second = chat_events("second", texts, ends, [data.draw(CUTS) for _ in texts])
    passed = PassedEvents()
    seen = first[: data.draw(st.integers(1, len(first)))]
    for piece in seen:
        passed.note(piece)
    raw = b"".join(second)
    edges = sorted({0, len(raw), *data.draw(st.lists(st.integers(0, len(raw)), max_size=4))})
    got = b"".join([*seen, *(passed.rest(raw[begin:end]) for begin, end in pairwise(edges))])
    expected = dict(enumerate(texts)), dict(enumerate(ends)), dict.fromkeys(range(len(texts)), 1), {"first"}, 1, 1
    assert read(got) == expected


def test_tool_calls_go_on():
    def call(call_id, arguments, **extra):
        call = {"index": 0, "function": {"arguments": arguments} | extra} | ({"id": call_id} if call_id else {})
        return event({"index": 0, "delta": {"tool_calls": [call]}, "finish_reason": None})

    passed = PassedEvents()
    passed.note(call("call_a", '{"x": ', name="f"))
    assert passed.rest(call("call_b", '{"x"', name="f")) == b""
    assert json.loads(passed.rest(call(None, ": 1}"))[6:])["choices"] == [
        {"index": 0, "delta": {"tool_calls": [{"index": 0, "function": {"arguments": "1}"}}]}, "finish_reason": None}
    ]


@pytest.mark.parametrize(
    "first, second, reason",
    [
        (event({"index": 0, "text": "abc"}), event({"index": 0, "text": "ax"}), "another one"),
        (event({"index": 0, "text": "abc"})[:-5], event({"index": 0, "text": "abc"}), "within an event"),
        (event({"index": 0, "text": "a", "logprobs": {}}), event({"index": 0, "text": "a"}), "log-prob"),
        (b"event: response.created\ndata: {}\n\n", b"", "have names"),
        (b'data: {"type": "response.created"}\n\n', b"", "not chunks"),
    ],
)
def test_what_cannot_be_continued(first, second, reason):
    passed = PassedEvents()
    passed.note(first)
    with pytest.raises(CannotContinueError, match=reason):
        passed.rest(second)
