"""
How likely a candidate is (compiled): a logistic mix, as in the PAQ family of compressors (Mahoney, 2005), of acceptance
frequencies that were observed for candidates of the same kind: with such a match length, count and share in this tree,
and so on. Frequencies and mixing weights are learnt from every committed token, whether or not the candidate was
drafted (docs/design.md, "Trust").
"""

from typing import NamedTuple

import numpy as np

from .....jit import inner
from .likely import MEAN_SHARES, NUM_BINS, new_lines
from .pointer import BEFORE, MISSES, NUM_POINTERS, NUM_STATES

# Fields of a candidate
TOKEN, PARENT, GROWN = range(3)
"""The token; the grown node it follows; the grown node it became itself, or -1."""
CELLS, SETS = 3, 14  # eleven cells of the model's tables (-1: none); where the three sets of weights begin
OWN_DEPTH, OTHERS_DEPTH, OWN_SHARE, OTHERS_SHARE, NEWEST, LIKELY = range(17, 23)
"""Bins of context length and of the share in it, each in the request's own tree and in others; whether no other
follower of the context is more recent; how likely the target found it when it last verified the same token, and (in
the next field) the same two: 0 if the table does not have them, 1 and more for bins of its share, and for none."""
CANDIDATE = 24

_POINTERS, _NUM_TABLES = 9, 11  # number of the first pointer's table, and of all
NUM_FEATURES = _NUM_TABLES + 1
_ORDERS, _GAPS, _COUNTS, _SHARES = 8, 3, 7, 9
_CONTEXT_CELLS = _ORDERS * _GAPS * _COUNTS * _SHARES  # per kind of tree: the request's own, or earlier outputs
_JOINT = 2 * _CONTEXT_CELLS  # order and share in both kinds
_ROUGH = _JOINT + 6 * 6 * 5 * 5  # order, occurrences in the request, rank, recency
_TOKENS = _ROUGH + 6 * 4 * 5 * 2 * 2  # the token, hashed: known apart by depth it gains less
_HASH_BITS = 13
_LIKELY = _TOKENS + 2**_HASH_BITS  # the target's likeliest tokens after one token and two, for first nodes and others
_THOUGHTS = NUM_BINS + 2
_LIKELY_JOINT = _LIKELY + _THOUGHTS * _THOUGHTS * 2  # the shares of both, and the order in both kinds
_POINTED = _LIKELY_JOINT + _THOUGHTS * 6 * 6  # for both pointers: how they fared, and whether they expect it
NUM_CELLS = _POINTED + NUM_POINTERS * NUM_STATES * 2
# Sets of weights. Three are added up: by which evidence there is and whether the candidate is the first of its node, by
# the order in both kinds, and by rank, occurrences in the request and whether the node is a first one.
_ORDER_SETS = 32 * 2
_RANK_SETS = _ORDER_SETS + 6 * 6
NUM_SETS = _RANK_SETS + 5 * 4 * 2
_BIAS = 0.3
_MIN_PROB, _MAX_PROB = 0.001, 0.998

_STEPS = 4096  # a table is faster than a logarithm
_LOG_ODDS = np.log((np.arange(_STEPS) + 0.5) / (_STEPS - 0.5 - np.arange(_STEPS))).astype(np.float32)


class Model(NamedTuple):
    """
    State of learning, one line per namespace: no tenant's text affects another's drafts.

    Args:
        cells (`np.ndarray` of shape `[namespaces, NUM_CELLS, 2]`, float32): Acceptance frequency, and the
            number of its observations.
        odds (`np.ndarray` of shape `[namespaces, NUM_CELLS]`, float32): Logarithm of the odds of the frequency.
        weights (`np.ndarray` of shape `[namespaces, sets, 12]`, float32): Mixing weights of the tables and a bias.
        likely (`np.ndarray` of shape `[namespaces, NUM_LINES, LINE]`, int32): Tokens that the target found
            likely.
    """

    cells: np.ndarray
    odds: np.ndarray
    weights: np.ndarray
    likely: np.ndarray


