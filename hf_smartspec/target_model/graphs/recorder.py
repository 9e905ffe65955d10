"""Recording of a device's work, for replay."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Any, Protocol

import torch

_SHARE = 16  # recordings may take 1/16 of a GPU's memory before no more are made


_lock = Lock()  # one thread records at a time


class Recorder(Protocol):
    """Recorder of one device."""

    def has_room(self) -> bool:
        """Return whether there is memory for more recordings."""

    def forget(self) -> None:
        """Release the memory of all recordings, which are not replayed any more."""

    def record(self, function: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
        """
        Record the work of a function; return a function that repeats it on the same memory, and the result, which holds
        the values of the latest replay of any recording. The work need not have been done when this returns.
        """


class CudaRecorder:
    """
    Recorder by CUDA graphs. They share memory of their own, and a stream, so that state that libraries keep by stream
    is not shared with others.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        self._pool: Any = None
        self._taken = 0

    def has_room(self) -> bool:
        return self._taken <= torch.cuda.get_device_properties(self._device).total_memory // _SHARE

    def forget(self) -> None:
        self._pool, self._taken = None, 0  # a pool that no graph uses any more cannot be used again

    def record(self, function: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
        with _lock, torch.cuda.device(self._device), _no_garbage_collection():
            self._stream = self._stream or torch.cuda.Stream()
            self._pool = self._pool or torch.cuda.graph_pool_handle()
            graph = torch.cuda.CUDAGraph()
            torch.cuda.synchronize()
            before = torch.cuda.memory_reserved()
            with torch.cuda.stream(self._stream):
                # Other threads may use the device meanwhile.
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    result = function()
                finally:
                    graph.capture_end()
            self._taken += max(torch.cuda.memory_reserved() - before, 0)
        return graph.replay, result


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Turn garbage collection off: it may free memory of a device, which is not allowed while the device records."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


_RECORDERS: dict[str, Callable[[torch.device], Recorder]] = {"cuda": CudaRecorder}


def can_record(device: torch.device) -> bool:
    return device.type in _RECORDERS


def recorder_of(device: torch.device) -> Recorder:
    return _RECORDERS[device.type](device)
