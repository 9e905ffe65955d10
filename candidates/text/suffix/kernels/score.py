"""SuffixDecoding as published (Oliaro et al., 2024, algorithm 1): drafts ranked by counts alone (compiled)."""

import numpy as np

from .....jit import inner
from .expand import CHAINS, FACTOR, LEAST, LONGEST, MAX_TREES, OFFSET
from .places import edge_of, place_of
from .store import CHILD, COUNT, ENDED, KIDS, NODE, NUM, PAIR, ROW, TOTAL


@inner
def draft_by_score(s, trees, points, walks, num_walks, num_points, start, end, limit, settings, tokens, parents, probs):
    """
    Run GENERATECANDIDATETREE: EXPANDSPECULATIONTREE for every tree and match length p, each of up to alpha p + offset
    nodes. The draft of the highest SCORE, the sum of its D(N), wins; of equal ones, the first in the paper's order:
    other trees before the request's own, short matches before long ones. Return its number of nodes.
    """
    longest = int(settings[LONGEST])
    found = np.empty((longest, 3), np.int64)  # the place of each match
    trial_tokens, trial_parents = np.empty(limit, np.int64), np.empty(limit, np.int64)
    trial_probs, paths = np.empty(limit, np.float32), np.empty(limit, np.float64)
    likely, queue = np.empty(limit + 1, np.float64), np.empty((limit + 1, 5), np.int64)
    best_score, best_size = 0.0, 0
    for number in range(1, MAX_TREES + 1):
        t, before, longest_match = number % MAX_TREES, best_score, 0
        if trees[t] < 0:
            continue
        for length in range(1, min(num_points if t == 0 else end - start, longest) + 1):
            is_found, node, following, stop = place_of(s, trees, t, points, walks, num_walks, end, length)
            if not is_found:
                break
            found[longest_match, 0], found[longest_match, 1], found[longest_match, 2] = node, following, stop
            longest_match = length
        # From the longest match on, which has the largest draft: a SCORE is no more than the number of nodes, so that
        # most others need no draft.
        for length in range(longest_match, 0, -1):
            size = min(limit, int(settings[FACTOR] * length + settings[OFFSET]))
            if size < best_score:
                continue
            num, score = _expand(
                s, found[length - 1], size, settings[LEAST], settings[CHAINS] > 0, trial_tokens, trial_parents,
                trial_probs, paths, likely, queue,
            )  # fmt: skip
            if score > before and score >= best_score:
                best_score, best_size = score, num
                for k in range(num):
                    tokens[k], parents[k], probs[k] = trial_tokens[k], trial_parents[k], trial_probs[k]
    return best_size


@inner
def _expand(s, place, limit, least, is_chain, tokens, parents, probs, paths, likely, queue):
    """
    Find the likeliest nodes below a place, by D(N) = D(PARENT(N)) C(N), where C(N) = COUNT(N) / COUNT(PARENT(N)); write
    D to `paths` and C to `probs`. `likely` and `queue` hold the D and the place of each node that may be next: a node's
    most frequent child that was not drafted yet, or the follower on an edge. Return (nodes, SCORE).
    """
    size = _push(s, likely, queue, 0, place[0], place[1], place[2], 0, -1, 1.0)
    num, score = 0, 0.0
    while num < limit and size > 0:
        k = 0
        for other in range(1, size):
            if likely[other] > likely[k]:
                k = other
        path = likely[k]
        if path < least:
            break
        node, following, stop, i, parent = queue[k]
        size -= 1
        likely[k] = likely[size]
        queue[k] = queue[size]
        above = paths[parent] if parent >= 0 else 1.0
        if following >= 0:
            token = s.text[following]
        else:
            entry = s.nodes[node * NODE + KIDS] * PAIR + i * ROW
            token = s.rows[entry]
            if not is_chain and i + 1 < s.nodes[node * NODE + NUM]:
                size = _push(s, likely, queue, size, node, -1, -1, i + 1, parent, above)
            node = np.int64(s.rows[entry + CHILD])
            following, stop = edge_of(s, node)
        tokens[num], parents[num], probs[num], paths[num] = token, parent, path / above, path
        following = following + 1 if following + 1 < stop else -1
        size = _push(s, likely, queue, size, node, following, stop, 0, num, path)
        num += 1
        score += path
    return num, score


@inner
def _push(s, likely, queue, size, node, following, stop, i, parent, path):
    """Queue the `i`-th node that follows a place, if there is one; return the queue's size."""
    if following < 0:
        if i >= s.nodes[node * NODE + NUM]:
            return size
        count = s.rows[s.nodes[node * NODE + KIDS] * PAIR + i * ROW + COUNT]
        path *= count / (s.nodes[node * NODE + TOTAL] + s.nodes[node * NODE + ENDED])
    elif s.text[following] < 0:
        return size
    likely[size] = path
    queue[size, 0], queue[size, 1], queue[size, 2], queue[size, 3], queue[size, 4] = node, following, stop, i, parent
    return size + 1