def new_model(num_namespaces: int = 1) -> Model:
    """
    Return a model that has learnt nothing: a candidate's share in its context, trusted the more, the longer the
    context.
    """
    shares = np.array([1.0, 0.93, 0.8, 0.6, 0.4, 0.25, 0.14, 0.06, 0.02])
    counts = np.array([1, 2, 3, 4.5, 7, 14, 40])
    order, gap, count, share = np.meshgrid(np.arange(_ORDERS), np.arange(_GAPS), counts, shares, indexing="ij")
    contexts = (share * count / (count + 1.5 / (order + 1)) * 0.5**gap).ravel()
    seen = np.array([0.8, 0.5, 0.25, 0.1, 0.03])
    own, earlier, own_share, earlier_share = np.meshgrid(np.arange(6), np.arange(6), seen, seen, indexing="ij")
    joint = np.maximum(np.maximum(own_share * (own > 0), earlier_share * (earlier > 0)), 0.02).ravel()
    rough, hashed = np.full(_TOKENS - _ROUGH, 0.3), np.full(_LIKELY - _TOKENS, 0.5)
    thoughts = 0.8 * np.array([0.2, *MEAN_SHARES, 0.1])
    one, two = np.meshgrid(thoughts, thoughts, indexing="ij")
    two[:, 0], two[:, -1] = one[:, 0], 0.6 * one[:, 0]
    probs = np.concatenate(
        [contexts, contexts, joint, rough, hashed, two.ravel().repeat(2), thoughts.repeat(36), _pointed()]
    )
    cells = np.empty((num_namespaces, NUM_CELLS, 2), np.float32)
    cells[:, :, 0] = np.clip(probs, 0.003, 0.98)
    cells[:, :, 1] = 2
    cells[:, _TOKENS:_LIKELY, 1] = 1
    weights = np.zeros((num_namespaces, NUM_SETS, NUM_FEATURES), np.float32)
    for known in range(_ORDER_SETS // 2):
        present = np.array([known >> kind & 1 for kind in range(5)])
        shares = 0.8 * present / max(present.sum(), 1)
        weights[:, 2 * known : 2 * known + 2, [0, 1, 2, 3, 7]] = shares
    weights[:, :_ORDER_SETS, 4:6] = 0.3
    weights[:, :_ORDER_SETS, [6, _POINTERS, _POINTERS + 1]] = 0.1
    return Model(cells, log_odds(cells), weights, new_lines(num_namespaces))


def _pointed() -> np.ndarray:
    """
    Return initial frequencies of tokens that pointers expect and of other candidates: higher for longer runs of tokens
    that came as expected.
    """
    after_run = np.array([0.12, 0.45, 0.7, 0.75, 0.82, 0.9, 0.95, 0.97, 0.98])
    others = np.array([0.09, 0.07, 0.06, 0.05, 0.05, 0.05, 0.03, 0.03, 0.02])
    return np.tile(np.stack([others, after_run], 1).repeat(MISSES * BEFORE, 0).ravel(), NUM_POINTERS)


def log_odds(cells: np.ndarray) -> np.ndarray:
    """Return `Model.odds` of `Model.cells`."""
    return np.log(cells[:, :, 0] / (1 - cells[:, :, 0]))


# --- What is known of a candidate ------------------------------------------------------------------------------------


@inner
def _bin(value, a, b, c, d):
    """Return 0 to 4: the number of bounds that the value does not exceed."""
    return (value <= a) + (value <= b) + (value <= c) + (value <= d)


@inner
def _context_cell(depth, gap, count, total):
    order = depth - 1 if depth < 5 else 4 + (depth >= 7) + (depth >= 10) + (depth >= 16)
    counts = count - 1 if count < 4 else 3 + (count >= 6) + (count >= 10) + (count >= 20)
    share = count / total
    shares = 0
    if count < total:
        shares = 1 + _bin(share, 0.88, 0.7, 0.5, 0.33) + (share <= 0.2) + (share <= 0.1) + (share <= 0.04)
    return ((order * _GAPS + min(gap, 2)) * _COUNTS + counts) * _SHARES + shares


@inner
def begin_candidate(candidates, c, token, parent):
    """Reset a candidate's fields: there is no evidence yet."""
    at = c * CANDIDATE
    candidates[at + TOKEN], candidates[at + PARENT], candidates[at + GROWN] = token, parent, -1
    for table in range(_NUM_TABLES):
        candidates[at + CELLS + table] = -1
    candidates[at + LIKELY] = candidates[at + LIKELY + 1] = 0
    candidates[at + OWN_DEPTH] = candidates[at + OTHERS_DEPTH] = candidates[at + NEWEST] = 0
    candidates[at + OWN_SHARE] = candidates[at + OTHERS_SHARE] = 4


@inner
def describe(candidates, c, kind, gap, depth, count, total, is_newest):
    """
    Add the evidence of a context of `depth` tokens, which the candidate followed `count` times of `total`. The context
    is the `gap`-th longest of its tree, whose `kind` is 0 for the request's own. Two of each kind are used.
    """
    at = c * CANDIDATE
    cell = at + CELLS + 2 * kind
    if candidates[cell] < 0:
        candidates[cell] = kind * _CONTEXT_CELLS + _context_cell(depth, gap, count, total)
        candidates[at + OWN_DEPTH + kind] = depth if depth < 4 else 4 + (depth >= 8)
        candidates[at + OWN_SHARE + kind] = _bin(count / (total + 0.5), 0.6, 0.35, 0.18, 0.07)
        candidates[at + NEWEST] = is_newest
    elif candidates[cell + 1] < 0:
        candidates[cell + 1] = kind * _CONTEXT_CELLS + _context_cell(depth, 0, count, total)


@inner
def point(candidates, c, kind, state, is_expected):
    """Add whether the pointer of this kind, which is in such a state, expects the candidate."""
    cell = _POINTED + (kind * NUM_STATES + state) * 2 + is_expected
    candidates[c * CANDIDATE + CELLS + _POINTERS + kind] = cell


@inner
def _hashed(token):
    """Hash by Fibonacci hashing."""
    return ((token * 2654435761) & 0xFFFFFFFF) >> (32 - _HASH_BITS)


@inner
def _sets(candidates, at):
    """Return where the sets of weights begin, for the candidate whose fields begin at `at`."""
    sets = at + SETS
    return np.int64(candidates[sets]), np.int64(candidates[sets + 1]), np.int64(candidates[sets + 2])


@inner
def _weight(model, sets, table):
    """Return the place of a table's weight; the bias has the place after the tables'."""
    return model.weights[sets[0] + table] + model.weights[sets[1] + table] + model.weights[sets[2] + table]


@inner
def _change_weight(model, sets, table, change):
    model.weights[sets[0] + table] += change
    model.weights[sets[1] + table] += change
    model.weights[sets[2] + table] += change


@inner
def estimate(model, candidates, c, rank, is_first_node, occurrences):
    """
    Return the probability of a candidate that all contexts have described: the `rank`-th of its node, which hangs on
    the last committed token or not, and whose token has occurred in the request not at all (0) to often (3).
    """
    at = c * CANDIDATE
    own, others = candidates[at + OWN_DEPTH], candidates[at + OTHERS_DEPTH]
    shares = candidates[at + OWN_SHARE] * 5 + candidates[at + OTHERS_SHARE]
    candidates[at + CELLS + 4] = _JOINT + (own * 6 + others) * 25 + shares
    rough = (max(own, others) * 4 + occurrences) * 5 + min(rank, 4)
    candidates[at + CELLS + 5] = _ROUGH + (rough * 2 + candidates[at + NEWEST]) * 2 + (not is_first_node)
    candidates[at + CELLS + 6] = _TOKENS + _hashed(np.int64(candidates[at + TOKEN]))
    after_one, after_two = candidates[at + LIKELY], candidates[at + LIKELY + 1]
    likely = after_two if 0 < after_two <= NUM_BINS else after_one
    thoughts = after_one * _THOUGHTS + after_two
    candidates[at + CELLS + 7] = _LIKELY + thoughts * 2 + (not is_first_node) if thoughts > 0 else -1
    candidates[at + CELLS + 8] = _LIKELY_JOINT + (likely * 6 + own) * 6 + others if thoughts > 0 else -1
    present = (thoughts > 0) << 4
    for table in range(4):
        present |= (candidates[at + CELLS + table] >= 0) << table
    candidates[at + SETS] = (2 * present + (rank > 0)) * NUM_FEATURES
    candidates[at + SETS + 1] = (_ORDER_SETS + own * 6 + others) * NUM_FEATURES
    ranks = (min(rank, 4) * 4 + occurrences) * 2 + (not is_first_node)
    candidates[at + SETS + 2] = (_RANK_SETS + ranks) * NUM_FEATURES
    sets = _sets(candidates, at)
    mixed = _weight(model, sets, _NUM_TABLES) * np.float32(_BIAS)
    for table in range(_NUM_TABLES):
        cell = candidates[at + CELLS + table]
        odds = model.odds[max(cell, 0)]
        mixed += _weight(model, sets, table) * (odds if cell >= 0 else np.float32(0))
    return np.float32(min(max(1 / (1 + np.exp(-mixed)), np.float32(_MIN_PROB)), np.float32(_MAX_PROB)))


@inner
def learn(model, candidates, c, prob, is_hit, rate, memory):
    """Learn whether a candidate of probability `prob` was accepted."""
    at = c * CANDIDATE
    hit = np.float32(is_hit)
    change = np.float32(rate) * (hit - prob)
    sets = _sets(candidates, at)
    _change_weight(model, sets, _NUM_TABLES, change * np.float32(_BIAS))
    for table in range(_NUM_TABLES):
        cell = candidates[at + CELLS + table]
        if cell >= 0:
            _change_weight(model, sets, table, change * model.odds[cell])
            number = model.cells[2 * cell + 1] + 1
            frequency = model.cells[2 * cell] + (hit - model.cells[2 * cell]) / number
            frequency = min(max(frequency, np.float32(_MIN_PROB)), np.float32(_MAX_PROB))
            model.cells[2 * cell] = frequency
            model.cells[2 * cell + 1] = min(number, np.float32(memory))
            model.odds[cell] = _LOG_ODDS[int(frequency * _STEPS)]
