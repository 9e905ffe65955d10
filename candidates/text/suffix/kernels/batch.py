"""
A compiled call that takes in the tokens that a batch of requests committed, and drafts their next ones.

Compiled code is given the address of a table of addresses. Passing two dozen arrays from Python would cost more than
drafting does.
"""

from typing import NamedTuple

import numpy as np

from .....jit import compiled, inner
from .....jit.pointers import ahead, float32_at, float64_at, int32_at, int64_at
from .expand import (
    CANDIDATES_PER_NODE,
    DEPTH_LIMIT,
    LONGEST,
    MAX_TREES,
    NODE_FIELDS,
    NODES,
    PLACES_PER_NODE,
    WALKS,
    Scratch,
    learn_from,
    make_draft,
)
from .insert import extend
from .likely import LINE, NUM_LINES
from .mix import CANDIDATE, NUM_CELLS, NUM_FEATURES, NUM_SETS, Model
from .places import FROM, PLACE, WALK
from .pointer import NUM_POINTERS, POINTER, POSITION, advance
from .score import draft_by_score
from .store import REMOVALS, Store, set_clock

# Fields of `Slots.state`
START, END, NUM_POINTS, NUM_PENDING, NAMESPACE, HAS_DRAFT, REMOVALS_SEEN = range(7)
STATE = 8


class Slots(NamedTuple):
    """
    The running requests.

    Args:
        state (`np.ndarray` of shape `[slots, 8]`, int64): Where the text begins and ends, number of points, number of
            committed tokens that are not in the tree yet, line of the model, whether there is a draft to learn from,
            number of removals that the walks know of (-1: there are no walks).
        trees (`np.ndarray` of shape `[slots, 4]`, int32): Roots: the request's own tree, then namespaces; -1: none.
        points (`np.ndarray` of shape `[slots, (max_depth + 1) * 2]`, int32): See `insert.extend`.
        walks (`np.ndarray` of shape `[slots, (MAX_TREES - 1) * walks * 4]`, int32): See `places`.
        pending (`np.ndarray` of shape `[slots, nodes]`, int32): The tokens that are not in the tree yet: as many as a
            draft and the token after it.
        pointers (`np.ndarray` of shape `[slots, 4]`, int32): Into the request's own text and the others', see
            `pointer`.
    """

    state: np.ndarray
    trees: np.ndarray
    points: np.ndarray
    walks: np.ndarray
    pending: np.ndarray
    pointers: np.ndarray


def new_slots(num_slots: int, max_depth: int, num_walks: int, num_nodes: int) -> Slots:
    return Slots(
        state=np.zeros((num_slots, STATE), np.int64),
        trees=np.full((num_slots, MAX_TREES), -1, np.int32),
        points=np.zeros((num_slots, (max_depth + 1) * 2), np.int32),
        walks=np.zeros((num_slots, (MAX_TREES - 1) * num_walks * WALK), np.int32),
        pending=np.zeros((num_slots, num_nodes), np.int32),
        pointers=np.full((num_slots, NUM_POINTERS * POINTER), -1, np.int32),
    )


class Batch(NamedTuple):
    """
    Input and output of a call of `draft_batch`.

    Args:
        slots, limits (`np.ndarray` of shape `[rows]`, int64): Which slots to draft for, and nodes per draft.
        ends (`np.ndarray` of shape `[rows]`, int64): Get where each draft ends in the following arrays.
        tokens, parents, probs (`np.ndarray` of shape `[rows * nodes]`, int64, int64, float32): Get the drafts, one
            after another.
    """

    slots: np.ndarray
    limits: np.ndarray
    ends: np.ndarray
    tokens: np.ndarray
    parents: np.ndarray
    probs: np.ndarray


def new_batch(num_rows: int, num_nodes: int) -> Batch:
    return Batch(
        slots=np.empty(num_rows, np.int64),
        limits=np.empty(num_rows, np.int64),
        ends=np.empty(num_rows, np.int64),
        tokens=np.empty(num_rows * num_nodes, np.int64),
        parents=np.empty(num_rows * num_nodes, np.int64),
        probs=np.empty(num_rows * num_nodes, np.float32),
    )


# The table of addresses: the fields of `Store`, `Model`, `Slots`, `Scratch` and `Batch`, then settings, owners of text
# blocks and when outputs were used.
NUM_ADDRESSES = 28


@inner
def _store(table):
    return Store(int32_at(table[0]), int32_at(table[1]), int32_at(table[2]), int64_at(table[3]))


@inner
def _model(table, line):
    return Model(
        ahead(float32_at(table[4]), line * NUM_CELLS * 2),
        ahead(float32_at(table[5]), line * NUM_CELLS),
        ahead(float32_at(table[6]), line * NUM_SETS * NUM_FEATURES),
        ahead(int32_at(table[7]), line * NUM_LINES * LINE),
    )


@inner
def _slot(table, slot):
    settings = float64_at(table[25])
    max_depth = int(settings[DEPTH_LIMIT])
    return Slots(
        ahead(int64_at(table[8]), slot * STATE),
        ahead(int32_at(table[9]), slot * MAX_TREES),
        ahead(int32_at(table[10]), slot * (max_depth + 1) * 2),
        ahead(int32_at(table[11]), slot * _num_walk_fields(settings)),
        ahead(int32_at(table[12]), slot * int(settings[NODES])),
        ahead(int32_at(table[13]), slot * NUM_POINTERS * POINTER),
    )


