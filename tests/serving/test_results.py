"""Outputs between the engine's thread and readers."""

import asyncio
import threading
from dataclasses import replace

import pytest

from hf_smartspec.serving.outputs import EngineOutput, Results, failed
from hf_smartspec.target_model.compat import RequestStatus

from .helpers import TIMEOUT


@pytest.fixture
def results():
    return Results()


def grown(output, num_tokens, is_finished=False):
    status = RequestStatus.FINISHED if is_finished else RequestStatus.DECODING
    return replace(output, generated_tokens=list(range(num_tokens)), status=status)


def opened(results, name="a"):
    output = EngineOutput(name)
    results.open(output)
    return output


def test_readers_choose_between_finished_and_newest_outputs(results):
    first, second = opened(results, "a"), opened(results, "b")
    results.put(grown(first, 1))
    results.put(grown(second, 1, is_finished=True))
    results.put(grown(first, 2))
    assert results.get("a", timeout=0) is None and results.get(timeout=0).request_id == "b"
    assert results.get("a", 0, unfinished=True).generated_tokens == [0, 1]
    assert results.get(timeout=0, unfinished=True) is None, "each output is taken once"
    results.put(grown(first, 2))
    assert results.get(timeout=0, unfinished=True) is None, "no new token"
    results.put(grown(first, 2, is_finished=True))
    assert results.get("a").is_finished() and results.get() is None and results.get("a", unfinished=True) is None


def test_finished_outputs_come_in_the_order_of_their_ends(results):
    outputs = [opened(results, name) for name in "abc"]
    for output in outputs:
        results.put(grown(output, 1))
    for output in reversed(outputs):
        results.put(grown(output, 2, is_finished=True))
    assert [results.get().request_id for _ in outputs] == ["c", "b", "a"]


def test_a_name_is_in_use_until_its_output_is_read_or_the_discarded_request_has_ended(results):
    output = opened(results)
    with pytest.raises(ValueError, match="in use"):
        results.open(output)
    results.put(grown(output, 1, is_finished=True))
    assert "a" in results and results.get("a") is not None and "a" not in results
    results.open(output)
    results.put(grown(output, 1))
    results.discard("a")
    assert "a" in results and not results.is_open() and results.wait_until_answered(0)
    results.put(grown(output, 2))
    results.put(failed(grown(output, 2), "cancelled", "by the test"))
    assert "a" not in results and results.get(timeout=0, unfinished=True) is None


def test_readers_of_other_threads_wait(results):
    output = opened(results)
    found = []
    readers = [
        threading.Thread(target=lambda: found.append([len(item.generated_tokens) for item in results.stream("a")])),
        threading.Thread(target=lambda: found.append(results.wait_until_answered(TIMEOUT))),
    ]
    for reader in readers:
        reader.start()
    results.put(grown(output, 3))
    results.put(grown(output, 5, is_finished=True))
    for reader in readers:
        reader.join(TIMEOUT)
    assert True in found and [5] in [item[-1:] for item in found if item is not True]


def test_streams_of_discarded_requests_end(results):
    async def read():
        stream = results.stream_async("a")
        seen = [(await anext(stream)).generated_tokens]
        asyncio.get_running_loop().call_later(0.01, results.discard, "a")
        return seen + [item async for item in stream]

    results.put(grown(opened(results), 1))
    assert asyncio.run(asyncio.wait_for(read(), TIMEOUT)) == [[0]]
    assert list(results.stream("a")) == [] and not results._listeners


@pytest.mark.parametrize("is_late", [False, True])
def test_callbacks_get_outputs_in_place_of_readers(results, is_late):
    async def run():
        seen = []
        if not is_late:
            results.deliver("a", seen.append)
        output = opened(results)
        results.put(grown(output, 1))
        if is_late:
            results.deliver("a", seen.append)
        results.put(grown(output, 2))
        results.put(grown(output, 3, is_finished=True))
        await asyncio.sleep(0)
        return [len(item.generated_tokens) for item in seen]

    assert asyncio.run(run()) == [1, 2, 3]
    assert results.get(timeout=0, unfinished=True) is None and not results._listeners


def test_callbacks_of_finished_requests_are_called_once(results):
    async def run():
        seen = []
        results.deliver("a", seen.append)
        await asyncio.sleep(0)
        return len(seen)

    results.put(grown(opened(results), 1, is_finished=True))
    assert asyncio.run(run()) == 1 and not results._listeners and "a" not in results
