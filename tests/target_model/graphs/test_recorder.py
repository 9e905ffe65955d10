"""CUDA graphs, with CUDA in name only: what is called in which order, and what is left behind."""

import gc
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from hf_smartspec.target_model.graphs.recorder import CudaRecorder

DEVICE = torch.device("cuda", 1)


class Cuda:
    """Stands for `torch.cuda`; notes what is asked of it."""

    def __init__(self):
        self.said, self.reserved, self.num_pools = [], 0, 0
        self.stream_in_use = "default"

    @contextmanager
    def device(self, device):
        self.said.append(f"device {device.index}")
        yield

    @contextmanager
    def stream(self, stream):
        self.stream_in_use = stream
        try:
            yield
        finally:
            self.stream_in_use = "default"

    def graph_pool_handle(self):
        self.num_pools += 1
        return (0, self.num_pools)

    def new_graph(self):
        def begin(pool, capture_error_mode):
            assert self.stream_in_use == "own" and capture_error_mode == "thread_local" and not gc.isenabled()
            self.said.append(f"begin {pool[1]}")

        return SimpleNamespace(
            capture_begin=begin, capture_end=lambda: self.said.append("end"), replay=lambda: self.said.append("replay")
        )

    def memory_reserved(self):
        self.reserved += 60
        return self.reserved


@pytest.fixture
def cuda(monkeypatch):
    own = Cuda()
    for name in ("device", "stream", "graph_pool_handle", "memory_reserved"):
        monkeypatch.setattr(torch.cuda, name, getattr(own, name))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", own.new_graph)
    monkeypatch.setattr(torch.cuda, "Stream", lambda: "own")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=1600))
    return own


def test_what_is_called_is_recorded_on_a_stream_of_its_own(cuda):
    recorder = CudaRecorder(DEVICE)
    replay, result = recorder.record(lambda: cuda.said.append("called") or "logits")
    replay()
    assert result == "logits" and cuda.said == ["device 1", "begin 1", "called", "end", "replay"]
    assert cuda.stream_in_use == "default" and gc.isenabled()


def test_a_failure_leaves_nothing_behind(cuda):
    def fail():
        raise ZeroDivisionError

    recorder = CudaRecorder(DEVICE)
    with pytest.raises(ZeroDivisionError):
        recorder.record(fail)
    assert cuda.said[-1] == "end" and cuda.stream_in_use == "default" and gc.isenabled()
    recorder.record(lambda: None)


def test_memory_is_counted_and_its_pool_is_left_with_its_graphs(cuda):
    recorder = CudaRecorder(DEVICE)
    recorder.record(lambda: None)
    assert recorder.has_room()
    recorder.record(lambda: None)
    assert not recorder.has_room() and cuda.num_pools == 1
    recorder.forget()
    assert recorder.has_room()
    recorder.record(lambda: None)
    assert cuda.said[-2:] == ["begin 2", "end"]
