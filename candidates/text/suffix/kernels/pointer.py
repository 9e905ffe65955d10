"""
Pointers (compiled): a place in an earlier text that is still followed after a token that differs.

Contexts end where a text departs from the passage that it repeats: after a changed name or number, only a token or two
match, though the earlier text often goes on to be repeated. So per request, one place in its own text and one in the
others' are kept and moved on with every token, expected or not. After an unexpected one, the place is searched nearby,
since the changed part may be longer or shorter. How far a pointer can be trusted is learnt (`mix`).
"""

import numpy as np

from .....jit import inner
from .store import BLOCK_BITS

# Fields of a pointer, which is known by where they begin in a piece of int32 memory
POSITION, RECORD = range(2)
"""Text position of the token that is expected next (-1: there is no pointer); how it fared (`_record`)."""
POINTER = 2
NUM_POINTERS = 2  # by kind of tree: the request's own, the others

_BITS = 6
_LONGEST_RUN = 2**_BITS - 1
_MOST_MISSES = 8  # a pointer that missed more often is given up
_FORGIVEN = 8  # tokens as expected, after which earlier misses are forgotten
_SHORT_RUN = 2  # tokens as expected between two misses, which leave what is known of the run before
_BACK, _AHEAD = 4, 8  # how far a place is looked for anew

_LEAST_TO_SET, _LEAST_TO_MOVE = 2, 9  # length of a context that sets a pointer, or moves one that followed long before
_LONG_BEFORE = 4

# States of pointers: the run of tokens as expected, misses before it, and the run before those
RUNS, MISSES, BEFORE = 9, 3, 3
NUM_STATES = RUNS * MISSES * BEFORE


@inner
def _record(run, before, misses):
    """
    Unpack a pointer's record: tokens that came as expected since the last miss, those before it, and recent misses.
    """
    return run | before << _BITS | misses << 2 * _BITS


@inner
def run_of(record):
    """Return how many tokens came as expected since the last miss, up to 63."""
    return record & _LONGEST_RUN


@inner
def _before(record):
    return record >> _BITS & _LONGEST_RUN


@inner
def state_of(record):
    """Return the state of a pointer, 0 to `NUM_STATES` - 1; -1 where it adds no evidence to that of contexts."""
    run, before, misses = run_of(record), _before(record), record >> 2 * _BITS
    if (before < _LONG_BEFORE and run < 16) or (run == 0 and misses > 1):
        return -1
    runs = run if run < 3 else 3 + (run > 4) + (run > 8) + (run > 15) + (run > 30) + (run > 60)
    return (runs * MISSES + (misses > 1) + (misses > 4)) * BEFORE + (before > 7) + (before > 15)


@inner
def set_pointer(memory, at, position, run):
    """Point to the token at `position`, before which the last `run` tokens stand."""
    memory[at + POSITION], memory[at + RECORD] = position, _record(min(run, _LONGEST_RUN), 0, 0)


@inner
def least_to_set(memory, at):
    """Return how long a context must be, in tokens, for the pointer to move to where it is followed."""
    if memory[at + POSITION] < 0:
        return np.int64(_LEAST_TO_SET)
    run, before = run_of(memory[at + RECORD]), _before(memory[at + RECORD])
    return np.int64(max(run + 1, _LEAST_TO_MOVE if before >= _LONG_BEFORE else _LEAST_TO_SET))


@inner
def advance(s, memory, at, target, to, token):
    """Write the pointer one token on to `target[to:]`."""
    position, record = np.int64(memory[at + POSITION]), memory[at + RECORD]
    target[to + POSITION] = -1
    if position < 0 or s.text[position] < 0:
        return
    run, before, misses = run_of(record), _before(record), record >> 2 * _BITS
    if s.text[position] == token:
        run = min(run + 1, _LONGEST_RUN)
        misses = misses if run < _FORGIVEN else 0
    elif misses < _MOST_MISSES:
        before, misses = run if run > _SHORT_RUN else before, misses + 1
        position = _nearby(s, position, token)
        run = np.int64(s.text[position] == token)
    else:
        return
    target[to + POSITION], target[to + RECORD] = position + 1, _record(run, before, misses)


@inner
def _nearby(s, position, token):
    """Return where the token stands near a position of a text; the position itself if it does not."""
    for k in range(1, _AHEAD + 1):
        if s.text[position + k] == token:
            return position + k
        if s.text[position + k] < 0:  # the text's end
            break
    for k in range(1, _BACK + 1):
        if position - k < 0 or (position - k) >> BLOCK_BITS != position >> BLOCK_BITS:  # another text may stand there
            break
        if s.text[position - k] == token:
            return position - k
    return position
