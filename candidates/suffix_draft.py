"""
Draft trees from suffix trees (compiled): what may come next, how likely it is, and learning from what came.

At every node of a draft, the last tokens are looked up in all of a request's trees, at several context lengths at once.
Each token that followed one of them is a candidate. Its probability is a logistic mix, as in the PAQ family of
compressors (Mahoney, 2005), of acceptance frequencies that were observed for candidates of the same kind: with such a
match length, count and share in this tree, and so on. Frequencies and mixing weights are learnt from every committed
token, whether or not the candidate was drafted (DESIGN 3.3). Nodes are added best path first, which is
SuffixDecoding's expansion with learnt probabilities for D(N) and all match lengths for the best one.
"""

from typing import NamedTuple

import numpy as np

from .compiled import compiled
from .suffix_store import BLOCK_BITS, CHILD, COUNT, ENDED, KIDS, LABEL, LEN, NUM, ROW, TOTAL, _settle, find

MAX_TREES = 4  # the request's own and those of three namespaces
MAX_CONTEXTS = 6  # context lengths that are used, per tree and node
MAX_CHILDREN = 6  # followers that are looked at, per context; the most frequent ones
MAX_EXPANDED = 64  # nodes of a draft whose followers are looked up
MAX_CANDIDATES = 256
MAX_MATCH = 32

# What is known of a candidate: cells of six tables, and the set of weights that mixes them.
_NUM_TABLES = 6
NUM_FEATURES = _NUM_TABLES + 1
_ORDERS, _GAPS, _COUNTS, _SHARES = 8, 3, 7, 9
_CONTEXT_CELLS = _ORDERS * _GAPS * _COUNTS * _SHARES  # per kind of tree: the request's own, or earlier outputs
_JOINT = 2 * _CONTEXT_CELLS  # order and share in both kinds
_ROUGH = _JOINT + 6 * 6 * 5 * 5  # order, occurrences in the request, rank, recency
NUM_CELLS = _ROUGH + 6 * 4 * 5 * 2 * 2
NUM_SETS = 16 * 2
_BIAS = 0.3
_MIN_PROB, _MAX_PROB = 0.001, 0.998


_STEPS = 4096  # a table is faster than a logarithm
_LOG_ODDS = np.log((np.arange(_STEPS) + 0.5) / (_STEPS - 0.5 - np.arange(_STEPS))).astype(np.float32)


class Model(NamedTuple):
    """
    What was learnt, one line per namespace: nothing that one tenant's text has taught steers another's drafts.

    Args:
        cells (`np.ndarray` of shape `[namespaces, NUM_CELLS, 2]`, float32): Acceptance frequency, and number of
            observations behind it.
        odds (`np.ndarray` of shape `[namespaces, NUM_CELLS]`, float32): Logarithm of the odds of the frequency.
        weights (`np.ndarray` of shape `[namespaces, sets, 7]`, float32): Mixing weights of the tables and a bias.
    """

    cells: np.ndarray
    odds: np.ndarray
    weights: np.ndarray


class Scratch(NamedTuple):
    """
    The last draft of every slot, which `learn` scores against what came.

    Args:
        places (`np.ndarray` of shape `[slots, expanded, trees * contexts, 4]`, int32): Where a node's contexts stand in
            the trees: node, child code and offset on the edge below, context length.
        num_places (`np.ndarray` of shape `[slots, expanded, trees]`, int32)
        spans (`np.ndarray` of shape `[slots, expanded, 2]`, int32): Each expanded node's candidates.
        tokens, parents, expanded (`np.ndarray` of shape `[slots, candidates]`, int32): Token, expanded node it follows,
            expanded node it became (-1: none).
        probs, paths (`np.ndarray` of shape `[slots, candidates]`, float32): Given the parent, and from the root.
        features (`np.ndarray` of shape `[slots, candidates, 7]`, int32): Cells of the tables (-1: none), weight set.
        known (`np.ndarray` of shape `[slots, candidates, 5]`, int32): Bins of context length and share, each in the
            request's own tree and in others, and whether no other follower is more recent.
        sizes (`np.ndarray` of shape `[slots, 2]`, int32): Candidates and expanded nodes.
    """

    places: np.ndarray
    num_places: np.ndarray
    spans: np.ndarray
    tokens: np.ndarray
    parents: np.ndarray
    expanded: np.ndarray
    probs: np.ndarray
    paths: np.ndarray
    features: np.ndarray
    known: np.ndarray
    sizes: np.ndarray


