"""Layouts for layers that have no keys and values of rows' first tokens."""

from dataclasses import replace

import numpy as np
import torch

from .step_layout import PaddedPart, StepLayout


def skip_prefix(layout: StepLayout, num: int) -> StepLayout:
    """
    Return the same step, as if the first `num` columns of every row were empty. Tokens in these columns attend to some
    column, with meaningless results. Keys and values are written to the same places.
    """
    if num == 0:
        return layout
    parts = [_skip_in_part(part, num) for part in layout.parts]
    shift = np.minimum(layout.columns, num)  # tokens in the first columns attend to themselves
    firsts, columns = layout.firsts + shift, layout.columns - shift
    return replace(layout, parts=parts, firsts=firsts, columns=columns, spans=None, seen={})


def _skip_in_part(part: PaddedPart, num: int) -> PaddedPart:
    num = min(num, part.num_columns - 1)
    columns = part.num_columns - num
    pairs = None if part.tree_pairs is None else _moved(part.tree_pairs, part.num_columns, num)[0]
    positions = nodes = None
    if part.nodes is not None and part.query_positions is not None:
        places, kept = _moved(part.nodes[0], part.num_columns, num)
        positions, nodes = part.query_positions - num, torch.stack([places, part.nodes[1][kept] - num])
    return replace(
        part,
        first_line=part.first_line + num,
        num_columns=columns,
        limits=(part.limits - num).clamp(min=1),
        tree_pairs=pairs,
        query_positions=positions,
        nodes=nodes,
        seen_nodes=None,
        on_host=None,
        _masks={},
    )


def _moved(places: torch.Tensor, num_columns: int, num: int) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Convert indices into `[..., K]` to indices into `[..., K - num]`, without those of the first columns; return them,
    and which are left.
    """
    columns = places % num_columns - num
    kept = columns >= 0
    return (places // num_columns * (num_columns - num) + columns)[kept], kept
