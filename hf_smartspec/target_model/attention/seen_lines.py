"""Lines of keys and values that tokens attend to, for compiled attention."""

from collections.abc import Sequence

import numpy as np
import torch

from ...cpu.attention import NO_TREE, SeenLines, most_width, runs_of
from ..layout.step_layout import PaddedPart, StepLayout


def has_few_tokens(part: PaddedPart, window: int | None, dtype: torch.dtype) -> bool:
    """
    Return whether compiled code computes attention of as many tokens of this dtype, and columns say to what they
    attend.
    """
    return has_lines(part, window) and part.width <= most_width(dtype)


def has_lines(part: PaddedPart, window: int | None) -> bool:
    """
    Return whether columns say to what a part's tokens attend: in a window, trees must not be deeper than it is long, so
    that a token's ancestors are all within.
    """
    return part.tree_pairs is None or (
        part.seen_nodes is not None
        and (window is None or window >= min(part.num_columns, 64 * (len(part.seen_nodes) - 1)))
    )


def lines_of(layout: StepLayout, parts: Sequence[PaddedPart], window: int | None) -> SeenLines:
    """
    Return the lines that tokens of neighbouring parts attend to, computed once per step for every distinct window.
    """
    first, last = parts[0].tokens.start, parts[-1].tokens.stop
    key = first, last, window
    if key not in layout.seen:
        firsts, counts = layout.firsts[first:last], layout.columns[first:last] + 1
        begins = firsts
        if window is not None:
            unseen = np.maximum(_positions(layout, parts) + 1 - window, 0)
            begins, counts = firsts + unseen, counts - unseen
            assert counts.min() > 0, "every token attends to its own line"
        nodes, most = None, max([0 if part.seen_nodes is None else len(part.seen_nodes) for part in parts])
        if most:
            nodes = np.zeros((most, last - first), np.int64)
            nodes[0] = NO_TREE
            for part in parts:
                if (seen := part.seen_nodes) is not None:
                    nodes[: len(seen), part.tokens.start - first : part.tokens.stop - first] = seen
            nodes[0] += firsts
        prefixes = None
        if layout.shared:
            prefixes = np.zeros((2, len(layout.firsts)), np.int64)
            for shared in layout.shared:
                prefixes[:, shared.tokens.numpy()] = [[shared.first_line], [shared.num_columns]]
            prefixes = prefixes[:, first:last].copy()
        layout.seen[key] = SeenLines(begins, counts, runs_of(firsts), nodes, prefixes)
    return layout.seen[key]


def kept_lines_of(layout: StepLayout, window: int | None) -> SeenLines:
    """Return `lines_of` the tokens that are kept, for layers that compute no more."""
    seen, kept = lines_of(layout, layout.parts, window), layout.kept
    if kept is None:
        return seen
    key = -1, -1, window  # as of no parts
    if key not in layout.seen:
        places = kept.numpy()
        more = [None if item is None else item.take(places, axis=1) for item in (seen.nodes, seen.prefixes)]
        layout.seen[key] = SeenLines(seen.firsts[places], seen.counts[places], runs_of(layout.firsts[places]), *more)
    return layout.seen[key]


def _positions(layout: StepLayout, parts: Sequence[PaddedPart]) -> np.ndarray:
    """Return the positions of the parts' tokens, as windows count them: of nodes, not those of their columns."""
    found = layout.columns[parts[0].tokens.start : parts[-1].tokens.stop].copy()
    for part in parts:
        if part.query_positions is not None:
            padded = part.query_positions.numpy().reshape(-1)
            own = slice(part.tokens.start - parts[0].tokens.start, part.tokens.stop - parts[0].tokens.start)
            found[own] = padded if part.scatter is None else padded[part.scatter.numpy()]
    return found
