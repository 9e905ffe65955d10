"""Compiled code run by the threads that run torch's own operators."""

import ctypes
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import torch

_SHARE = 2**18  # weights that a thread takes at a time


def has_threads() -> bool:
    """Return whether torch's threads can be used: those of OpenMP, through the interface that compilers call."""
    return _parallel() is not None


def run(function: int, argument: int, num_threads: int) -> None:
    """
    Call the function at an address with `argument` in `num_threads` threads, this one among them, and wait for them.
    The threads are torch's, which keep spinning for a while after their work and would get in the way of any others. As
    with torch's own operators, they are gone in a process forked from one that has used them.
    """
    _parallel()(function, argument, num_threads, 0)


def share_of(num_outputs: int, num_inputs: int, multiple: int) -> int:
    """
    Return how many outputs a thread takes at a time: enough to read memory in one go, a quarter of its part at most.
    """
    return _share_of(num_outputs, num_inputs, multiple, torch.get_num_threads())


@lru_cache(maxsize=1024)
def _share_of(num_outputs: int, num_inputs: int, multiple: int, num_threads: int) -> int:
    num = min(_SHARE // num_inputs, num_outputs // (4 * num_threads))
    return max(num - num % multiple, multiple)


@cache
def give_way() -> int:
    """Return the address of the function that lets other threads of the system run on this one's processor."""
    return ctypes.cast(ctypes.CDLL(None).sched_yield, ctypes.c_void_p).value or 0


def _library() -> Any:
    """Return the library that torch is linked with."""
    return ctypes.CDLL(str(Path(torch.__file__).with_name("lib") / "libtorch_cpu.so"))


@cache
def _parallel() -> Any:
    """
    Return `GOMP_parallel(function, argument, num_threads, flags)` of the library that torch is linked with, or None.
    """
    if not torch.backends.openmp.is_available():
        return None
    try:
        function = _library().GOMP_parallel
    except (OSError, AttributeError):  # another system, or another compiler
        return None
    function.argtypes, function.restype = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint), None
    return function
