"""Pointers: places in earlier texts that are followed on behind a token that differs."""

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_smartspec import SuffixTreeCandidates
from hf_smartspec.candidates.committed import Committed, Likeliest
from hf_smartspec.candidates.text.suffix.kernels import pointer
from hf_smartspec.candidates.text.suffix.kernels.expand import END_OF
from hf_smartspec.candidates.text.suffix.kernels.mix import CANDIDATE, CELLS, TOKEN
from hf_smartspec.candidates.text.suffix.kernels.pointer import NUM_STATES, POSITION, RECORD
from hf_smartspec.candidates.text.suffix.kernels.store import BLOCK, END, new_store
from hf_smartspec.jit import compiled

advance, set_pointer, state_of, run_of = (
    compiled(getattr(pointer, name).py_func) for name in ("advance", "set_pointer", "state_of", "run_of")
)

BEFORE = list(range(100, 116))  # what the request repeats
CHANGED = 500
COMMON = 7
BEHIND = list(range(200, 210))  # what stands behind that, behind a common token


class PlainPointer(SimpleNamespace):
    """What `advance` does, in plain Python: position, run, run before, misses; position None: given up."""

    def advance(self, text, token):
        if self.position is None or self.position >= len(text):
            self.position = None
        elif text[self.position] == token:
            self.run, self.position = min(self.run + 1, 63), self.position + 1
            self.misses = 0 if self.run >= 8 else self.misses
        elif self.misses == 8:
            self.position = None
        else:
            self.before, self.misses = self.run if self.run > 2 else self.before, self.misses + 1
            block = self.position // BLOCK * BLOCK
            ahead = range(self.position + 1, min(self.position + 9, len(text)))
            back = range(self.position - 1, max(self.position - 5, block - 1), -1)
            found = next((place for place in (*ahead, *back) if text[place] == token), None)
            self.run = int(found is not None)
            self.position = 1 + (self.position if found is None else found)


@given(
    st.lists(st.integers(0, 6), min_size=1, max_size=2 * BLOCK),
    st.integers(0, 2 * BLOCK),
    st.integers(1, 80),
    st.lists(st.one_of(st.none(), st.integers(0, 6)), max_size=120),
)
def test_a_pointer_moves_as_a_plain_one_does(text, position, run, tokens):
    store = new_store(4 * BLOCK, 1, 1)
    store.text[: len(text) + 1] = [*text, END]
    position = min(position, len(text))
    plain = PlainPointer(position=position, run=min(run, 63), before=0, misses=0)
    memory = np.zeros(4, np.int32)
    set_pointer(memory, 0, position, run)
    for token in tokens:
        if token is None and plain.position is not None and plain.position < len(text):
            token = text[plain.position]  # as expected
        advance(store, memory, 0, memory, 2, token or 0)
        memory[:2] = memory[2:]
        plain.advance(text, token or 0)
        assert memory[POSITION] == (-1 if plain.position is None else plain.position)
        if plain.position is not None:
            assert memory[RECORD] == plain.run | plain.before << 6 | plain.misses << 12
            assert run_of(memory[RECORD]) == plain.run
            assert -1 <= state_of(memory[RECORD]) < NUM_STATES


def started(text, outputs=(), **options):
    source = SuffixTreeCandidates(max_bytes=2**20, **options)
    numbers = source.add_outputs(outputs, progress=False)
    source.start("a", np.array(text))
    return source, numbers


def noise():
    """The common token, behind which so much stands that what a pointer expects is none of the candidates."""
    return [token for other in range(300, 320) for token in (COMMON, other, COMMON, other)]


def drafted_behind(source, committed):
    """What is drafted behind tokens that are committed one by one."""
    for token in committed:
        source.propose(["a"], [16])
        source.observe("a", np.array([token]))
    return source.propose(["a"], [16])[0].tokens.tolist()


EARLIER = [*BEFORE, CHANGED, COMMON, *BEHIND]


@pytest.mark.parametrize("new", [[600], [600, 601, 602], []], ids=["other", "longer", "none"])
def test_the_text_goes_on_behind_what_differs(new):
    source, _ = started([*EARLIER, *noise(), 900])
    assert BEHIND[0] in drafted_behind(source, [*BEFORE, *new, COMMON])
    source, _ = started([*EARLIER, *noise(), 900])
    assert BEHIND[0] not in drafted_behind(source, [*new, COMMON]), "nothing was repeated before"


def test_drafts_run_on_behind_what_differs():
    source, _ = started([*EARLIER, *noise(), 900])
    tokens = drafted_behind(source, [*BEFORE, 600, COMMON])
    assert set(BEHIND[:3]) <= set(tokens)


def test_other_texts_are_pointed_to_as_long_as_they_are_kept():
    source, (first, _) = started([900], [EARLIER, noise()])
    assert BEHIND[0] in drafted_behind(source, [*BEFORE, 600, COMMON])
    source.remove_output(first)
    assert BEHIND[0] not in drafted_behind(source, [])
    source.stop("a")
    assert source.num_cached_tokens() > 0


def test_removed_texts_are_not_pointed_to_while_their_tokens_serve_others():
    """Edges of a removed text's strings may lie in it while another text has the same ones."""
    source, (first, _, _) = started([900], [EARLIER, [*BEFORE, 800], noise()])
    source.remove_output(first)
    assert BEHIND[0] not in drafted_behind(source, [*BEFORE, 600, COMMON])


def test_a_new_request_in_the_same_slot_points_nowhere():
    source, _ = started([*EARLIER, *noise(), 900], keep_outputs=False)
    drafted_behind(source, [*BEFORE, 600, COMMON])
    source.stop("a")
    source.start("a", np.array([*noise(), 900, COMMON]))
    assert BEHIND[0] not in drafted_behind(source, [])


def test_a_text_that_moves_is_pointed_to_again():
    source, _ = started([*EARLIER, *noise(), 900])
    first_place = source._requests["a"].start
    while source._requests["a"].start == first_place:
        source.observe("a", np.full(40, 950))
    assert BEHIND[0] in drafted_behind(source, [*BEFORE, 600, COMMON])


def test_pointers_are_trusted_as_far_as_they_come_true():
    def trust(following):
        source, _ = started([900], keep_outputs=False)
        for name in range(1000, 1040):
            source.stop("a")
            source.start("a", np.array([*EARLIER, *noise(), 900]))
            drafted_behind(source, [*BEFORE, name])
            source.observe("a", np.array([COMMON]))
            tree = source.propose(["a"], [16])[0]
            source.observe("a", np.array([following, 900]))
        return dict(zip(tree.tokens.tolist(), tree.probs.tolist())).get(BEHIND[0], 0.0)

    assert trust(BEHIND[0]) > 0.8 > 0.2 > trust(2000)


def test_pointers_tell_of_what_the_target_thought_likely_too():
    source, _ = started([*EARLIER, 900])
    drafted_behind(source, [*BEFORE, 600])
    shown = map(np.array, ([600], [COMMON], [[BEHIND[0], 777]]))
    likeliest = Likeliest(*shown, np.array([[0.5, 0.4]], np.float32))
    source.observe("a", Committed(np.zeros(0, np.int64), likeliest=likeliest))
    drafted_behind(source, [COMMON])
    scratch, slot = source._slots._scratch, source._requests["a"].slot
    candidates = scratch.candidates[slot].reshape(-1, CANDIDATE)[: scratch.grown[slot, END_OF]]
    cells = {fields[TOKEN]: fields[CELLS + 9] for fields in candidates.tolist()}
    assert cells[BEHIND[0]] == cells[777] + 1 > 0, "expected, and not"
