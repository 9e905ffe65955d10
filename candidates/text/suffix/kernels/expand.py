"""
Draft trees from suffix trees (compiled): likely next tokens, best path first, and learning from the tokens that came.

At every node of a draft, the last tokens are looked up in all of a request's trees, at several context lengths at once.
Each token that followed one of them is a candidate, whose probability `mix` estimates. Nodes are added best
path first, which is SuffixDecoding's expansion with learnt probabilities for D(N) and all match lengths for the best
one.
"""

from typing import NamedTuple

import numpy as np

from .....jit import inner
from .....jit.pointers import prefetch
from .likely import LEAST_LIKELY, NUM_BINS, NUM_LIKELY, after_one, after_two
from .mix import (
    CANDIDATE,
    GROWN,
    LIKELY,
    PARENT,
    TOKEN,
    begin_candidate,
    describe,
    estimate,
    learn,
    point,
)
from .places import (
    AT,
    DEPTH,
    NEXT,
    PLACE,
    STOP,
    SUPPORT,
    TREE,
    edge_of,
    place_of,
    position_of,
    step,
    support,
)
from .pointer import NUM_POINTERS, POINTER, POSITION, RECORD, advance, least_to_set, set_pointer, state_of
from .store import BLOCK_BITS, CHILD, COUNT, KIDS, NODE, NUM, PAIR, ROW, SEEN, find, is_later

MAX_TREES = 4  # the request's own and those of three namespaces
MAX_CONTEXTS = 6  # context lengths that are used, per tree and node
MAX_CHILDREN = 6  # followers that are looked at, per context; the most frequent ones
CANDIDATES_PER_NODE = 8  # that there is memory for

# Numbers of a source (`settings`)
LONGEST, LEAST, CHAINS, RATE, MEMORY, DEPTH_LIMIT, BY_COUNTS, FACTOR, OFFSET, NODES, WALKS = range(11)
"""Longest match, least path probability, whether drafts are chains, learning rate of the weights, observations that a
frequency remembers, depth limit of the trees, whether drafts are ranked by counts alone, and then by which factor and
offset their size follows the match; nodes of a draft that there is memory for, the last committed token included (nodes
whose followers are looked up are *grown*), and walks in each tree of others (see `places`)."""

# Fields of a grown node
PLACES, PLACES_END, FIRST, END_OF, DRAFTED, HOLDS, POINTERS = range(7)
"""The begin and end of its places, its first candidate and the one after its last; its node of the draft, or -1; its
token; its pointers, in this field and the next ones."""
NODE_FIELDS = POINTERS + NUM_POINTERS * POINTER
PLACES_PER_NODE = MAX_TREES * MAX_CONTEXTS * PLACE


class Scratch(NamedTuple):
    """
    The last draft of every slot, which learning needs when its next tokens are known.

    Args:
        places (`np.ndarray` of shape `[slots, nodes * 144 + longest * 6]`, int32): Where grown nodes' contexts stand in
            trees, and then all lengths of a match.
        grown (`np.ndarray` of shape `[slots, nodes * 10]`, int32): See the fields above.
        candidates (`np.ndarray` of shape `[slots, nodes * 8 * 24]`, int32): See `mix`.
        probs, paths (`np.ndarray` of shape `[slots, nodes * 8]`, float32): Probabilities of the candidates given their
            parents, and of the paths to those that were not drafted (-1: drafted).
    """

    places: np.ndarray
    grown: np.ndarray
    candidates: np.ndarray
    probs: np.ndarray
    paths: np.ndarray


def new_scratch(num_slots: int, num_nodes: int, longest: int) -> Scratch:
    """Return memory for drafts of `num_nodes` nodes, the last committed token included."""
    num = num_nodes * CANDIDATES_PER_NODE
    return Scratch(
        places=np.zeros((num_slots, num_nodes * PLACES_PER_NODE + longest * PLACE), np.int32),
        grown=np.zeros((num_slots, num_nodes * NODE_FIELDS), np.int32),
        candidates=np.zeros((num_slots, num * CANDIDATE), np.int32),
        probs=np.zeros((num_slots, num), np.float32),
        paths=np.zeros((num_slots, num), np.float32),
    )


