"""
Pointers: one place in a text that goes on being followed behind a token that differs (compiled).

Contexts end where a text departs from what it repeats: behind a changed name or number, nothing longer than a token or
two matches. The old text often goes on as before all the same. So a place in it is kept per request and kind of tree
and moves on with every token, whether that was the expected one or not; where it was not, the place is looked for anew
nearby, since what was changed may have been longer or shorter. How far to trust it is learnt (`mix`), from how many
tokens came as expected since, before, and how often they did not.
"""

from ....jit import inner

# Fields of a pointer
POSITION, TRUST = range(2)
"""Where the next token is expected in the text, or -1; what `_trust` packs."""
POINTER = 2
NUM_POINTERS = 2  # in the request's own tree, and in one of the others

NUM_STATES = 9 * 3 * 3
MOST = 63
_MOST_MISSES = 8
_LONG = 8  # so many tokens as expected, and earlier misses are forgotten
_BACK, _AHEAD = 4, 8


@inner
def _trust(run, before, misses):
    """Tokens as expected since the last miss, before it, and recent misses."""
    return run | before << 6 | misses << 12


@inner
def run_of(trust):
    return trust & MOST


@inner
def state_of(trust):
    """0 to `NUM_STATES` - 1; -1 where contexts tell as much, or nothing does."""
    run, before, misses = trust & MOST, trust >> 6 & MOST, trust >> 12
    if before < 4 and run < 16 or run == 0 and misses > 1:
        return -1
    runs = run if run < 3 else 3 + (run > 4) + (run > 8) + (run > 15) + (run > 30) + (run > 60)
    befores = (before > 7) + (before > 15)
    return (runs * 3 + (misses > 1) + (misses > 4)) * 3 + befores


@inner
def set_pointer(memory, at, position, run):
    memory[at + POSITION], memory[at + TRUST] = position, _trust(min(run, MOST), 0, 0)


@inner
def advance(s, source, at, target, to, token):
    """The pointer one token on."""
    position, trust = source[at + POSITION], source[at + TRUST]
    if position < 0:
        target[to + POSITION] = -1
        return
    run, before, misses = trust & MOST, trust >> 6 & MOST, trust >> 12
    if s.text[position] == token:
        run = min(run + 1, MOST)
        target[to + POSITION], target[to + TRUST] = position + 1, _trust(run, before, 0 if run >= _LONG else misses)
        return
    misses += 1
    if misses > _MOST_MISSES or s.text[position] < 0:
        target[to + POSITION] = -1
        return
    before = run if run > 2 else before
    found, distance = _nearby(s, position, token), 0
    target[to + POSITION] = position + 1 if found < 0 else found + 1
    target[to + TRUST] = _trust(0 if found < 0 else 1, before, misses)


@inner
def _nearby(s, position, token):
    """Where the token stands near a position of a text, or -1."""
    for k in range(1, _AHEAD + 1):
        if s.text[position + k] < 0:
            break
        if s.text[position + k] == token:
            return position + k
    for k in range(1, _BACK + 1):
        if position - k < 0 or s.text[position - k] < 0:
            break
        if s.text[position - k] == token:
            return position - k
    return -1
