"""Programs run by several threads: each operator once, with or without threads that are late."""

import ctypes

import torch

from hf_smartspec.cpu.kernels import program as codes
from hf_smartspec.cpu.program import Program, address_of


def adding(x: torch.Tensor, added: torch.Tensor, times: int) -> Program:
    """A program that adds to `x` in place, once in each operator, so that every sum depends on the one before."""
    own = {"num_tokens": len(x), "size": x.shape[1], "factor": 1.0}
    fields = {"x": x.data_ptr(), "added": added.data_ptr()}
    return Program(x.dtype, [(codes.ADD, own | fields) for _ in range(times)])


def test_a_thread_that_is_late_is_not_waited_for_and_does_nothing():
    x, added = torch.zeros(5, 32), torch.arange(160.0).view(5, 32)
    program = adding(x, added, 3)
    function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(address_of(x.dtype))
    function(program._address)
    assert torch.equal(x, 3 * added)
    function(program._address)  # all is done, and what is shared stays as it is
    assert torch.equal(x, 3 * added)


def test_more_threads_than_processors_compute_what_one_does():
    def found(num_threads: int) -> torch.Tensor:
        x, y = torch.ones(3, 4096), torch.ones(3, 4096)
        own = {"num_tokens": 3, "size": 4096, "factor": 0.125}
        first, second = ({"x": a.data_ptr(), "added": b.data_ptr()} for a, b in ((x, y), (y, x)))
        program = Program(x.dtype, [(codes.ADD, own | fields) for _ in range(100) for fields in (first, second)])
        program.run(num_threads)
        return x

    expected = found(1)
    for _ in range(10):
        assert all(torch.equal(found(number), expected) for number in (2, 3, 16))
