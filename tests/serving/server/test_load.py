"""Many clients at once, and random bodies."""

import asyncio
import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hf_smartspec.serving.server.guard.limits import Limits
from hf_smartspec.serving.server.request.fields import ChatFields, CompletionFields, ResponseFields

from ...covering import examples
from .load import run_load
from .running import running

_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda item: st.lists(item, max_size=3) | st.dictionaries(st.text(max_size=8), item, max_size=3),
    max_leaves=6,
)
_PATHS = {"/v1/chat/completions": ChatFields, "/v1/completions": CompletionFields, "/v1/responses": ResponseFields}
_FIXED = {"n": 1, "max_tokens": 2, "messages": [{"role": "user", "content": "x"}], "prompt": "x", "input": "x"}


def test_clients_that_come_at_once_are_all_answered(server, demo):
    """Each with a prompt of its own, streaming; some leave in the middle."""
    prompts = [f"{number}, {number + 1}," for number in range(12)]
    expected = {prompt: demo.text(demo.alone(prompt, max_new_tokens=10)) for prompt in prompts}
    report = asyncio.run(run_load(server.url, prompts * 3, max_tokens=10, leave_every=6))
    assert report.num_failed == 0 and report.num_left == 6
    assert len(report.texts) == 30 and all(text == expected[prompt] for prompt, text in report.texts)


@pytest.fixture(scope="module")
def short_server(demo):
    with running(demo, limits=Limits(max_new_tokens=2), assistant="none") as started:
        yield started


@settings(max_examples=examples(30), deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data(), path=st.sampled_from(list(_PATHS)))
def test_no_body_makes_the_server_fail(short_server, data, path):
    names = st.sampled_from([*_PATHS[path].model_fields, "unknown"])
    body = _FIXED | data.draw(st.dictionaries(names, _JSON, max_size=3)) | {"max_output_tokens": 2}
    if body.get("n") not in (1, 2):
        body["n"] = 1
    content = json.dumps(body)
    answer = short_server.post(path, content=content, headers={"Content-Type": "application/json"})
    assert answer.status_code < 500, (body, answer.text)
    assert answer.status_code == 200 or answer.json()["error"]["message"]
