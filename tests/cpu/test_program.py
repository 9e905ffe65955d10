"""Programs run by several threads: each operator once, with or without threads that are late."""

import ctypes

import torch

from hf_smartspec.cpu.kernels import program as codes
from hf_smartspec.cpu.program import Program, address_of
from hf_smartspec.cpu.threads import give_way


def adding(x: torch.Tensor, added: torch.Tensor, times: int) -> Program:
    """A program that adds to `x` in place, once in each operator, so that every sum depends on the one before."""
    own = {"num_tokens": len(x), "size": x.shape[1], "factor": 1.0}
    fields = {"x": x.data_ptr(), "added": added.data_ptr()}
    return Program(x.dtype, [(codes.ADD, own | fields) for _ in range(times)])


def test_a_thread_that_is_late_is_not_waited_for_and_does_nothing():
    x, added = torch.zeros(5, 32), torch.arange(160.0).view(5, 32)
    program = adding(x, added, 3)
    program._tape[1] = give_way()  # as for several threads, of which one runs at first
    function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(address_of(x.dtype))
    function(program._address)
    assert torch.equal(x, 3 * added)
    function(program._address)  # all is done, and what is shared stays as it is
    assert torch.equal(x, 3 * added)


def test_more_threads_than_processors_run_every_operator_once():
    for num_threads in (2, 3, 16):
        x, added = torch.zeros(7, 512), torch.ones(7, 512)
        program = adding(x, added, 50)
        for _ in range(4):
            program.run(num_threads)
        assert torch.equal(x, 200 * added), f"by {num_threads} threads"
