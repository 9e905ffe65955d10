"""One key cannot shut out the others: turns, and bounds on what each has open."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest

from hf_smartspec.serving import scheduler
from hf_smartspec.serving.server.errors import ApiError
from hf_smartspec.serving.server.guard.keys import CALLER, Caller
from hf_smartspec.serving.server.guard.limits import Limits, OpenRequests

from ...covering import exhaustive
from ..helpers import wait_once
from .running import TIMEOUT, check_nothing_is_left, running, wait_until

KEYS = ("key of a", "key of b")
SHORT = {"model": "demo", "prompt": "SELECT", "max_tokens": 4}
STREAM = {"model": "demo", "prompt": "1, 2,", "max_tokens": 2000, "stream": True, "extra_body": {"ignore_eos": True}}


def added(requests: OpenRequests, namespace: str, number: int = 1) -> int:
    """0, or the status with which they are refused."""
    try:
        requests.add(namespace, number)
    except ApiError as error:
        assert (error.retry_after is not None) == (error.status == 429)
        return error.status
    return 0


def test_bounds_on_open_requests():
    requests = OpenRequests(Limits(max_queue=6, max_per_key=5), max_batch_size=2)
    assert added(requests, "a", 6) == 400, "it can never be served"
    assert added(requests, "a", 5) == 0 and added(requests, "a") == 429
    assert added(requests, "b", 3) == 0 and added(requests, "b") == 0, "its half of 8"
    assert added(requests, "b") == 429 and len(requests) == 9
    assert added(requests, "c", 2) == 0 and added(requests, "c") == 429, "a third"
    requests.remove("a", 5)
    assert added(requests, "b") == 0 and added(requests, "b") == 429, "of one key"
    requests.remove("b", 5)
    requests.remove("c", 2)
    assert len(requests) == 0 and not requests._counts


def test_all_may_be_one_keys_where_nothing_is_said():
    requests = OpenRequests(Limits(max_queue=6), max_batch_size=2)
    assert added(requests, "", 8) == 0 and added(requests, "") == 429
    assert added(requests, "b", 4) == 0, "a full queue of others is no reason"


def test_a_key_has_no_more_open_than_it_may(demo):
    """Choices and lists of prompts count each; others do not notice."""
    with running(demo, keys=KEYS, limits=Limits(max_per_key=4)) as server:
        one, two = (server.client(key) for key in KEYS)
        with pytest.raises(openai.BadRequestError, match="5 answers at once, but at most 4 are accepted"):
            one.completions.create(**SHORT | {"prompt": ["x"] * 5})
        with server.engine.pause():  # what is open stays so, however late the next request comes
            stream = one.completions.create(**STREAM | {"prompt": ["1, 2,", "3, 4,"], "n": 2, "temperature": 1.0})
            with pytest.raises(openai.RateLimitError, match="4 requests of this key") as refused:
                one.completions.create(**SHORT)
            assert int(refused.value.response.headers["Retry-After"]) > 0
            assert set(refused.value.body) == {"message", "type", "param", "code"}
        with stream:
            answer = two.completions.create(**SHORT)
            assert answer.choices[0].text == demo.text(demo.alone("SELECT", max_new_tokens=4))
        wait_until(lambda: server.engine.load.num_running == 0)
        assert one.completions.create(**SHORT).choices[0].text == answer.choices[0].text


def test_a_full_queue_of_one_key_refuses_no_other(demo):
    with running(demo, keys=KEYS, limits=Limits(max_queue=3), max_batch_size=1) as server:
        one, two = (server.client(key) for key in KEYS)
        waits = wait_once(server.engine, lambda: len(server.engine._runner._num_open) > 1)  # for the other key
        with one.completions.create(**STREAM | {"n": 4, "temperature": 1.0}):
            assert waits.wait(TIMEOUT)
            with pytest.raises(openai.RateLimitError, match="4 requests of this key"):
                one.completions.create(**SHORT)
            assert two.completions.create(**SHORT).usage.completion_tokens == 4
    check_nothing_is_left(server)


def test_requests_of_who_left_as_the_server_stopped_are_dropped(demo):
    """Nothing is kept for them, though they are dropped one after another, by a thread that has other work."""
    with running(demo) as server:
        worker, ends = server.models["demo"]._worker, threading.Event()
        shutdown = worker.shutdown

        def shut_down_while_it_works(*args, **kwargs):
            shutdown(*args, **kwargs | {"wait": False})
            ends.set()
            shutdown()

        worker.shutdown = shut_down_while_it_works
        with server.client().completions.create(**STREAM | {"n": 4, "temperature": 1.0}) as stream:
            next(iter(stream))
            worker.submit(ends.wait, TIMEOUT)
        wait_until(lambda: not len(server.models["demo"].open))
    check_nothing_is_left(server)


def test_forms_log_probabilities_and_penalties_go_on_after_turns(demo, monkeypatch):
    """Requests that give way to one another again and again get what each of them gets alone."""
    monkeypatch.setattr(scheduler, "TURN", 2)
    settings = (
        {"extra_body": {"structured_outputs": {"regex": "[a-f]{20}"}}},
        {"logprobs": 3, "temperature": 1.0, "seed": 7},
        {"frequency_penalty": 1.5, "presence_penalty": 0.5, "logit_bias": {"20": 5}},
        {"stop": ["SELECT", "9"], "echo": True},
    )
    with running(demo, keys=KEYS, max_batch_size=1) as server:
        clients = [server.client(key) for key in KEYS]

        def ask(client, own) -> tuple[str, list | None]:
            (choice,) = client.completions.create(model="demo", prompt="1, 2, 3,", max_tokens=20, **own).choices
            return choice.text, choice.logprobs and choice.logprobs.tokens

        alone = [ask(clients[0], own) for own in settings]
        with ThreadPoolExecutor(8) as pool:
            asked = [pool.submit(ask, client, own) for client in clients for own in settings]
            assert [answer.result(TIMEOUT) for answer in asked] == alone * 2
        assert server.engine._runner.num_suspended > 0
    check_nothing_is_left(server)


@pytest.mark.parametrize(
    "attack",
    [
        {"prompt": ["a"] * 1024, "max_tokens": 2000, "ignore_eos": True},
        *exhaustive([{"prompt": "a", "n": 32, "logprobs": 5, "max_tokens": 2000, "ignore_eos": True, "stream": True}]),
    ],
    ids=["prompts", "choices"],
)
def test_who_asks_for_everything_gets_its_part(demo, attack):
    """Another key's short request is answered while all of it still runs and waits, with its own tokens."""
    with running(demo, keys=KEYS, admin_keys=KEYS[1:]) as server:
        stops, is_full, runner = threading.Event(), threading.Event(), server.engine._runner
        step = runner.loop.step

        def step_for_both():
            """All of the attack stays where it is while nobody else asks, for however long."""
            if server.engine.load.num_running == 8 and server.engine.load.num_waiting > 8:
                is_full.set()
            with runner._changed:
                runner._changed.wait_for(
                    lambda: not is_full.is_set() or stops.is_set() or len(runner._num_open) > 1, TIMEOUT
                )
            return step()

        runner.loop.step = step_for_both

        async def attack_until_told() -> None:
            headers = {"Authorization": f"Bearer {KEYS[0]}"}
            async with httpx.AsyncClient(base_url=server.url, timeout=None, headers=headers) as client:
                asking = asyncio.create_task(_read(client, attack))
                await asyncio.to_thread(stops.wait, TIMEOUT)
                asking.cancel()

        attacker = threading.Thread(target=asyncio.run, args=(attack_until_told(),))
        attacker.start()
        try:
            assert is_full.wait(TIMEOUT)
            for _ in range(3):
                answer = server.client(KEYS[1]).completions.create(**SHORT)
                assert answer.choices[0].text == demo.text(demo.alone("SELECT", max_new_tokens=4))
            assert server.engine.load.num_waiting > 8 and server.engine.num_preemptions > 0
            headers = {"Authorization": f"Bearer {KEYS[1]}"}
            assert "vllm:num_preemptions_total" in server.get("/metrics", headers=headers).text
        finally:
            stops.set()
            attacker.join(TIMEOUT)
        wait_until(lambda: server.engine.load.num_running == 0)
        check_nothing_is_left(server)


async def _read(client: httpx.AsyncClient, body: dict) -> None:
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        async for _ in answer.aiter_bytes():
            pass


def test_whoever_becomes_requests_waits_for_one_of_each_other_key(demo):
    """Text becomes tokens, and tokens requests, in one thread: the first of all who wait is never far back."""
    with running(demo, keys=KEYS) as server:
        served, order, gate = server.models["demo"], [], threading.Event()

        async def work(namespace: str, number: int) -> None:
            CALLER.set(Caller(namespace))
            await served.in_worker(lambda: order.append((namespace, number)) or gate.wait(TIMEOUT))

        async def run() -> None:
            tasks = [asyncio.create_task(work("one", number)) for number in range(20)]
            while not order:
                await asyncio.sleep(0.001)
            tasks.append(asyncio.create_task(work("two", 0)))
            await asyncio.sleep(0)
            gate.set()
            await asyncio.gather(*tasks)

        asyncio.run(run())
    assert order.index(("two", 0)) <= 2 and len(order) == 21