# --- Contexts --------------------------------------------------------------------------------------------------------


@inner
def _set_place(s, places, at, tree, depth, node, following, stop, number):
    places[at + TREE], places[at + DEPTH], places[at + SUPPORT] = tree, depth, number
    places[at + AT], places[at + NEXT], places[at + STOP] = node, following, stop
    if following < 0:
        prefetch(s.rows, s.nodes[node * NODE + KIDS] * PAIR)
    else:
        prefetch(s.text, following)


@inner
def _root_places(s, d, trees, points, walks, num_walks, num_points, start, end, longest, room):
    """
    Write the contexts of the text `text[start:end]`: per tree the longest one, and each shorter one that occurs more
    often than the one kept before. Return where they end. From `room` on, `places` is free.
    """
    places, kept = d.places, 0
    for t in range(MAX_TREES):
        if trees[t] < 0:
            continue
        found = room
        for depth in range(1, min(num_points if t == 0 else end - start, longest) + 1):
            is_found, node, following, stop = place_of(s, trees, t, points, walks, num_walks, end, depth)
            if not is_found:
                break
            _set_place(s, places, found, t, depth, node, following, stop, support(s, node, following))
            found += PLACE
        before, limit = 0, kept + MAX_CONTEXTS * PLACE
        while found > room and kept < limit:
            found -= PLACE
            if places[found + SUPPORT] > before:
                before = places[found + SUPPORT]
                for field in range(PLACE):
                    places[kept + field] = places[found + field]
                kept += PLACE
    return kept


@inner
def _child_places(s, d, parent, kept, token):
    """Write the contexts of a grown node, from `kept` on: those of its parent, one token on. Return where they end."""
    places, tree, before = d.places, -1, 0
    for at in range(d.grown[parent + PLACES], d.grown[parent + PLACES_END], PLACE):
        is_found, node, following, stop = step(
            s, np.int64(places[at + AT]), np.int64(places[at + NEXT]), np.int64(places[at + STOP]), token
        )
        if not is_found:
            continue
        if places[at + TREE] != tree:
            tree, before = places[at + TREE], 0
        number = support(s, node, following)
        if number > before:
            _set_place(s, places, kept, tree, places[at + DEPTH] + 1, node, following, stop, number)
            kept += PLACE
            before = number
    return kept


@inner
def _newest(s, kids, last):
    """Return the entry that was seen last."""
    newest, entry_of = s.rows[kids + SEEN], kids
    for entry in range(kids + ROW, last, ROW):
        if is_later(s.rows[entry + SEEN], newest):
            newest, entry_of = s.rows[entry + SEEN], entry
    return entry_of


# --- Pointers --------------------------------------------------------------------------------------------------------


@inner
def _set_pointers(s, d, pointers, owners):
    """
    Set the pointers of a slot to where the longest contexts are followed, if these are long enough, and give them to
    the draft's root.
    """
    tree = -1
    for at in range(d.grown[PLACES], d.grown[PLACES_END], PLACE):
        if d.places[at + TREE] == tree:
            continue  # not the tree's longest
        tree, depth = d.places[at + TREE], d.places[at + DEPTH]
        to = min(tree, 1) * POINTER
        if depth >= least_to_set(pointers, to):
            position = _newest_follower(s, np.int64(d.places[at + AT]), np.int64(d.places[at + NEXT]))
            if position >= 0 and (tree == 0 or owners[position >> BLOCK_BITS] > 0):  # not of an output that is gone
                set_pointer(pointers, to, position, depth)
    for field in range(NUM_POINTERS * POINTER):
        d.grown[POINTERS + field] = pointers[field]


@inner
def _newest_follower(s, node, following):
    """Return the text position of the token that followed a place last; -1 if none did."""
    if following >= 0:
        return following
    kids = s.nodes[node * NODE + KIDS] * PAIR
    last = kids + min(s.nodes[node * NODE + NUM], MAX_CHILDREN) * ROW
    if kids == last or kids < 0:
        return np.int64(-1)
    return edge_of(s, np.int64(s.rows[_newest(s, kids, last) + CHILD]))[0]


