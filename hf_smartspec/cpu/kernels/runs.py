"""Runs of tokens, whose attention is computed together."""

from ...jit import compiled_for
from .attend import MOST_TOKENS


@compiled_for("i8:1 i8:1")
def divide(rows, runs):
    """
    Write the first token of each run, and the end of the last one, to `runs`; return the number of runs.

    Args:
        rows (`[N]` int64): Row of each token; tokens of one row are neighbours.
        runs (`[N + 1]` int64): Written up to and including the end of the last run.
    """
    number, first = 0, 0
    while first < len(rows):
        end = first + 1
        while end < len(rows) and rows[end] == rows[first]:
            end += 1
        parts = (end - first + MOST_TOKENS - 1) // MOST_TOKENS
        for part in range(parts):
            runs[number + part] = first + part * (end - first) // parts
        number, first = number + parts, end
    runs[number] = len(rows)
    return number


@compiled_for("i8:1 i8:1 i8:1 i8:1")
def extent(runs, firsts, counts, prefix_counts):
    """
    Return the most tokens of a run, the lines that all tokens read in sum, and the most lines that a run reads, which
    are more than each of its tokens reads: their windows begin at different lines.

    Args:
        runs, firsts, counts: As in `SeenLines`.
        prefix_counts (`[N]` int64): Lines that each token attends to before these; empty if there are none.
    """
    most_tokens, num_seen, most_lines = 0, 0, 0
    for run in range(len(runs) - 1):
        begin, end = firsts[runs[run]], 0
        prefix = prefix_counts[runs[run]] if len(prefix_counts) else 0
        for token in range(runs[run], runs[run + 1]):
            begin, end = min(begin, firsts[token]), max(end, firsts[token] + counts[token])
            num_seen += counts[token] + prefix
        most_tokens, most_lines = max(most_tokens, runs[run + 1] - runs[run]), max(most_lines, end - begin + prefix)
    return most_tokens, num_seen, most_lines
