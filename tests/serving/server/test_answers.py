"""OpenAI's own client gets what plain `generate` yields."""

import asyncio
import copy
import json
import threading
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest
import torch

from hf_smartspec.sampling.noise import row_seed
from hf_smartspec.serving.server.handlers import streaming

from .running import TIMEOUT, Running, Served, running

QUESTION = "Write a Python function that adds two numbers."
MESSAGES = [{"role": "user", "content": QUESTION}]


@pytest.fixture
def client(server):
    return server.client()


def test_a_chat_is_what_generate_yields(server, client, demo):
    expected = demo.alone(demo.chat_ids(QUESTION), max_new_tokens=40)
    result = client.chat.completions.create(model="demo", messages=MESSAGES, max_completion_tokens=40)
    assert result.choices[0].message.content == demo.text(expected)
    assert result.usage.prompt_tokens == len(demo.chat_ids(QUESTION))
    assert result.usage.completion_tokens == len(expected)
    assert result.choices[0].finish_reason == ("length" if len(expected) == 40 else "stop")
    again = client.chat.completions.create(model="demo", messages=MESSAGES, max_tokens=40)
    assert again.choices[0].message.content == demo.text(expected)
    assert again.usage.prompt_tokens_details.cached_tokens == len(demo.chat_ids(QUESTION)) - 1
    counts = again.model_extra["metrics"]["speculative_decoding"]
    assert 0 < counts["num_accepted_draft_tokens"] <= counts["num_draft_tokens"], "the answer was known"
    assert counts["mean_acceptance_length"] == 1 + counts["num_accepted_draft_tokens"] / counts["num_spec_steps"]


def test_a_stream_ends_with_usage_and_done(server, client, demo):
    expected = demo.text(demo.alone(demo.chat_ids(QUESTION), max_new_tokens=24))
    body = {"model": "demo", "messages": MESSAGES, "max_tokens": 24, "stream": True}
    options = {"include_usage": True}
    chunks = list(client.chat.completions.create(**body, stream_options=options))
    *parts, last = chunks
    assert "".join(part.choices[0].delta.content or "" for part in parts) == expected
    assert parts[0].choices[0].delta.role == "assistant" and parts[-1].choices[0].finish_reason == "length"
    assert last.choices == [] and last.usage.completion_tokens == 24 and all(part.usage is None for part in parts)
    lines = server.post("/v1/chat/completions", body).text.strip().split("\n\n")
    assert lines[-1] == "data: [DONE]" and not any('"usage"' in line for line in lines)
    counted = server.post(
        "/v1/chat/completions", body | {"stream_options": options | {"continuous_usage_stats": True}}
    ).text.strip()
    assert all('"usage"' in line for line in counted.split("\n\n")[:-1])


def test_many_at_once_by_the_asynchronous_client(server: Running, demo: Served):
    prompts = [f"def f{number}(a, b):" for number in range(6)]
    expected = [demo.text(demo.alone(prompt, max_new_tokens=12)) for prompt in prompts]

    async def ask(client, prompt):
        text = ""
        async for chunk in await client.completions.create(model="demo", prompt=prompt, max_tokens=12, stream=True):
            text += chunk.choices[0].text
        return text

    async def ask_all():
        async with server.async_client() as client:
            return await asyncio.gather(*(ask(client, prompt) for prompt in prompts))

    assert asyncio.run(ask_all()) == expected


def test_completions_of_texts_and_token_ids(client, demo):
    prompts = ["def add(a, b):", "SELECT name FROM"]
    expected = [demo.alone(prompt, max_new_tokens=16) for prompt in prompts]
    ids = [demo.tokenizer(prompt).input_ids for prompt in prompts]
    for asked in (prompts, ids):
        result = client.completions.create(model="demo", prompt=asked)
        assert [choice.text for choice in result.choices] == list(map(demo.text, expected)), "16 tokens by default"
    one = client.completions.create(model="demo", prompt=ids[0], max_tokens=5, echo=True)
    assert one.choices[0].text == demo.tokenizer.decode(ids[0]) + demo.text(expected[0][:5])
    assert one.usage.total_tokens == len(ids[0]) + 5


