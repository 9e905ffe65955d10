"""Parts by themselves: text as it comes, what two texts have in common, numbers for Prometheus."""

import asyncio
import itertools
from types import SimpleNamespace

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families
from pydantic import ValidationError

from hf_smartspec.serving.server.answers import Piece, interleaved
from hf_smartspec.serving.server.handlers.usage import num_predicted
from hf_smartspec.serving.server.request.fields import ChatFields, CompletionFields, ResponseFields
from hf_smartspec.serving.server.tokens import TextStream


@pytest.mark.parametrize("text", ["def add(a, b):\n    return a + b", "naïve 日本語 🙂🙂 é", "a <|end|> b"])
def test_text_comes_as_it_is(demo, text):
    ids = demo.tokenizer(text).input_ids
    for size in (1, 3, 100):
        stream = TextStream(demo.tokenizer)
        parts = [stream.feed(ids[at : at + size]) for at in range(0, len(ids), size)]
        assert "".join(parts) + stream.end() == demo.text(ids)
    kept = TextStream(demo.tokenizer, keeps_special=True)
    assert kept.feed(ids) + kept.end() == demo.tokenizer.decode(ids)


def test_characters_come_whole_and_broken_ones_at_the_end(demo):
    ids = demo.tokenizer("🙂").input_ids
    assert len(ids) > 1
    stream = TextStream(demo.tokenizer)
    assert all("\ufffd" not in stream.feed([token]) for token in ids[:-1])
    assert stream.feed(ids[-1:]) == "🙂"
    broken = TextStream(demo.tokenizer)
    assert broken.feed(ids[:-1]) == "" and broken.end() == demo.text(ids[:-1])


@pytest.mark.parametrize(
    "stops, expected, reason",
    [
        (["c d"], "a b ", "c d"),
        (["d e", "c"], "a b ", "c"),
        (["b c", "a b c d"], "a ", "b c"),
        (["a b c d", "a b c"], "", "a b c"),
        (["f"], "a b c d e", None),
        (["e z"], "a b c d e", None),
    ],
)
def test_stop_strings(demo, stops, expected, reason):
    """The first to be whole, and of those that one token makes whole the first in the text."""
    for keeps in (False, True):
        stream = TextStream(demo.tokenizer, stops, keeps_stop=keeps)
        given = "".join(stream.feed([token]) for token in demo.tokenizer("a b c d e").input_ids) + stream.end()
        assert stream.stop_reason == reason and given == expected + (reason or "") * keeps


def test_nothing_that_may_be_a_stop_string_is_handed_out(demo):
    stream = TextStream(demo.tokenizer, ["stop!"])
    shown = ""
    for token in demo.tokenizer("go on; sto, st, stop!").input_ids:
        shown += stream.feed([token])
        assert not shown.endswith(("s", "st", "sto", "stop"))
    assert shown + stream.end() == "go on; sto, st, "


def test_what_texts_have_in_common_is_their_longest_common_subsequence():
    rng = np.random.default_rng(0)
    for _ in range(50):
        first, second = (rng.integers(0, 4, rng.integers(0, 7)).tolist() for _ in range(2))
        parts = {part for num in range(len(first) + 1) for part in itertools.combinations(first, num)}
        longest = max(len(part) for part in parts if _is_within(part, second))
        assert num_predicted(first, second) == longest
    assert num_predicted(range(5000), range(1, 5001)) == 4999


def _is_within(part, text):
    places = iter(text)
    return all(token in places for token in part)


def test_metrics_count_what_was_served(server):
    def read():
        text = server.get("/metrics").text
        samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
        return {sample.name: sample.value for sample in samples if "le" not in sample.labels and
                sample.labels.get("finished_reason", "length") == "length"}  # fmt: skip

    before = read()
    server.client().completions.create(model="demo", prompt="1, 2, 1, 2, 1,", max_tokens=9, n=1)
    list(server.client().completions.create(model="demo", prompt="1, 2, 1, 2, 1,", max_tokens=9, stream=True))
    after = read()
    grown = {name: after[name] - before.get(name, 0) for name in after if not name.endswith(("_created", "_sum"))}
    assert grown["vllm:generation_tokens_total"] == 18 and grown["vllm:request_success_total"] == 2
    assert grown["vllm:prompt_tokens_total"] == grown["vllm:prefix_cache_queries_total"] > 0
    assert 0 < grown["vllm:prefix_cache_hits_total"] < grown["vllm:prompt_tokens_total"]
    assert grown["vllm:spec_decode_num_accepted_tokens_total"] <= grown["vllm:spec_decode_num_draft_tokens_total"]
    assert 0 < grown["vllm:spec_decode_num_drafts_total"] < 18 and grown["vllm:spec_decode_num_accepted_tokens_total"]
    assert grown["vllm:e2e_request_latency_seconds_count"] == grown["vllm:time_to_first_token_seconds_count"] == 2
    assert after["vllm:num_requests_running"] == after["vllm:num_requests_waiting"] == 0


def test_pieces_do_not_pile_up_for_a_slow_reader():
    num_made = 0

    class Fast:
        async def pieces(self):
            nonlocal num_made
            for number in range(100):
                num_made += 1
                yield Piece("x", [1], None, SimpleNamespace(), "stop" if number == 99 else None)

        def drop(self):
            pass

    async def read_one():
        pieces = interleaved([Fast(), Fast()])
        await anext(pieces)
        for _ in range(300):
            await asyncio.sleep(0)
        assert num_made <= 6
        rest = [piece async for piece in pieces]
        assert len(rest) == 199

    asyncio.run(read_one())


@pytest.mark.parametrize(
    "kind, body",
    [
        (CompletionFields, {"prompt": [-1] * 10_000}),
        (CompletionFields, {"prompt": [[-1] * 10_000]}),
        (CompletionFields, {"prompt": "x", "stop_token_ids": ["x"] * 10_000}),
        (ChatFields, {"messages": [1] * 10_000}),
        (ChatFields, {"messages": [{"role": "user", "content": [1] * 10_000}]}),
        (ResponseFields, {"input": [1] * 10_000}),
    ],
)
def test_a_body_of_wrong_items_makes_few_errors(kind, body):
    """A wrong list makes one error, since a body may have millions of items."""
    with pytest.raises(ValidationError) as caught:
        kind.model_validate(body)
    assert caught.value.error_count() < 6
