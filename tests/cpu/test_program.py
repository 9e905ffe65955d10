"""Programs run by several threads: each operator once, with or without threads that are late."""

import ctypes

import pytest
import torch

from hf_smartspec.cpu.few_tokens import has_kernels
from hf_smartspec.cpu.kernels import program as codes
from hf_smartspec.cpu.program import DTYPES, Program, address_of, column

pytestmark = pytest.mark.skipif(not all(map(has_kernels, DTYPES)), reason="no compiled code for this CPU")


def run_alone(program: Program) -> None:
    """Run a program as one of several threads, which has not met any other one yet."""
    ctypes.CFUNCTYPE(None, ctypes.c_void_p)(address_of(program.dtype))(program._address)


def test_a_thread_that_is_late_is_not_waited_for_and_does_nothing():
    x, added = torch.zeros(5, 32), torch.arange(160.0).view(5, 32)
    own = {"num_tokens": 5, "size": 32, "factor": 1.0, "x": x.data_ptr(), "added": added.data_ptr()}
    program = Program(x.dtype, [(codes.ADD, own)] * 3)
    run_alone(program)
    assert torch.equal(x, 3 * added)
    run_alone(program)  # all is done, and what is shared stays as it is
    assert torch.equal(x, 3 * added)


@pytest.mark.parametrize("num_tokens", [6, 32])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_thread_that_enters_when_no_share_is_left_writes_nothing(dtype, num_tokens):
    """Try few tokens, and many, whose products are computed in parts where the CPU has AVX-512."""
    weight, tokens = torch.randn(48, 32).to(dtype), torch.randn(num_tokens, 32).to(dtype)
    size = num_tokens * max(32, 12 * 16)
    outputs, scratch = torch.zeros(num_tokens, 48, dtype=dtype), torch.zeros(2, size)
    numbers = {"num_tokens": num_tokens, "num_inputs": 32, "num_outputs": 48, "share": 3, "at_once": num_tokens}
    numbers |= {"scratch_size": size, "part_rows": 12}
    tensors = {"weight": weight, "tokens": tokens, "outputs": outputs, "scratch": scratch}
    fields = numbers | {name: tensor.data_ptr() for name, tensor in tensors.items()}
    program = Program(dtype, [(codes.MULTIPLY, fields)])
    run_alone(program)
    torch.testing.assert_close(outputs, tokens @ weight.T)
    # As if the thread had looked at the state before others left the operator, and entered after that.
    program.rows[:, column(codes.MULTIPLY, "next") - 1] = 0
    outputs.zero_()
    scratch.zero_()
    run_alone(program)
    assert not outputs.any() and not scratch.any()


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