def test_choices_are_the_rows_of_generate(client, demo):
    ids = demo.chat_ids(QUESTION)
    settings = {"do_sample": True, "temperature": 0.9, "top_p": 0.95, "max_new_tokens": 16}
    expected = [demo.text(demo.alone(ids, seed=row_seed(7, row), **settings)) for row in range(3)]
    asked = {"model": "demo", "messages": MESSAGES, "temperature": 0.9, "top_p": 0.95, "seed": 7, "max_tokens": 16}
    result = client.chat.completions.create(**asked, n=3)
    assert [choice.message.content for choice in result.choices] == expected and len(set(expected)) > 1
    assert result.usage.prompt_tokens == len(ids) and result.usage.completion_tokens == 48
    texts = ["", "", ""]
    for chunk in client.chat.completions.create(**asked, n=3, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert texts == expected
    assert client.chat.completions.create(**asked).choices[0].message.content == expected[0]


def test_equal_prompts_without_a_seed_are_answered_each_by_itself(client):
    result = client.completions.create(model="demo", prompt=["def"] * 4, temperature=1.5, max_tokens=12, n=2)
    assert len({choice.text for choice in result.choices}) > 2


def test_a_temperature_of_almost_nothing_takes_the_likeliest(client, demo):
    expected = demo.text(demo.alone("def add(a, b):", max_new_tokens=8))
    asked = {"model": "demo", "prompt": "def add(a, b):", "max_tokens": 8}
    assert client.completions.create(**asked, temperature=1e-300).choices[0].text == expected


def test_logprobs_are_those_of_the_model(client, demo):
    ids = demo.chat_ids(QUESTION)
    tokens = demo.alone(ids, max_new_tokens=10)
    text = torch.tensor([ids + tokens])
    scores = torch.log_softmax(demo.model(text).logits[0, len(ids) - 1 : -1].float(), -1)
    result = client.chat.completions.create(
        model="demo", messages=MESSAGES, max_tokens=10, logprobs=True, top_logprobs=3
    )
    content = result.choices[0].logprobs.content
    assert [item.token for item in content] == [demo.tokenizer.decode([token]) for token in tokens]
    for item, line, token in zip(content, scores, tokens):
        assert item.logprob == pytest.approx(line[token].item(), abs=1e-4)
        assert [top.logprob for top in item.top_logprobs] == pytest.approx(line.topk(3).values.tolist(), abs=1e-4)
    streamed = []
    for chunk in client.chat.completions.create(
        model="demo", messages=MESSAGES, max_tokens=10, logprobs=True, stream=True
    ):
        streamed += (chunk.choices[0].logprobs or openai.types.chat.chat_completion.ChoiceLogprobs(content=[])).content
    assert [item.logprob for item in streamed] == pytest.approx([item.logprob for item in content], abs=1e-4)


def test_logprobs_of_prompts_are_those_of_the_model(client, demo):
    prompt = "def add(a, b):\n    return a + b\n"
    ids = demo.tokenizer(prompt).input_ids
    scores = torch.log_softmax(demo.model(torch.tensor([ids])).logits[0].float(), -1)
    expected = [scores[place, token].item() for place, token in enumerate(ids[1:])]
    for num_new in (0, 2):
        result = client.completions.create(model="demo", prompt=prompt, max_tokens=num_new, echo=True, logprobs=1)
        known = result.choices[0].logprobs
        assert known.token_logprobs[0] is None and len(known.token_logprobs) == len(ids) + num_new
        assert known.token_logprobs[1 : len(ids)] == pytest.approx(expected, abs=1e-4)
        assert result.choices[0].text.startswith(prompt) and known.text_offset[1] == len(known.tokens[0])
        best = scores[0].argmax().item()
        assert demo.tokenizer.decode([best]) in known.top_logprobs[1]
    asked = {"model": "demo", "prompt": prompt, "max_tokens": 9, "echo": True, "logprobs": 0}
    whole = client.completions.create(**asked).choices[0].logprobs
    parts = [chunk.choices[0].logprobs for chunk in client.completions.create(**asked, stream=True)]
    assert [token for part in parts for token in part.tokens] == whole.tokens
    assert [offset for part in parts for offset in part.text_offset] == whole.text_offset


def test_logprobs_of_prompts_know_none_of_the_models_rules_for_answers(demo):
    served = copy.copy(demo)
    served.model = copy.deepcopy(demo.model)
    ids = demo.tokenizer("1, 2, 1, 2, 1, 2").input_ids
    rules = {"no_repeat_ngram_size": 1, "suppress_tokens": ids[2:3], "bad_words_ids": [ids[:1]], "min_length": 9}
    served.model.generation_config.update(**rules, forced_eos_token_id=3, repetition_penalty=1.5)
    asked = {"prompt": ids, "max_tokens": 0, "echo": True, "logprobs": 0}
    found = []
    for item in (demo, served):
        with running(item) as server:
            found.append(server.post("/v1/completions", asked).json()["choices"][0]["logprobs"]["token_logprobs"])
    assert found[0][1:] == pytest.approx(found[1][1:], abs=1e-4) and len(found[0]) == len(ids)


def test_stop_strings_end_the_text(server, client, demo):
    whole = demo.text(demo.alone("def add(a, b):", max_new_tokens=40))
    stop = whole[10:13]
    expected = whole[: whole.index(stop)]
    asked = {"model": "demo", "prompt": "def add(a, b):", "max_tokens": 40, "stop": ["never there", stop]}
    result = client.completions.create(**asked)
    assert result.choices[0].text == expected and result.choices[0].finish_reason == "stop"
    assert result.choices[0].model_extra["stop_reason"] == stop
    assert result.usage.completion_tokens < 40, "it was not decoded to the end"
    streamed = [chunk.choices[0].text for chunk in client.completions.create(**asked, stream=True)]
    assert "".join(streamed) == expected
    without_end = client.completions.create(**asked, extra_body={"ignore_eos": True})
    assert without_end.choices[0].text == expected and without_end.usage == result.usage
    kept = client.completions.create(**asked, extra_body={"include_stop_str_in_output": True})
    assert kept.choices[0].text == expected + stop


def test_ends_of_text_are_heeded_or_ignored(client, demo):
    ids = demo.tokenizer("def add(a, b):").input_ids
    third = demo.alone(ids, max_new_tokens=3)[2]
    result = client.completions.create(model="demo", prompt=ids, extra_body={"stop_token_ids": [third]})
    assert result.usage.completion_tokens <= 3 and result.choices[0].finish_reason == "stop"
    on = client.completions.create(
        model="demo", prompt=ids, max_tokens=60, extra_body={"ignore_eos": True, "min_tokens": 60}
    )
    assert on.usage.completion_tokens == 60 and on.choices[0].finish_reason == "length"


def test_penalties_count_the_answer(client, demo):
    from transformers import LogitsProcessorList

    from hf_smartspec.serving.server.tokens import Penalties

    ids = demo.tokenizer("1, 1, 1, 1,").input_ids
    settings = {"max_new_tokens": 20, "logits_processor": LogitsProcessorList([Penalties(0.5, 1.0, len(ids))])}
    expected = demo.text(demo.alone(ids, **settings))
    result = client.completions.create(
        model="demo", prompt=ids, max_tokens=20, presence_penalty=0.5, frequency_penalty=1.0
    )
    assert result.choices[0].text == expected != demo.text(demo.alone(ids, max_new_tokens=20))


def test_biases_of_tokens(client, demo):
    ids = demo.tokenizer("def add(a, b):").input_ids
    first = demo.alone(ids, max_new_tokens=1)[0]
    result = client.completions.create(model="demo", prompt=ids, max_tokens=8, logit_bias={str(first): -100})
    assert result.choices[0].text == demo.text(demo.alone(ids, max_new_tokens=8, sequence_bias={(first,): -100.0}))


def test_a_predicted_output_is_drafted(server, demo):
    text = "\n".join(f"line {number} of the file = {number * 7}" for number in range(12))
    prompt = "Repeat the text."
    expected = demo.text(demo.alone(demo.chat_ids(prompt), max_new_tokens=30))
    messages = [{"role": "user", "content": prompt}]
    with_own = {"type": "content", "content": expected}
    client = server.client()
    asked = {"model": "demo", "messages": messages, "max_tokens": 30}
    result = client.chat.completions.create(**asked, prediction=with_own)
    assert result.choices[0].message.content == expected
    details = result.usage.completion_tokens_details
    num = len(demo.tokenizer(expected, add_special_tokens=False).input_ids)
    assert details.accepted_prediction_tokens + details.rejected_prediction_tokens == num
    assert details.accepted_prediction_tokens > num // 2
    assert result.model_extra["metrics"]["speculative_decoding"]["num_accepted_draft_tokens"] > 15
    wrong = client.chat.completions.create(**asked, prediction={"type": "content", "content": text})
    assert wrong.choices[0].message.content == expected
    assert wrong.usage.completion_tokens_details.rejected_prediction_tokens > 50


def test_requests_choose_their_own_speculation(client, demo):
    asked = {"model": "demo", "prompt": "1, 2, 3, 1, 2, 3, 1, 2,", "max_tokens": 20}
    none = client.completions.create(**asked, extra_body={"speculation": {"assistant": "none"}})
    some = client.completions.create(**asked, extra_body={"speculation": {"num_nodes": 1}})
    usual = client.completions.create(**asked)
    assert none.choices[0].text == some.choices[0].text == usual.choices[0].text
    counts = [item.model_extra["metrics"]["speculative_decoding"] for item in (none, some, usual)]
    assert counts[0]["num_draft_tokens"] == 0 and counts[0]["num_spec_steps"] == 20
    assert 0 < counts[1]["num_draft_tokens"] <= counts[1]["num_spec_steps"]
    assert counts[2]["num_accepted_draft_tokens"] > 0


def test_responses(client, demo):
    expected = demo.text(demo.alone(demo.chat_ids(QUESTION), max_new_tokens=20))
    asked = {"model": "demo", "input": QUESTION, "max_output_tokens": 20}
    result = client.responses.create(**asked)
    assert result.output_text == expected and result.usage.output_tokens == 20
    events = list(client.responses.create(**asked, stream=True))
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == expected and events[-1].response.output_text == expected
    assert events[0].type == "response.created" and events[-1].type == "response.incomplete"
    assert result.status == "incomplete" and result.incomplete_details.reason == "max_output_tokens"
    again = events[-1].response
    assert again.usage.input_tokens_details.cached_tokens == len(demo.chat_ids(QUESTION)) - 1
    assert again.model_extra["metrics"]["speculative_decoding"]["num_accepted_draft_tokens"] > 0
    short = client.responses.create(**asked, stream=True, extra_body={"structured_outputs": {"choice": ["yes"]}})
    assert list(short)[-1].type == "response.completed"


def test_templates_get_the_effort_of_reasoning(demo):
    served = copy.copy(demo)
    served.tokenizer = copy.deepcopy(demo.tokenizer)
    served.tokenizer.chat_template = "Effort: {{ reasoning_effort | default('unknown') }}."
    lengths = {
        effort: len(demo.tokenizer(f"Effort: {effort}.", add_special_tokens=False).input_ids)
        for effort in ("unknown", "very high indeed")
    }
    assert lengths["unknown"] != lengths["very high indeed"]
    asked = {"model": "demo", "max_tokens": 1}
    with running(served) as server:
        for body, effort in (({}, "unknown"), ({"reasoning_effort": "very high indeed"}, "very high indeed")):
            result = server.post("/v1/chat/completions", asked | {"messages": MESSAGES} | body).json()
            assert result["usage"]["prompt_tokens"] == lengths[effort]
            counted = server.post("/tokenize", {"messages": MESSAGES} | body).json()
            assert counted["count"] == lengths[effort]
        told = server.client().responses.create(model="demo", input=QUESTION, reasoning={"effort": "very high indeed"})
        assert told.usage.input_tokens == lengths["very high indeed"]


def test_what_transformers_chat_asks_for(server, demo):
    assert server.get("/health").json() == {"status": "ok"}
    assert '"ready"' in server.post("/load_model", {"model": "demo"}).text
    assert '"error"' in server.post("/load_model", {"model": "other"}).text
    config = demo.model.generation_config.to_json_string()
    body = {"model": "demo", "messages": MESSAGES, "stream": True, "generation_config": config}
    assert "[DONE]" in server.post("/v1/chat/completions", body).text
    body["generation_config"] = '{"max_new_tokens": 3, "num_beams": 4, "do_sample": false}'
    assert '"length"' in server.post("/v1/chat/completions", body).text


def test_what_load_generators_send(server, demo):
    """Fields as vLLM's and guidellm's benches send them."""
    body = {
        "model": "demo", "messages": [{"role": "user", "content": [{"type": "text", "text": QUESTION}]}],
        "max_completion_tokens": 20, "ignore_eos": True, "stream": True, "repetition_penalty": 1.0, "logprobs": None,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True}, "request_id": "x", "priority": 1,
    }  # fmt: skip
    lines = server.post("/v1/chat/completions", body).text.strip().split("\n\n")
    assert lines.pop() == "data: [DONE]"
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines]
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"]["completion_tokens"] == 20
    text = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks[:-1])
    assert text == demo.text(demo.alone(demo.chat_ids(QUESTION), max_new_tokens=20, eos_token_id=None))