@inner
def _expected(s, d, g, kind):
    """Return a pointer's state at a grown node and the token that it expects; -1 if it expects none."""
    at = g + POINTERS + kind * POINTER
    position, state = np.int64(d.grown[at + POSITION]), state_of(d.grown[at + RECORD])
    return state, np.int64(s.text[position]) if position >= 0 and state >= 0 else np.int64(-1)


# --- Candidates ------------------------------------------------------------------------------------------------------


@inner
def _candidate(d, g, first, end, most, token):
    """Return the candidate of this token, which may be a new one; `most` if there is no room for it."""
    c = first
    while c < end and d.candidates[c * CANDIDATE + TOKEN] != token:
        c += 1
    if c == end and c < most:
        begin_candidate(d.candidates, c, token, g)
    return c


@inner
def _find_candidates(s, d, model, before, g, most, min_share):
    """
    List the candidates after a grown node, with the evidence for each; `before` is the token before the node's, and
    `most` the number of candidates of the draft that there is memory for.
    """
    _find_followers(s, d, g, most, min_share)
    for kind in range(NUM_POINTERS):
        _, token = _expected(s, d, g, kind)
        c = _candidate(d, g, d.grown[g + FIRST], d.grown[g + END_OF], most, token) if token >= 0 else most
        d.grown[g + END_OF] += c == d.grown[g + END_OF] < most
    token = d.grown[g + HOLDS]
    _find_likely(d, g, most, model.likely, after_one(model.likely, token), LIKELY)
    _find_likely(d, g, most, model.likely, after_two(model.likely, before, token), LIKELY + 1)
    for kind in range(NUM_POINTERS):
        state, token = _expected(s, d, g, kind)
        for c in range(d.grown[g + FIRST], d.grown[g + END_OF] if token >= 0 else 0):
            point(d.candidates, c, kind, state, d.candidates[c * CANDIDATE + TOKEN] == token)


@inner
def _find_likely(d, g, most, lines, at, field):
    """
    List the tokens that the target found likely when it last verified the same tokens: a line of the table, if any.
    """
    if at < 0:
        return
    first, known = d.grown[g + FIRST], d.grown[g + END_OF]
    end = known
    for rank in range(NUM_LIKELY):
        likely = lines[at + 1] >> (4 * rank) & 15
        c = _candidate(d, g, first, end, most, lines[at + 2 + rank]) if likely <= LEAST_LIKELY else most
        if c < most:
            end = max(end, c + 1)
            d.candidates[c * CANDIDATE + field] = 1 + likely
    for c in range(first, known):
        if d.candidates[c * CANDIDATE + field] == 0:
            d.candidates[c * CANDIDATE + field] = 1 + NUM_BINS  # none of the likely ones
    d.grown[g + END_OF] = end


@inner
def _find_followers(s, d, g, most, min_share):
    """List the tokens that follow the contexts of a grown node."""
    places, tree, gap = d.places, -1, 0
    first = end = d.grown[g + FIRST]
    for at in range(d.grown[g + PLACES], d.grown[g + PLACES_END], PLACE):
        gap = gap + 1 if places[at + TREE] == tree else 0
        tree, depth, total = places[at + TREE], places[at + DEPTH], places[at + SUPPORT]
        kind = min(tree, 1)
        if places[at + NEXT] >= 0:
            c = _candidate(d, g, first, end, most, s.text[places[at + NEXT]])
            if c < most:
                end = max(end, c + 1)
                describe(d.candidates, c, kind, gap, depth, total, total, True)
            continue
        node, least = places[at + AT], min_share * total
        kids = s.nodes[node * NODE + KIDS] * PAIR
        last = kids + min(s.nodes[node * NODE + NUM], MAX_CHILDREN) * ROW
        newest = _newest(s, kids, last)
        for entry in range(kids, last, ROW):
            count = s.rows[entry + COUNT]
            if count < least:
                break
            c = _candidate(d, g, first, end, most, s.rows[entry])
            if c < most:
                end = max(end, c + 1)
                describe(d.candidates, c, kind, gap, depth, count, total, entry == newest)
    d.grown[g + END_OF] = end


