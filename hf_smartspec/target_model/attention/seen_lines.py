"""Lines of keys and values that tokens attend to, for compiled attention."""

from collections.abc import Sequence

import numpy as np

from ...cpu.attention import MOST_WIDTH, SeenLines, runs_of
from ..layout.step_layout import PaddedPart, StepLayout


def has_few_tokens(part: PaddedPart, window: int | None) -> bool:
    """
    Return whether rows have few tokens, and columns determine what these attend to. Trees in a window do not qualify,
    since windows count positions.
    """
    has_trees = part.tree_pairs is not None
    is_determined = not has_trees or (part.seen_nodes is not None and (window is None or window >= part.num_columns))
    return is_determined and part.width <= MOST_WIDTH


def lines_of(layout: StepLayout, parts: Sequence[PaddedPart], window: int | None) -> SeenLines:
    """
    Return the lines that tokens of neighbouring parts attend to, computed once per step for every distinct window.
    """
    first, last = parts[0].tokens.start, parts[-1].tokens.stop
    key = first, last, window
    if key not in layout.seen:
        firsts, counts = layout.firsts[first:last], layout.columns[first:last] + 1
        begins = np.zeros_like(counts) if window is None else np.maximum(counts - window, 0)
        nodes = None
        if any([part.seen_nodes is not None for part in parts]):
            nodes = np.full((2, last - first), -1)
            for part in parts:
                if part.seen_nodes is not None:
                    nodes[:, part.tokens.start - first : part.tokens.stop - first] = part.seen_nodes
            nodes[0] += firsts
        assert counts.min() > 0, "every token attends to its own line"
        prefixes = None
        if layout.shared:
            prefixes = np.zeros((2, len(layout.firsts)), np.int64)
            for shared in layout.shared:
                prefixes[:, shared.tokens.numpy()] = [[shared.first_line], [shared.num_columns]]
            prefixes = prefixes[:, first:last].copy()
        layout.seen[key] = SeenLines(firsts + begins, counts - begins, runs_of(firsts), nodes, prefixes)
    return layout.seen[key]
