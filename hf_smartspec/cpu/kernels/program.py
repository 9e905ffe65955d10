"""Programs: operators that threads run one after the other, in one call."""

from ...jit import callback, inner
from ...jit.pointers import add_to, ahead, bfloat16_at, call_at, float32_at, float64_at, int64_at, pause, read
from .arrange import arrange
from .attend import attend
from .experts import combine, group, multiply_each, route
from .gates import clamped_gate, gate, times
from .int8 import levels, multiply_levels
from .multiply import multiply, multiply_narrow, multiply_wide
from .norms import add, gated_norm, norm, state_norm
from .recur import convolve, recur
from .rotate import merge, rotate
from .screen import bound, pick

# Compiled code is called with the address of int64: the number of operators, the address of the function that lets
# other threads run, and then for each operator its code, its state, and its fields, `SIZE` numbers in all. The state is
# 0 at first: threads that are in the operator, and `_LEFT` times those that have left it.
SIZE = 32
HEADER = 2
PLACE = 2  # of an operator's first field
_LEFT = 2**32
_SPINS = 1000  # looks at a state, of some 50 ns each, before other threads get this one's processor
(
    MULTIPLY, NARROW, NORM, ADD, GATE, ROTATE, ATTEND, LEVELS, INT8, CONVOLVE, RECUR, GATED_NORM, TIMES, ROUTE,
    GROUP, EXPERTS, COMBINE, SCORE, BOUND, PICK, CLAMPED_GATE, INT4, WIDE_MULTIPLY, WIDE_ROUTE,
    MERGE, ARRANGE, STATE_NORM,
) = range(27)  # fmt: skip


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
        code, state = tape[place], ahead(tape, place + 1)
        a, fields = ahead(tape, place + PLACE), ahead(numbers, place + PLACE)
        # Threads take shares of the work until none is left, so that an operator is done when one thread has left it
        # and none is in it. Those that are late, as where other processes use their processor, are not waited for. One
        # may even enter when others are at a later operator: so a thread writes nothing before it has a share.
        if read(state) < _LEFT:
            add_to(state, 1)
            _operate(code, a, fields, kind, wide_kind)
            add_to(state, _LEFT - 1)
        _wait(state, tape[1])


@inner
def _wait(state, give_way):
    """Wait until the threads that are in an operator, one of which has left it, have left it, too."""
    spins = 0
    while read(state) & (_LEFT - 1):
        spins += 1
        if spins < _SPINS:
            pause()
        else:
            call_at(give_way)


@inner
def _operate(code, a, fields, kind, wide_kind):
    if code == MULTIPLY:
        multiply(a, kind, wide_kind)
    elif code == NARROW:
        multiply_narrow(a, kind)
    elif code == NORM:
        norm(a, fields, kind)
    elif code == ADD:
        add(a, fields, kind)
    elif code == GATE:
        gate(a, kind)
    elif code == ROTATE:
        rotate(a, fields, kind)
    elif code == ATTEND:
        attend(a, fields, kind)
    elif code == LEVELS:
        levels(a, kind)
    elif code == INT8:
        multiply_levels(a, kind, False)
    elif code == INT4:
        multiply_levels(a, kind, True)
    elif code == CONVOLVE:
        convolve(a, kind)
    elif code == RECUR:
        recur(a, fields, kind)
    elif code == GATED_NORM:
        gated_norm(a, fields, kind)
    elif code == TIMES:
        times(a, kind)
    elif code == ROUTE:
        route(a, fields, kind)
    elif code == GROUP:
        group(a, kind)
    elif code == EXPERTS:
        multiply_each(a, kind, wide_kind)
    elif code == COMBINE:
        combine(a, fields, kind)
    elif code == SCORE:  # in float32, whatever the kind
        multiply_levels(a, float32_at(0), False)
    elif code == BOUND:
        bound(a, kind)
    elif code == PICK:
        pick(a, fields, kind)
    elif code == CLAMPED_GATE:
        clamped_gate(a, fields, kind)
    elif code == WIDE_MULTIPLY:
        multiply_wide(a, kind)
    elif code == WIDE_ROUTE:  # of scores in float32, whatever the kind
        route(a, fields, float32_at(0))
    elif code == MERGE:
        merge(a, kind)
    elif code == ARRANGE:
        arrange(a, kind)
    elif code == STATE_NORM:
        state_norm(a, fields, kind)