def new_scratch(num_slots: int) -> Scratch:
    def array(dtype: type, *shape: int) -> np.ndarray:
        return np.zeros((num_slots, *shape), dtype)

    return Scratch(
        places=array(np.int32, MAX_EXPANDED, MAX_TREES * MAX_CONTEXTS, 4),
        num_places=array(np.int32, MAX_EXPANDED, MAX_TREES),
        spans=array(np.int32, MAX_EXPANDED, 2),
        tokens=array(np.int32, MAX_CANDIDATES),
        parents=array(np.int32, MAX_CANDIDATES),
        expanded=array(np.int32, MAX_CANDIDATES),
        probs=array(np.float32, MAX_CANDIDATES),
        paths=array(np.float32, MAX_CANDIDATES),
        features=array(np.int32, MAX_CANDIDATES, NUM_FEATURES),
        known=array(np.int32, MAX_CANDIDATES, 5),
        sizes=array(np.int32, 2),
    )


def new_model(num_namespaces: int = 1) -> Model:
    """A model that has seen nothing: a candidate's share in its context, trusted the more, the longer the context."""
    shares = np.array([1.0, 0.93, 0.8, 0.6, 0.4, 0.25, 0.14, 0.06, 0.02])
    counts = np.array([1, 2, 3, 4.5, 7, 14, 40])
    order, gap, count, share = np.meshgrid(np.arange(_ORDERS), np.arange(_GAPS), counts, shares, indexing="ij")
    contexts = (share * count / (count + 1.5 / (order + 1)) * 0.5**gap).ravel()
    seen = np.array([0.8, 0.5, 0.25, 0.1, 0.03])
    own, earlier, own_share, earlier_share = np.meshgrid(np.arange(6), np.arange(6), seen, seen, indexing="ij")
    joint = np.maximum(np.maximum(own_share * (own > 0), earlier_share * (earlier > 0)), 0.02).ravel()
    probs = np.concatenate([contexts, contexts, joint, np.full(NUM_CELLS - _ROUGH, 0.3)])
    cells = np.empty((num_namespaces, NUM_CELLS, 2), np.float32)
    cells[:, :, 0] = np.clip(probs, 0.003, 0.98)
    cells[:, :, 1] = 2
    weights = np.zeros((num_namespaces, NUM_SETS, NUM_FEATURES), np.float32)
    for known in range(16):
        present = np.array([known >> table & 1 for table in range(4)])
        weights[:, 2 * known : 2 * known + 2, :4] = 0.8 * present / max(present.sum(), 1)
    weights[:, :, 4:6] = 0.3
    return Model(cells, log_odds(cells), weights)


def log_odds(cells: np.ndarray) -> np.ndarray:
    """`Model.odds` of `Model.cells`."""
    return np.log(cells[:, :, 0] / (1 - cells[:, :, 0]))


# --- Places: where the last tokens stand in a tree --------------------------------------------------------------------


@compiled
def locate(s, root, first, end):
    """Where `text[first:end]` leads from the root: (whether it does, node, child code, offset)."""
    node, at = root, first
    while at < end:
        i = find(s, node, s.text[at])
        if i < 0:
            return False, 0, 0, 0
        child = s.rows[(s.nodes[node, KIDS] + i) * ROW + CHILD]
        label = s.nodes[child, LABEL] if child >= 0 else ~child
        length = min(s.nodes[child, LEN], end - at) if child >= 0 else end - at
        for k in range(1, length):
            if s.text[label + k] != s.text[at + k]:
                return False, 0, 0, 0
        at += length
        if child < 0 or length < s.nodes[child, LEN]:
            return True, node, child, length
        node = child
    return True, node, -1, 0