def test_models_tokens_and_versions(server, client, demo):
    assert [item.id for item in client.models.list()] == ["demo"] and client.models.retrieve("demo").id == "demo"
    ids = demo.tokenizer("def add").input_ids
    assert server.post("/tokenize", {"prompt": "def add"}).json()["tokens"] == ids
    assert server.post("/tokenize", {"messages": MESSAGES}).json()["tokens"] == demo.chat_ids(QUESTION)
    tokenized = {"messages": MESSAGES, "return_token_strs": True}
    assert len(server.post("/tokenize", tokenized).json()["token_strs"]) == len(demo.chat_ids(QUESTION))
    assert server.post("/detokenize", {"tokens": ids}).json() == {"prompt": "def add"}
    assert server.get("/tokenizer_info").json()["eos_token"] == demo.tokenizer.eos_token
    assert server.get("/version").json()["version"] and server.get("/ping").status_code == 200


@pytest.mark.parametrize("path, form", [
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "logprobs": True, "top_logprobs": 5}),
    ("/v1/completions", {"prompt": "x", "logprobs": 5}),
])  # fmt: skip
def test_whole_answers_are_written_beside_the_event_loop(server, monkeypatch, path, form):
    """Other requests are answered while a choice is written, and each token is decoded once."""
    begun, gate, decoded, write = threading.Event(), threading.Event(), [], streaming._json

    def slow(value):
        if "index" in value:
            begun.set()
            assert gate.wait(TIMEOUT)
        return write(value)

    monkeypatch.setattr(streaming, "_json", slow)
    decoder, decode = type(server.models["demo"].tokenizer), type(server.models["demo"].tokenizer).decode

    def counted(tokenizer, tokens, *args, **kwargs):
        if isinstance(tokens, int):
            decoded.append(tokens)
        return decode(tokenizer, tokens, *args, **kwargs)

    monkeypatch.setattr(decoder, "decode", counted)
    with ThreadPoolExecutor() as pool:
        body = form | {"n": 2, "temperature": 0, "max_tokens": 8, "ignore_eos": True}
        asking = pool.submit(server.post, path, body)
        try:
            assert begun.wait(TIMEOUT)
            assert server.get("/health").status_code == 200 and not asking.done()
        finally:
            gate.set()
        first, second = asking.result(TIMEOUT).json()["choices"]
    assert first["logprobs"] == second["logprobs"] and len(decoded) == len(set(decoded)) > 5
