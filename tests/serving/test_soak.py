"""Many requests from many threads, over all sources: each is answered exactly once, with its own tokens."""

import gc
import os
import threading
from functools import partial

import numpy as np
import pytest

from hf_smartspec import DraftModelCandidates, Engine, PromptLookupCandidates, SmartSpecConfig, SuffixTreeCandidates
from hf_smartspec.target_model.compat import RequestStatus

from ..covering import IS_EXHAUSTIVE
from ..generate.helpers import noisy_copy, tiny_llama
from .helpers import TIMEOUT, all_alone, random_requests

NUM_REQUESTS = 10_000 if IS_EXHAUSTIVE else 60
NUM_CLIENTS = 6


class Client:
    """
    Sends requests, one or several at a time; reads them to the end, stops reading in the middle, cancels, or leaves the
    result to be fetched much later.
    """

    def __init__(self, engine: Engine, asked: list, expected: list, choices: list, number: int, count: int):
        self.engine, self.asked, self.expected, self.choices = engine, asked, expected, choices
        self.rng = np.random.default_rng(number)
        self.number, self.count = number, count
        self.num_answers = self.num_cancelled = 0
        self.faults: list[str] = []

    def run(self) -> None:
        try:
            for index in range(self.count):
                self.send(f"{self.number}-{index}")
        except BaseException as error:
            self.faults.append(repr(error))
            raise

    def send(self, name: str) -> None:
        which = int(self.rng.integers(len(self.asked)))
        asked, habit = self.asked[which], self.rng.choice(["result", "stream", "stop reading", "cancel"])
        choice = self.choices[int(self.rng.integers(len(self.choices)))]
        self.engine.add_request(
            asked.prompt, request_id=name, streaming=habit != "result", assistant=choice, **asked.arguments
        )
        if habit == "stream":
            *_, last = self.engine.request_id_iter(name)
        else:
            first = next(self.engine.request_id_iter(name)) if habit == "stop reading" else None
            if habit == "cancel":
                self.engine.cancel_request(name)
            # A first output that is the last one has been fetched thereby.
            last = first if first and first.is_finished() else self.engine.get_result(name, timeout=TIMEOUT)
        self.check(name, last, self.expected[which], habit)

    def check(self, name, output, expected, habit) -> None:
        if output is None:
            self.faults.append(f"{name} was never answered")
            return
        self.num_answers += 1
        self.num_cancelled += output.finish_reason == "cancelled"
        is_right = output.generated_tokens == expected
        if habit == "cancel" and output.status == RequestStatus.FAILED:
            is_right = output.generated_tokens == expected[: len(output.generated_tokens)]
        if not is_right or self.engine.get_result(name, timeout=0) is not None:
            self.faults.append(f"{name}: {output}, expected {expected}")


def serve(engine: Engine, asked: list, expected: list, choices: list, count: int) -> list[Client]:
    clients = [Client(engine, asked, expected, choices, number, count // NUM_CLIENTS) for number in range(NUM_CLIENTS)]
    threads = [threading.Thread(target=client.run) for client in clients]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not [fault for client in clients for fault in client.faults]
    return clients


def test_soak():
    model = tiny_llama()
    asked = random_requests(40, seed=11)
    expected = all_alone(model, asked)
    draft = DraftModelCandidates(noisy_copy(model))
    suffix = SuffixTreeCandidates(max_bytes=2**21, min_probability=0.02)
    lookup = PromptLookupCandidates()
    namespaces = [SmartSpecConfig(suffix, namespace=name, reads=("shared",)) for name in ("a", "b")]
    choices = [None, "none", draft, lookup, SmartSpecConfig(draft, num_nodes=2), *namespaces]
    threads = threading.active_count()
    engine = Engine(model, suffix, max_batch_size=8, max_prefill_tokens=16, max_kv_bytes=2**20)
    serves = partial(serve, engine, asked, expected, choices)
    with engine:
        serves(NUM_REQUESTS // 3)
        before = resident_bytes()
        clients = serves(NUM_REQUESTS)
        after = resident_bytes()
    count = NUM_REQUESTS // NUM_CLIENTS * NUM_CLIENTS
    assert sum(client.num_answers for client in clients) == count
    assert 0 < sum(client.num_cancelled for client in clients) < count
    assert engine.statistics.accepted_tokens > 0
    assert threading.active_count() == threads and not engine.results.is_open()
    assert after - before < 64 * 2**20, "memory grows"
    assert not draft._states and not suffix._requests and not engine._runner._pending


def resident_bytes() -> int:
    gc.collect()
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        pytest.skip("resident memory is read from /proc")