@compiled
def place_of(s, trees, t, points, end, depth):
    """
    Where the last `depth` tokens before `end` stand in tree `t`: (whether they do, node, child code, offset). In the
    text's own tree, its points tell; in others they are looked up.
    """
    if t > 0:
        return locate(s, trees[t], end - depth, end)
    node, offset, i = _settle(s, trees[0], points[depth, 0], points[depth, 1], end)
    points[depth, 0], points[depth, 1] = node, offset
    child = s.rows[(s.nodes[node, KIDS] + i) * ROW + CHILD] if offset > 0 else np.int32(-1)
    return True, node, child, offset


@compiled
def _support(s, node, child, offset):
    """How many occurrences of a place's string go on."""
    if offset == 0:
        return s.nodes[node, TOTAL]
    if child >= 0:
        return s.nodes[child, TOTAL] + s.nodes[child, ENDED]
    return 0 if s.text[~child + offset] < 0 else 1


@compiled
def _copy_place(source, k, target, j):
    for field in range(4):
        target[j, field] = source[k, field]


@compiled
def _keep(s, found, first, last, places, start):
    """Of places of falling context length: the first, and each that occurs more often than the one kept before."""
    kept, before = 0, 0
    for k in range(first, last):
        support = _support(s, found[k, 0], found[k, 1], found[k, 2])
        if support > before:
            _copy_place(found, k, places, start + kept)
            kept += 1
            before = support
            if kept == MAX_CONTEXTS:
                break
    return kept


@compiled
def _root_places(s, trees, points, num_points, start, end, max_match, found, draft):
    """The contexts of the text `text[start:end]`: from its points in its own tree, by looking them up in others."""
    for t in range(MAX_TREES):
        first = max_match  # lengths fall: the context of d tokens stands in line max_match - d
        if trees[t] >= 0:
            for depth in range(1, min(num_points if t == 0 else end - start, max_match) + 1):
                is_found, node, child, offset = place_of(s, trees, t, points, end, depth)
                if not is_found:
                    break
                first = max_match - depth
                found[first, 0], found[first, 1] = node, child
                found[first, 2], found[first, 3] = offset, depth
        draft.num_places[0, t] = _keep(s, found, first, max_match, draft.places[0], t * MAX_CONTEXTS)


@compiled
def _child_places(s, trees, found, draft, parent, e, token):
    """The contexts of expanded node `e`: those of its parent, one token on."""
    before = draft.places[parent]
    for t in range(MAX_TREES):
        n = 0
        for k in range(t * MAX_CONTEXTS, t * MAX_CONTEXTS + draft.num_places[parent, t]):
            node, child, offset = before[k, 0], before[k, 1], before[k, 2]
            if offset == 0:
                i = find(s, node, token)
                if i < 0:
                    continue
                child = s.rows[(s.nodes[node, KIDS] + i) * ROW + CHILD]
            elif s.text[(s.nodes[child, LABEL] if child >= 0 else ~child) + offset] != token:
                continue
            offset += 1
            if child >= 0 and offset == s.nodes[child, LEN]:
                node, child, offset = child, np.int32(-1), np.int32(0)
            found[n, 0], found[n, 1] = node, child
            found[n, 2], found[n, 3] = offset, before[k, 3] + 1
            n += 1
        draft.num_places[e, t] = _keep(s, found, 0, n, draft.places[e], t * MAX_CONTEXTS)


# --- Candidates: what may follow, and how likely it is ----------------------------------------------------------------


@compiled
def _bin(value, a, b, c, d):
    """0 to 4: the number of bounds that the value does not exceed."""
    return (value <= a) + (value <= b) + (value <= c) + (value <= d)


@compiled
def _context_cell(depth, gap, count, total):
    order = depth - 1 if depth < 5 else 4 + (depth >= 7) + (depth >= 10) + (depth >= 16)
    counts = count - 1 if count < 4 else 3 + (count >= 6) + (count >= 10) + (count >= 20)
    share = count / total
    shares = 0
    if count < total:
        shares = 1 + _bin(share, 0.88, 0.7, 0.5, 0.33) + (share <= 0.2) + (share <= 0.1) + (share <= 0.04)
    return ((order * _GAPS + min(gap, 2)) * _COUNTS + counts) * _SHARES + shares


