"""Parts of `benchmarks gpu`: drafts of fixed acceptance, what is counted, and what is held against targets."""

from collections import Counter
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest
from torch.autograd import DeviceType

from benchmarks.decode.gpu import waits
from benchmarks.decode.gpu.bandwidth import cache_bytes, weight_bytes
from benchmarks.decode.gpu.speed import FixedAcceptance
from benchmarks.decode.gpu.targets import targets
from tests.models import new_model


@pytest.mark.parametrize("rate", [0.0, 0.6, 1.0])
def test_drafts_are_right_as_often_as_asked(rate):
    text, prompt, num = np.arange(4000) % 50, np.array([1, 2, 3]), 0
    source = FixedAcceptance({prompt.tobytes(): text}, rate, vocab_size=60)
    source.start("a", prompt)
    for first in range(0, 4000, 8):
        (chain,) = source.propose(["a"], [8])
        assert chain.probs.tolist() == pytest.approx([rate] * 8)
        num += int((chain.tokens == text[first : first + 8]).sum())
        source.observe("a", text[first : first + 8])
    assert abs(num / 4000 - rate) < 0.04  # five standard deviations
    assert len(source.propose(["a"], [8])[0]) == 0, "nothing is left to say"
    source.stop("a")


def test_every_weight_that_a_forward_reads_counts_once():
    for is_tied in (True, False):
        model = new_model("llama", tie_word_embeddings=is_tied)
        embeddings = model.get_input_embeddings().weight
        everything = sum(item.nbytes for item in model.parameters())
        assert weight_bytes(model) == everything - (0 if is_tied else embeddings.nbytes)
    config = model.config
    assert cache_bytes(model) == 2 * 4 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim


def test_calls_of_the_runtime_and_the_time_of_kernels_are_counted(monkeypatch):
    names = ["cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernelEx", "cudaGraphLaunch", "cudaMemcpyAsync",
             "cudaStreamSynchronize", "cudaEventSynchronize", "cudaStreamIsCapturing"]  # fmt: skip
    events = [(name, DeviceType.CPU, 7) for name in names] + [("gemm", DeviceType.CUDA, 2_000_000)] * 2
    events = [
        SimpleNamespace(name=lambda n=name: n, device_type=lambda k=kind: k, duration_ns=lambda d=duration: d)
        for name, kind, duration in events
    ]

    @contextmanager
    def recorded(activities):
        yield SimpleNamespace(profiler=SimpleNamespace(kineto_results=SimpleNamespace(events=lambda: events)))

    monkeypatch.setattr(waits, "profile", recorded)
    counts: Counter = Counter()
    with waits._profiling(counts):
        pass
    assert counts == {"launches": 3, "graphs": 1, "copies": 1, "waits": 2, "device_seconds": 0.004, "operations": 0}


def test_what_a_call_costs_by_itself_is_no_part_of_a_step(monkeypatch):
    def call(num_tokens):
        steps = num_tokens // 2
        counted[0]["launches"] += 50 + 7 * steps
        return steps

    @contextmanager
    def counting(counts):
        counted[0] = counts
        yield

    counted = [Counter()]
    monkeypatch.setattr(waits, "_profiling", counting)
    row = waits._measured(call)
    assert row["steps"] == 4 and row["per_step"]["launches"] == 7


def speed(value, **more):
    return {"tokens_per_second": value} | more


def test_targets_hold_the_slowest_against_plain_decoding():
    results = {
        "verification 7B": {"batch 1, 16 tokens": {"times_limit": 1.2}},
        "acceptance 7B": {
            "batch 1, generate": speed(10.0),
            "batch 1, acceptance 0.7": speed(26.0, steps=9),
            "batch 128, generate": speed(100.0),
            "batch 128, none": speed(99.0, steps=9),
            "batch 128, acceptance 0.7": speed(120.0, steps=9),
            "batch 128, generate_batch": speed(60.0),
        },
        "text 7B": {
            "own, batch 128, generate": speed(100.0),
            "own, batch 128, auto": speed(90.0, steps=9),
            "own, batch 128, generate_batch": speed(10.0),
        },
    }
    found = [item.check(results) for item in targets("7B", [128, 8])]
    assert [item["measured"] for item in found] == [1.2, 2.6, 0.9, None, 2.0]
    assert [item["reached"] for item in found] == [False, True, False, None, True]
    assert found[0]["target"] == "at most 1.15" and found[1]["target"] == "at least 2.5"
    assert all(item.check({})["reached"] is None for item in targets("7B", [8]))
