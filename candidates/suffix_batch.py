"""One compiled call that takes in what a batch of requests committed and drafts what comes next."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numba import carray, types
from numba.extending import intrinsic

from .compiled import compiled
from .suffix_draft import (
    MAX_CANDIDATES,
    MAX_CONTEXTS,
    MAX_EXPANDED,
    MAX_TREES,
    NUM_CELLS,
    NUM_FEATURES,
    NUM_SETS,
    Model,
    Scratch,
    learn,
    make_draft,
)
from .suffix_score import draft_by_score
from .suffix_store import Store, extend

# Columns of `Slots.state`
START, END, NUM_POINTS, NUM_PENDING, NAMESPACE = range(5)


class Slots(NamedTuple):
    """
    The running requests.

    Args:
        state (`np.ndarray` of shape `[slots, 5]`, int64): Where the text begins and ends, number of points, number of
            committed tokens that are not in the tree yet, line of the model.
        trees (`np.ndarray` of shape `[slots, 4]`, int32): Roots: the request's own tree, then namespaces; -1: none.
        points (`np.ndarray` of shape `[slots, max_depth + 1, 2]`, int32): See `suffix_store.extend`.
        pending (`np.ndarray` of shape `[slots, n]`, int32): The tokens that are not in the tree yet.
    """

    state: np.ndarray
    trees: np.ndarray
    points: np.ndarray
    pending: np.ndarray


def new_slots(num_slots: int, max_depth: int, num_pending: int = 64) -> Slots:
    return Slots(
        state=np.zeros((num_slots, 5), np.int64),
        trees=np.full((num_slots, MAX_TREES), -1, np.int32),
        points=np.zeros((num_slots, max_depth + 1, 2), np.int32),
        pending=np.zeros((num_slots, num_pending), np.int32),
    )


@compiled
def _of_slot(scr, slot):
    """One slot's part of the scratch memory."""
    return Scratch(
        scr.places[slot], scr.num_places[slot], scr.spans[slot], scr.tokens[slot], scr.parents[slot],
        scr.expanded[slot], scr.probs[slot], scr.paths[slot], scr.features[slot], scr.known[slot], scr.sizes[slot],
    )  # fmt: skip


@compiled
def grow(s, slots, slot, tokens):
    """Appends committed tokens to a request's text and tree."""
    state, points = slots.state[slot], slots.points[slot]
    for token in tokens:
        state[NUM_POINTS] = extend(s, slots.trees[slot, 0], points, state[NUM_POINTS], state[END], token)
        state[END] += 1


@compiled
def absorb(s, model, slots, scr, slot, rate, memory, owners, used, clock):
    """Learns from the tokens that were committed since the last draft, and appends them."""
    state = slots.state[slot]
    tokens = slots.pending[slot, : state[NUM_PENDING]]
    line = state[NAMESPACE]
    learn(
        s,
        model.cells[line],
        model.odds[line],
        model.weights[line],
        _of_slot(scr, slot),
        tokens,
        rate,
        memory,
        owners,
        used,
        clock,
    )
    grow(s, slots, slot, tokens)
    state[NUM_PENDING] = 0


@intrinsic
def _pointer(typing_context, address):
    """An address as a pointer that `carray` takes."""

    def generate(context, builder, signature, args):
        return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

    return types.voidptr(types.int64), generate


def addresses(*groups: NamedTuple, others: Sequence[np.ndarray]) -> np.ndarray:
    """
    Address and length of every array, for `draft_batch`. Taking two dozen arrays apart costs a call from Python more
    than drafting does, and arrays that are known by address alone are not reference-counted. The caller keeps the
    arrays alive and asks anew when one of them is replaced.
    """
    arrays = [array for group in groups for array in group] + list(others)
    return np.array([[array.ctypes.data, len(array)] for array in arrays], np.int64)


@compiled
def _ints(views, k):
    return carray(_pointer(views[k, 0]), (views[k, 1],), np.int32)