@compiled
def _latest(s, node, num):
    """Which of the first `num` children was seen last."""
    base = s.nodes[node, KIDS] * ROW + CHILD
    newest, latest = np.int32(-1), 0
    for k in range(num):
        child = s.rows[base + k * ROW]
        position = s.nodes[child, LABEL] if child >= 0 else ~child
        if position > newest:
            newest, latest = position, k
    return latest


@compiled
def _find_candidates(s, draft, e, min_share):
    """Lists the tokens that follow the contexts of expanded node `e`, with what is known of each."""
    tokens, features, known = draft.tokens, draft.features, draft.known
    start = n = draft.sizes[0]
    for t in range(MAX_TREES):
        kind = 0 if t == 0 else 1
        first = t * MAX_CONTEXTS
        for k in range(first, first + draft.num_places[e, t]):
            node, child, offset = draft.places[e, k, 0], draft.places[e, k, 1], draft.places[e, k, 2]
            depth = draft.places[e, k, 3]
            total = _support(s, node, child, offset)
            num, latest, at = 1, 0, 0
            if offset == 0:
                num = min(s.nodes[node, NUM], MAX_CHILDREN)
                latest = _latest(s, node, num)
                at = s.nodes[node, KIDS] * ROW
            for i in range(num):
                count = total
                if offset == 0:
                    token, count = s.rows[at + i * ROW], s.rows[at + i * ROW + COUNT]
                else:
                    token = s.text[(s.nodes[child, LABEL] if child >= 0 else ~child) + offset]
                if token < 0 or count < min_share * total:
                    break
                c = start
                while c < n and tokens[c] != token:
                    c += 1
                if c == n:
                    if n == MAX_CANDIDATES:
                        continue
                    n += 1
                    tokens[c], draft.parents[c], draft.expanded[c] = token, e, -1
                    for table in range(4):
                        features[c, table] = -1
                    known[c, 0] = known[c, 1] = known[c, 4] = 0
                    known[c, 2] = known[c, 3] = 4
                table = 2 * kind
                if features[c, table] < 0:
                    features[c, table] = kind * _CONTEXT_CELLS + _context_cell(depth, k - first, count, total)
                    known[c, kind] = depth if depth < 4 else 4 + (depth >= 8)
                    known[c, 2 + kind] = _bin(count / (total + 0.5), 0.6, 0.35, 0.18, 0.07)
                    known[c, 4] = i == latest
                elif features[c, table + 1] < 0:
                    features[c, table + 1] = kind * _CONTEXT_CELLS + _context_cell(depth, 0, count, total)
    draft.spans[e, 0], draft.spans[e, 1] = start, n
    draft.sizes[0] = n


@compiled
def _estimate(s, odds, weights, own_root, draft, e, path):
    """Gives the candidates of expanded node `e` their probabilities; `path` is that of the node itself."""
    start, known = draft.spans[e, 0], draft.known
    for c in range(start, draft.spans[e, 1]):
        i = find(s, own_root, draft.tokens[c])
        occurrences = 0
        if i >= 0:
            count = s.rows[(s.nodes[own_root, KIDS] + i) * ROW + COUNT]
            occurrences = 1 + (count > 1) + (count > 3)
        draft.features[c, 4] = _JOINT + ((known[c, 0] * 6 + known[c, 1]) * 5 + known[c, 2]) * 5 + known[c, 3]
        rough = (max(known[c, 0], known[c, 1]) * 4 + occurrences) * 5 + min(c - start, 4)
        draft.features[c, 5] = _ROUGH + (rough * 2 + known[c, 4]) * 2 + (e > 0)
        present = 0
        for table in range(4):
            present |= (draft.features[c, table] >= 0) << table
        mix = 2 * present + (c > start)
        draft.features[c, 6] = mix
        mixed = weights[mix, _NUM_TABLES] * np.float32(_BIAS)
        for table in range(_NUM_TABLES):
            cell = draft.features[c, table]
            if cell >= 0:
                mixed += weights[mix, table] * odds[cell]
        prob = min(max(1 / (1 + np.exp(-mixed)), np.float32(_MIN_PROB)), np.float32(_MAX_PROB))
        draft.probs[c] = prob
        draft.paths[c] = prob * path


