"""Nodes of a lattice of candidates in order of their path probability, by a heap (DDTree, arXiv 2604.12989)."""

from ....jit import compiled_for, inner


@compiled_for("f4:2 f4:4 i8:1 f8 i8:1 i8:3 f4:2 i8:1 i8:2 f8:1 i8:1")
def best_nodes(first, given, limits, least, widths, nodes, probs, counts, entries, weights, heap):
    """
    Write the `limits[i]` nodes of the highest path probability of each row, the likeliest first, so that parents stand
    before their children. The first is written whatever its probability, and no other below `least`.

    Args:
        first (float32 `[R, k]`): Probabilities of the candidates of depth 1.
        given (float32 `[R, L - 1, p, k]`): Probabilities of those of the next depth after each one of a depth, where p
            is k, or after any, where p is 1.
        limits (int64 `[R]`), least (`float`): See above.
        widths (int64 `[L]`): The most children of a node at each depth.
        nodes (int64 `[R, most, 4]`), probs (float32 `[R, most]`), counts (int64 `[R]`): Filled with the parent, depth
            (from 0), candidate and entry of every node; its probability given its parent; and the number of nodes of a
            row.
        entries (int64 `[2 * most + 1, 4]`), weights (float64 `[2 * most + 1]`), heap (int64 of that length):
            Overwritten.
    """
    num_depths = given.shape[1] + 1
    for row in range(len(first)):
        size = added = number = 0
        if widths[0] > 0:
            candidate = _next(first[row], -1)
            if candidate >= 0:
                size = added = _push(heap, weights, entries, 0, 0, -1, 0, candidate, 0, first[row, candidate])
        while size and number < limits[row]:
            entry = heap[0]
            if number and (weights[entry] < least or weights[entry] <= 0.0):
                break
            size = _pop(heap, weights, size)
            parent, depth, candidate, rank = entries[entry]
            above = 1.0 if parent < 0 else weights[nodes[row, parent, 3]]
            line = _line(first, given, row, depth, -1 if parent < 0 else nodes[row, parent, 2])
            nodes[row, number, 0], nodes[row, number, 1], nodes[row, number, 2] = parent, depth, candidate
            nodes[row, number, 3], probs[row, number] = entry, line[candidate]
            if rank + 1 < widths[depth]:
                sibling = _next(line, candidate)
                if sibling >= 0:
                    size = _push(
                        heap, weights, entries, size, added, parent, depth, sibling, rank + 1, above * line[sibling]
                    )
                    added += 1
            if depth + 1 < num_depths and widths[depth + 1] > 0:
                line = _line(first, given, row, depth + 1, candidate)
                child = _next(line, -1)
                if child >= 0:
                    size = _push(
                        heap, weights, entries, size, added, number, depth + 1, child, 0, weights[entry] * line[child]
                    )
                    added += 1
            number += 1
        counts[row] = number


@inner
def _line(first, given, row, depth, parent):
    """Return the probabilities of the candidates of a depth, given the candidate before."""
    if depth == 0:
        return first[row]
    return given[row, depth - 1, parent if given.shape[2] > 1 else 0]


@inner
def _next(line, candidate):
    """Return the likeliest candidate after this one (-1: of all) in descending order; -1 if there is none."""
    best = -1
    for other in range(len(line)):
        if candidate >= 0 and (
            line[other] > line[candidate] or (line[other] == line[candidate] and other <= candidate)
        ):
            continue
        if line[other] >= 0.0 and (best < 0 or line[other] > line[best]):
            best = other
    return best


@inner
def _push(heap, weights, entries, size, entry, parent, depth, candidate, rank, weight):
    """Add an entry to the heap; return the heap's size."""
    entries[entry, 0], entries[entry, 1], entries[entry, 2], entries[entry, 3] = parent, depth, candidate, rank
    weights[entry] = weight
    place = size
    while place > 0:
        above = (place - 1) // 2
        if weights[heap[above]] >= weight:
            break
        heap[place] = heap[above]
        place = above
    heap[place] = entry
    return size + 1


@inner
def _pop(heap, weights, size):
    """Remove the first entry of the heap; return the heap's size."""
    size -= 1
    last, place = heap[size], 0
    while True:
        below = 2 * place + 1
        if below >= size:
            break
        if below + 1 < size and weights[heap[below + 1]] > weights[heap[below]]:
            below += 1
        if weights[last] >= weights[heap[below]]:
            break
        heap[place] = heap[below]
        place = below
    heap[place] = last
    return size
