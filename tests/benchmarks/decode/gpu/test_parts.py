"""Parts of `benchmarks gpu`: drafts of fixed acceptance, what is repeated, counted, and held against targets."""

from collections import Counter
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.autograd import DeviceType

from benchmarks.decode.gpu import serving, waits
from benchmarks.decode.gpu.arguments import SECTIONS, SHAPES
from benchmarks.decode.gpu.bandwidth import cache_bytes, weight_bytes
from benchmarks.decode.gpu.command import make_sections
from benchmarks.decode.gpu.shapes import Plan, Workload
from benchmarks.decode.gpu.speed import FixedAcceptance
from benchmarks.decode.gpu.targets import targets
from benchmarks.kit.time_limit import OutOfTimeError
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


def timed(world, *seconds):
    """Measure a way whose runs take these seconds; after the last one, it is stopped."""

    @contextmanager
    def way(model, work, batch_size):
        yield lambda: {"seconds": taken.pop(0)} if taken else stop()

    def stop():
        raise OutOfTimeError

    taken = list(seconds)
    return serving.measure(world, "7B", lambda: Workload([np.arange(3)], [np.arange(12)]), 1, way)


def world_of(**plan):
    model = new_model("llama")
    return SimpleNamespace(
        target=lambda shape: model, device=model.device, has_time=lambda: True, plan=Plan(warm_ups=2, runs=3, **plan)
    )


def test_workloads_are_answered_before_they_are_timed():
    row = timed(world_of(), 9e-3, 8e-3, 3e-3, 1e-3, 2e-3, 7e-3)
    assert row["warm_ups"] == [9e-3, 8e-3] and row["runs"] == [3e-3, 1e-3, 2e-3]
    assert row["seconds"] == 2e-3 and row["tokens_per_second"] == 12 / 2e-3


def test_long_runs_are_not_repeated():
    row = timed(world_of(repeated_for=2.0), 3.0, 1.5, 1.0, 1.0)
    assert row["warm_ups"] == [3.0] and row["runs"] == [1.5, 1.0]


def test_without_time_nothing_is_repeated_and_what_was_measured_is_kept():
    world = world_of()
    assert timed(world, 4e-3, 4e-3, 5e-3)["runs"] == [5e-3], "stopped in the second timed run"
    with pytest.raises(OutOfTimeError):
        timed(world, 4e-3, 4e-3)
    world.has_time = lambda: False
    row = timed(world, 4e-3, 5e-3, 6e-3)
    assert row["warm_ups"] == [4e-3] and row["runs"] == [5e-3]


def test_what_matters_most_is_measured_first():
    texts = dict.fromkeys(("random_text", "own_text", "recorded_text"))
    world = SimpleNamespace(plan=Plan(), names={"target": "", "draft": ""}, device=torch.device("cpu"), **texts)
    sections = {item.name: item for item in make_sections(world, {}, SECTIONS, SHAPES)}
    names = list(sections)
    assert names[:5] == ["correctness", "bandwidth", "verification 7B", "acceptance 7B", "text 7B"]
    assert names[-2:] == ["compiled 1B", "compiled 7B"], "compiling may take very long"
    acceptance = [case.name for case in sections["acceptance 7B"].cases()]
    wanted = [f"batch {size}, {way}" for size in (1, 128, 8, 32) for way in ("generate", "none", "acceptance 0.7")]
    assert acceptance[: len(wanted)] == wanted
    text = [case.name for case in sections["text 7B"].cases()]
    assert text.index("people's, batch 1, auto") < text.index("own, batch 1, assistant_model")
    assert len(set(text)) == len(text) == 2 * (5 + 2) + 3 * 5