@compiled
def make_draft(s, odds, weights, trees, points, num_points, start, end, limit, settings, draft, tokens, parents, probs):
    """Drafts for one slot, best path first. Returns the number of nodes."""
    found = np.empty((MAX_MATCH, 4), np.int32)
    nodes_of = np.empty(MAX_EXPANDED, np.int64)  # the draft node of every expanded node
    nodes_of[0] = -1
    min_path, is_chain = np.float32(settings[1]), settings[2] > 0
    min_share = np.float32(max(settings[1] / 3, 0.01))  # rarer followers are no candidates
    draft.sizes[0], draft.sizes[1] = 0, 1
    _root_places(s, trees, points, num_points, start, end, int(settings[0]), found, draft)
    _find_candidates(s, draft, 0, min_share)
    _estimate(s, odds, weights, trees[0], draft, 0, np.float32(1))
    n, first = 0, 0
    while n < limit and draft.sizes[1] < MAX_EXPANDED:
        best, best_path = -1, min_path
        for c in range(first, draft.sizes[0]):
            if draft.paths[c] >= best_path and draft.expanded[c] < 0:
                best, best_path = c, draft.paths[c]
        if best < 0:
            break
        token, parent, e = draft.tokens[best], draft.parents[best], draft.sizes[1]
        tokens[n], parents[n], probs[n] = token, nodes_of[parent], draft.probs[best]
        nodes_of[e] = n
        n += 1
        draft.expanded[best] = e
        draft.sizes[1] = e + 1
        if is_chain:
            first = draft.sizes[0]
        draft.spans[e, 0] = draft.spans[e, 1] = draft.sizes[0]
        if n < limit:  # the last node's followers would not be drafted any more
            _child_places(s, trees, found, draft, parent, e, token)
            _find_candidates(s, draft, e, min_share)
            _estimate(s, odds, weights, trees[0], draft, e, best_path)
    return n


# --- Learning ---------------------------------------------------------------------------------------------------------


@compiled
def learn(s, cells, odds, weights, draft, tokens, rate, memory, owners, used, clock):
    """
    Scores the last draft's candidates against the committed tokens, as far as these follow the draft. Texts that a
    right draft was copied from are marked as used.
    """
    if draft.sizes[1] == 0:
        return
    e = 0
    for token in tokens:
        following = -1
        for c in range(draft.spans[e, 0], draft.spans[e, 1]):
            hit = np.float32(0)
            if draft.tokens[c] == token:
                hit = np.float32(1)
                following = draft.expanded[c]
            mix = draft.features[c, 6]
            step = np.float32(rate) * (hit - draft.probs[c])
            weights[mix, _NUM_TABLES] += step * np.float32(_BIAS)
            for table in range(_NUM_TABLES):
                cell = draft.features[c, table]
                if cell >= 0:
                    weights[mix, table] += step * odds[cell]
                    number = cells[cell, 1] + 1
                    prob = cells[cell, 0] + (hit - cells[cell, 0]) / number
                    prob = min(max(prob, np.float32(_MIN_PROB)), np.float32(_MAX_PROB))
                    cells[cell, 0] = prob
                    cells[cell, 1] = min(number, np.float32(memory))
                    odds[cell] = _LOG_ODDS[int(prob * _STEPS)]
        if following < 0:
            break
        e = following
    for t in range(1, MAX_TREES):
        if e > 0 and draft.num_places[e, t] > 0:
            k = t * MAX_CONTEXTS
            node = draft.places[e, k, 1] if draft.places[e, k, 2] > 0 else draft.places[e, k, 0]
            used[owners[(s.nodes[node, LABEL] if node >= 0 else ~node) >> BLOCK_BITS]] = clock
    draft.sizes[1] = 0