@compiled
def _memory(views, max_depth, num_pending):
    """The arrays behind `addresses(store, model, slots, scratch, others=[owners, used])`."""
    num_slots, lines = views[7, 1], views[4, 1]
    store = Store(
        _ints(views, 0),
        carray(_pointer(views[1, 0]), (views[1, 1], 8), np.int32),
        _ints(views, 2),
        carray(_pointer(views[3, 0]), (views[3, 1],), np.int64),
    )
    model = Model(
        carray(_pointer(views[4, 0]), (lines, NUM_CELLS, 2), np.float32),
        carray(_pointer(views[5, 0]), (lines, NUM_CELLS), np.float32),
        carray(_pointer(views[6, 0]), (lines, NUM_SETS, NUM_FEATURES), np.float32),
    )
    slots = Slots(
        carray(_pointer(views[7, 0]), (num_slots, 5), np.int64),
        carray(_pointer(views[8, 0]), (num_slots, MAX_TREES), np.int32),
        carray(_pointer(views[9, 0]), (num_slots, max_depth + 1, 2), np.int32),
        carray(_pointer(views[10, 0]), (num_slots, num_pending), np.int32),
    )
    scratch = Scratch(
        carray(_pointer(views[11, 0]), (num_slots, MAX_EXPANDED, MAX_TREES * MAX_CONTEXTS, 4), np.int32),
        carray(_pointer(views[12, 0]), (num_slots, MAX_EXPANDED, MAX_TREES), np.int32),
        carray(_pointer(views[13, 0]), (num_slots, MAX_EXPANDED, 2), np.int32),
        carray(_pointer(views[14, 0]), (num_slots, MAX_CANDIDATES), np.int32),
        carray(_pointer(views[15, 0]), (num_slots, MAX_CANDIDATES), np.int32),
        carray(_pointer(views[16, 0]), (num_slots, MAX_CANDIDATES), np.int32),
        carray(_pointer(views[17, 0]), (num_slots, MAX_CANDIDATES), np.float32),
        carray(_pointer(views[18, 0]), (num_slots, MAX_CANDIDATES), np.float32),
        carray(_pointer(views[19, 0]), (num_slots, MAX_CANDIDATES, NUM_FEATURES), np.int32),
        carray(_pointer(views[20, 0]), (num_slots, MAX_CANDIDATES, 5), np.int32),
        carray(_pointer(views[21, 0]), (num_slots, 2), np.int32),
    )
    return store, model, slots, scratch, _ints(views, 22), carray(_pointer(views[23, 0]), (views[23, 1],), np.int64)


@compiled
def draft_batch(views, settings, clock, rows, limits, tokens, parents, probs, sizes):
    """
    Absorbs what was committed and drafts, for the slots `rows`.

    Args:
        views (`np.ndarray`): `addresses(store, model, slots, scratch, others=[owners, used])`.
        settings (`np.ndarray` of shape `[10]`, float64): Longest match, least path probability, whether drafts are
            chains, learning rate of the weights, observations that a frequency remembers, depth limit, pending tokens,
            whether drafts are ranked by counts alone, and then alpha and the offset of their size.
        limits (`np.ndarray` of shape `[rows]`, int64): Nodes per draft.
        tokens, parents, probs (`np.ndarray` of shape `[rows, nodes]`, int64, int64, float32): Get the drafts.
        sizes (`np.ndarray` of shape `[rows]`, int64): Gets the numbers of nodes.
    """
    s, model, slots, scr, owners, used = _memory(views, int(settings[5]), int(settings[6]))
    for k in range(len(rows)):
        absorb(s, model, slots, scr, rows[k], settings[3], settings[4], owners, used, clock)
    for k in range(len(rows)):
        slot = rows[k]
        state = slots.state[slot]
        line = state[NAMESPACE]
        limit = min(limits[k], MAX_EXPANDED - 1)
        if settings[7] > 0:
            sizes[k] = draft_by_score(
                s, slots.trees[slot], slots.points[slot], state[NUM_POINTS], state[START], state[END], limit, settings,
                tokens[k], parents[k], probs[k],
            )  # fmt: skip
        else:
            sizes[k] = make_draft(
                s, model.odds[line], model.weights[line], slots.trees[slot], slots.points[slot], state[NUM_POINTS],
                state[START], state[END], limit, settings, _of_slot(scr, slot), tokens[k], parents[k], probs[k],
            )  # fmt: skip