@inner
def _estimate(s, d, model, g, own_root, path):
    """Compute the probabilities of the candidates of a grown node; `path` is that of the node itself."""
    first = d.grown[g + FIRST]
    for c in range(first, d.grown[g + END_OF]):
        entry = find(s, own_root, d.candidates[c * CANDIDATE + TOKEN])
        occurrences = 0
        if entry >= 0:
            count = s.rows[entry + COUNT]
            occurrences = 1 + (count > 1) + (count > 3)
        prob = estimate(model, d.candidates, c, c - first, g == 0, occurrences)
        d.probs[c] = prob
        d.paths[c] = prob * path


# --- Drafts ----------------------------------------------------------------------------------------------------------


@inner
def make_draft(
    s, d, model, trees, points, walks, num_walks, pointers, num_points, start, end, limit, settings, owners, tokens,
    parents, probs,
):  # fmt: skip
    """Draft for one slot, best path first. Return the number of nodes."""
    min_path, is_chain = np.float32(settings[LEAST]), settings[CHAINS] > 0
    min_share = np.float32(max(settings[LEAST] / 3, 0.01))  # rarer followers are no candidates
    grown, room, most = d.grown, int(settings[NODES]) * PLACES_PER_NODE, int(settings[NODES]) * CANDIDATES_PER_NODE
    grown[PLACES], grown[FIRST], grown[DRAFTED] = 0, 0, -1
    grown[PLACES_END] = _root_places(
        s, d, trees, points, walks, num_walks, num_points, start, end, int(settings[LONGEST]), room
    )
    _set_pointers(s, d, pointers, owners)
    grown[HOLDS] = s.text[end - 1] if end > start else -1
    _find_candidates(s, d, model, s.text[end - 2] if end > start + 1 else -1, 0, most, min_share)
    _estimate(s, d, model, 0, trees[0], np.float32(1))
    n = g = first = 0
    while n < limit:
        best, best_path, end_of = -1, min_path, grown[g + END_OF]
        for c in range(first, end_of):
            if d.paths[c] >= best_path:
                best, best_path = c, d.paths[c]
        if best < 0:
            break
        token, parent = d.candidates[best * CANDIDATE + TOKEN], d.candidates[best * CANDIDATE + PARENT]
        tokens[n], parents[n], probs[n] = token, grown[parent + DRAFTED], d.probs[best]
        kept, g = grown[g + PLACES_END], g + NODE_FIELDS
        grown[g + PLACES] = grown[g + PLACES_END] = kept
        grown[g + FIRST] = grown[g + END_OF] = end_of
        grown[g + DRAFTED], grown[g + HOLDS] = n, token
        d.candidates[best * CANDIDATE + GROWN], d.paths[best] = g, -1
        n += 1
        if is_chain:
            first = end_of
        if n < limit:  # the last node's followers would not be drafted any more
            for at in range(POINTERS, NODE_FIELDS, POINTER):
                advance(s, grown, parent + at, grown, g + at, token)
            grown[g + PLACES_END] = _child_places(s, d, parent, kept, token)
            _find_candidates(s, d, model, grown[parent + HOLDS], g, most, min_share)
            _estimate(s, d, model, g, trees[0], best_path)
    return n


# --- Learning --------------------------------------------------------------------------------------------------------


@inner
def learn_from(s, d, model, pending, num_pending, settings, owners, used, clock):
    """
    Score the last draft's candidates against the committed tokens, as far as these follow the draft. Texts that a right
    draft was copied from are marked as used.
    """
    g = 0
    for k in range(num_pending):
        following = -1
        for c in range(d.grown[g + FIRST], d.grown[g + END_OF]):
            is_hit = d.candidates[c * CANDIDATE + TOKEN] == pending[k]
            if is_hit:
                following = d.candidates[c * CANDIDATE + GROWN]
            learn(model, d.candidates, c, d.probs[c], is_hit, settings[RATE], settings[MEMORY])
        if following < 0:
            break
        g = following
    if g == 0:
        return
    tree = 0
    for at in range(d.grown[g + PLACES], d.grown[g + PLACES_END], PLACE):
        if d.places[at + TREE] != tree:
            tree = d.places[at + TREE]
            position = position_of(s, np.int64(d.places[at + AT]), np.int64(d.places[at + NEXT]))
            used[owners[position >> BLOCK_BITS]] = clock
