"""SuffixDecoding as published (Oliaro et al., 2024, algorithm 1): drafts ranked by counts alone (compiled)."""

import numpy as np

from .....jit import inner
from .expand import CHAINS, FACTOR, LEAST, LONGEST, MAX_NODES, MAX_TREES, OFFSET
from .places import edge_of, place_of
from .store import CHILD, COUNT, ENDED, KIDS, NUM, ROW, TOTAL

_QUEUE = 4 * MAX_NODES


@inner
def draft_by_score(s, trees, points, walks, num_points, start, end, limit, settings, tokens, parents, probs):
    """
    Run EXPANDSPECULATIONTREE for every tree and match length p, each of up to alpha p + offset nodes. The draft of the
    highest SCORE, the sum of its path probabilities, wins, the longer match in a tie. Return its number of nodes.
    """
    trial_tokens = np.empty(MAX_NODES, np.int64)
    trial_parents = np.empty(MAX_NODES, np.int64)
    trial_probs = np.empty(MAX_NODES, np.float32)
    best_score, best_size = 0.0, 0
    for t in range(MAX_TREES):
        if trees[t] < 0:
            continue
        for length in range(1, min(num_points if t == 0 else end - start, int(settings[LONGEST])) + 1):
            is_found, node, following, stop = place_of(s, trees, t, points, walks, end, length)
            if not is_found:
                break
            size = min(limit, int(settings[FACTOR] * length + settings[OFFSET]))
            num, score = _expand(
                s, node, following, stop, size, settings[LEAST], settings[CHAINS] > 0,
                trial_tokens, trial_parents, trial_probs,
            )  # fmt: skip
            if score > 0 and score >= best_score:
                best_score, best_size = score, num
                for k in range(num):
                    tokens[k], parents[k], probs[k] = trial_tokens[k], trial_parents[k], trial_probs[k]
    return best_size


@inner
def _expand(s, node, following, stop, limit, least, is_chain, tokens, parents, probs):
    """Find the likeliest nodes below a place, by D(N) = D(parent) COUNT(N) / COUNT(parent). Return (nodes, SCORE)."""
    # The queue's entries: a node's next child that was not drafted yet, or a place on an edge (no child's index).
    likely = np.empty(_QUEUE, np.float64)
    places = np.empty((_QUEUE, 5), np.int64)  # node, follower and end of the edge, index of the child, parent
    size = _push(s, likely, places, 0, node, following, stop, 0, -1, 1.0)
    num, score = 0, 0.0
    while num < limit and size > 0:
        k = 0
        for other in range(1, size):
            if likely[other] > likely[k]:
                k = other
        path = likely[k]
        if path < least:
            break
        node, following, stop, i, parent = places[k]
        size -= 1
        likely[k] = likely[size]
        places[k] = places[size]
        above = _path_of(probs, parents, parent)
        if following >= 0:
            token = s.text[following]
        else:
            entry = s.nodes[node + KIDS] + i * ROW
            token = s.rows[entry]
            if not is_chain and i + 1 < s.nodes[node + NUM]:
                size = _push(s, likely, places, size, node, -1, -1, i + 1, parent, above)
            node = np.int64(s.rows[entry + CHILD])
            following, stop = edge_of(s, node)
        tokens[num], parents[num], probs[num] = token, parent, path / above
        following = following + 1 if following + 1 < stop else -1
        size = _push(s, likely, places, size, node, following, stop, 0, num, path)
        num += 1
        score += path
    return num, score


@inner
def _path_of(probs, parents, node):
    """Return the probability of the path to a drafted node."""
    path = 1.0
    while node >= 0:
        path *= probs[node]
        node = parents[node]
    return path


@inner
def _push(s, likely, places, size, node, following, stop, i, parent, path):
    """Queue the nodes that follow a place; return the queue's size."""
    if size == _QUEUE:
        return size
    if following < 0:
        if i >= s.nodes[node + NUM]:
            return size
        count = s.rows[s.nodes[node + KIDS] + i * ROW + COUNT]
        path *= count / (s.nodes[node + TOTAL] + s.nodes[node + ENDED])
    elif s.text[following] < 0:
        return size
    likely[size] = path
    places[size, 0], places[size, 1], places[size, 2], places[size, 3] = node, following, stop, i
    places[size, 4] = parent
    return size + 1
