"""Programs: operators that threads run one after the other, in one call."""

from ...jit import callback, inner
from ...jit.pointers import ahead, bfloat16_at, call_at, float32_at, float64_at, int64_at
from .attend import attend
from .gates import gate
from .int8 import levels, multiply_int8
from .multiply import multiply
from .norms import add, norm
from .recur import convolve, recur
from .rotate import rotate
from .screen import bound, pick

# Compiled code is called with the address of int64: the number of operators, 0 or the address of the function that
# waits for the other threads, and then for each operator its code and its fields, `SIZE` numbers in all.
SIZE = 32
HEADER = 2
MULTIPLY, NORM, ADD, GATE, ROTATE, ATTEND, LEVELS, INT8, CONVOLVE, RECUR, SCORE, BOUND, PICK = range(13)


@callback
def run_float32(address):
    _run(address, float32_at(0), None)


@callback
def run_bfloat16(address):
    _run(address, bfloat16_at(0), None)


@callback
def run_widened(address):
    """Run a program of numbers in bfloat16, some of which products widen."""
    _run(address, bfloat16_at(0), float32_at(0))


@inner
def _run(address, kind, wide_kind):
    tape, numbers = int64_at(address), float64_at(address)
    for number in range(tape[0]):
        place = HEADER + number * SIZE
        code, a, fields = tape[place], ahead(tape, place + 1), ahead(numbers, place + 1)
        if code == MULTIPLY:
            multiply(a, kind, wide_kind)
        elif code == NORM:
            norm(a, fields, kind)
        elif code == ADD:
            add(a, fields, kind)
        elif code == GATE:
            gate(a, kind)
        elif code == ROTATE:
            rotate(a, kind)
        elif code == ATTEND:
            attend(a, fields, kind)
        elif code == LEVELS:
            levels(a, kind)
        elif code == INT8:
            multiply_int8(a, kind)
        elif code == CONVOLVE:
            convolve(a)
        elif code == RECUR:
            recur(a, fields)
        elif code == SCORE:  # in float32, whatever the kind
            multiply_int8(a, float32_at(0))
        elif code == BOUND:
            bound(a, kind)
        elif code == PICK:
            pick(a, fields, kind)
        if tape[1]:
            call_at(tape[1])