@inner
def _num_walk_fields(settings):
    return (MAX_TREES - 1) * int(settings[WALKS]) * WALK


@inner
def _scratch(table, slot):
    settings = float64_at(table[25])
    num = int(settings[NODES])
    return Scratch(
        ahead(int32_at(table[14]), slot * (num * PLACES_PER_NODE + int(settings[LONGEST]) * PLACE)),
        ahead(int32_at(table[15]), slot * num * NODE_FIELDS),
        ahead(int32_at(table[16]), slot * num * CANDIDATES_PER_NODE * CANDIDATE),
        ahead(float32_at(table[17]), slot * num * CANDIDATES_PER_NODE),
        ahead(float32_at(table[18]), slot * num * CANDIDATES_PER_NODE),
    )


@inner
def _grow(s, slot, settings, tokens, num_tokens):
    """Append committed tokens to a request's text and tree."""
    state, max_depth = slot.state, int(settings[DEPTH_LIMIT])
    for k in range(num_tokens):
        for at in range(0, NUM_POINTERS * POINTER, POINTER):
            advance(s, slot.pointers, at, slot.pointers, at, tokens[k])
        state[NUM_POINTS] = extend(s, slot.trees[0], slot.points, state[NUM_POINTS], max_depth, state[END], tokens[k])
        state[END] += 1


@compiled
def begin(address, k, tokens):
    """Append the prompt's tokens (int32 `[n]`) to the text and tree of slot `k`."""
    table = int64_at(address)
    s, slot = _store(table), _slot(table, k)
    set_clock(s, slot.trees[0], slot.state[START])
    _grow(s, slot, float64_at(table[25]), int32_at(tokens.ctypes.data), len(tokens))


@compiled
def absorb(address, k, clock):
    """Learn from the tokens that were committed since the last draft of slot `k`, and append them."""
    table = int64_at(address)
    s, slot, settings = _store(table), _slot(table, k), float64_at(table[25])
    state = slot.state
    if state[HAS_DRAFT]:
        model = _model(table, state[NAMESPACE])
        owners, used = int32_at(table[26]), int64_at(table[27])
        scratch = _scratch(table, k)
        learn_from(s, scratch, model, slot.pending, state[NUM_PENDING], settings, owners, used, clock)
        state[HAS_DRAFT] = 0
    _grow(s, slot, settings, slot.pending, state[NUM_PENDING])
    state[NUM_PENDING] = 0


@inner
def _forget_walks(s, slot, settings):
    """Reset walks and pointers after texts were removed since the last draft, since their nodes may be gone."""
    if slot.state[REMOVALS_SEEN] != s.heads[REMOVALS]:
        slot.state[REMOVALS_SEEN] = s.heads[REMOVALS]
        for walk in range(0, _num_walk_fields(settings), WALK):
            slot.walks[walk + FROM] = -1
        slot.pointers[POINTER + POSITION] = -1  # that to others' texts


@inner
def _drafts(table, end):
    """Return the places of drafts in `Batch` from node `end` on: tokens, parents, probs."""
    return ahead(int64_at(table[22]), end), ahead(int64_at(table[23]), end), ahead(float32_at(table[24]), end)


@compiled
def draft_batch(address, num_rows, clock):
    """Absorb committed tokens and draft, for the slots that `Batch` names."""
    table = int64_at(address)
    s, settings, slots = _store(table), float64_at(table[25]), int64_at(table[19])
    limits, ends = int64_at(table[20]), int64_at(table[21])
    for row in range(num_rows):
        absorb(address, slots[row], clock)
    end, owners = 0, int32_at(table[26])
    for row in range(num_rows):
        slot = _slot(table, slots[row])
        state = slot.state
        _forget_walks(s, slot, settings)
        tokens, parents, probs = _drafts(table, end)
        end += make_draft(
            s, _scratch(table, slots[row]), _model(table, state[NAMESPACE]), slot.trees, slot.points, slot.walks,
            int(settings[WALKS]), slot.pointers, state[NUM_POINTS], state[START], state[END],
            min(limits[row], int(settings[NODES]) - 1), settings, owners, tokens, parents, probs,
        )  # fmt: skip
        state[HAS_DRAFT] = 1
        ends[row] = end


@compiled
def draft_batch_by_counts(address, num_rows, clock):
    """Do as `draft_batch`, but as published; separate, since it takes long to compile and is seldom used."""
    table = int64_at(address)
    s, settings, slots = _store(table), float64_at(table[25]), int64_at(table[19])
    limits, ends = int64_at(table[20]), int64_at(table[21])
    for row in range(num_rows):
        absorb(address, slots[row], clock)
    end = 0
    for row in range(num_rows):
        slot = _slot(table, slots[row])
        state = slot.state
        _forget_walks(s, slot, settings)
        tokens, parents, probs = _drafts(table, end)
        end += draft_by_score(
            s, slot.trees, slot.points, slot.walks, int(settings[WALKS]), state[NUM_POINTS], state[START], state[END],
            min(limits[row], int(settings[NODES]) - 1), settings, tokens, parents, probs,
        )  # fmt: skip
        ends[row] = end
