"""Compiled code run by the threads that torch's own operators run in."""

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

import torch


def has_threads() -> bool:
    """Whether torch's threads can be used: those of OpenMP, by the interface that compilers call."""
    return _parallel() is not None


def run(function: int, argument: int, num_threads: int) -> None:
    """
    Lets so many threads, this one among them, call the function at an address with the same argument, and waits for
    them. Threads of another kind would get in the way of torch's, which keep spinning for a while when their work is
    done. As with torch's own operators, a process that was forked from one with threads has none.
    """
    _parallel()(function, argument, num_threads, 0)


@cache
def _parallel() -> Any:
    """`GOMP_parallel(function, argument, num_threads, flags)` of the library that torch was linked with, or None."""
    if not torch.backends.openmp.is_available():
        return None
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).with_name("lib") / "libtorch_cpu.so"))
        function = library.GOMP_parallel
    except (OSError, AttributeError):  # another system, or another compiler
        return None
    function.argtypes, function.restype = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint), None
    return function
