"""
The cells of a calibrator's table, in which nodes are counted: by score, depth and match length, and coarser.

Arrays: `scores` `[nodes]` float64; `cells` `[nodes, levels]` int64, coarse levels first; `num`, `hits` `[cells]`
float64, decayed counts.
"""

from ...jit import compiled_for


@compiled_for("f8:1 i8:1 i8:1 f8:1 i8:1 i8:1 i8:2")
def locate(scores, depths, lengths, edges, bins, starts, cells):
    """
    Write every node's cells to `cells`. A score's bin is the number of `edges` (float64) that it reaches; a depth's or
    length's is its entry in `bins` (int64, the last one for larger ones, too). `starts` are the levels' first cells.
    """
    num_lengths, last = bins[-1] + 1, len(bins) - 1
    for node in range(len(scores)):
        place = 0
        while place < len(edges) and scores[node] >= edges[place]:
            place += 1
        cells[node, 0] = starts[0]
        cells[node, 1] = starts[1] + place
        place = place * num_lengths + bins[min(max(depths[node], 0), last)]
        cells[node, 2] = starts[2] + place
        place = place * num_lengths + bins[min(max(lengths[node], 0), last)]
        cells[node, 3] = starts[3] + place


@compiled_for("f8:1 f8:1 i8:2 f8:1 f8 f8 f8:1")
def estimate(num, hits, cells, scores, ratio, strength, probs):
    """
    Write probabilities (float64) to `probs`: from the raw score times `ratio`, level by level to the finest cell. Each
    level's frequency is shrunk to the estimate of the coarser one, by `strength` observations.
    """
    for node in range(len(scores)):
        prob = min(scores[node] * ratio, 1.0)
        for level in range(1, cells.shape[1]):
            cell = cells[node, level]
            prob = (hits[cell] + strength * prob) / (num[cell] + strength)
        probs[node] = prob


@compiled_for("f8:1 f8:1 f8 i8:2 f8:1")
def count(num, hits, decay, cells, outcomes):
    """Decay all counts, then add nodes, accepted or not (`outcomes`, float64 1 or 0), with equal weight."""
    for cell in range(len(num)):
        num[cell] *= decay
        hits[cell] *= decay
    for node in range(len(outcomes)):
        for level in range(cells.shape[1]):
            num[cells[node, level]] += 1.0
            hits[cells[node, level]] += outcomes[node]
