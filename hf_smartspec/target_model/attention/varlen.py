"""
Attention on CUDA without masks: rows of any length in one call, in place of padded rectangles. Trees and few queries
are computed by compiled code of this library, prompts by flash attention.
"""

from collections.abc import Callable

import numpy as np
import torch

from ...cpu.attention import NO_TREE
from ...gpu.attention import MOST_QUERIES, few_query_attention
from ...gpu.support import has_triton
from ...log import get_logger
from ..layout.spans import Spans
from ..layout.step_layout import StepLayout

logger = get_logger(__name__)

_LARGEST_HEAD = 256  # dimensions that flash attention supports
_flash_attention_forward = torch.ops.aten._flash_attention_forward
_TOLERANCE = 2e-2  # relative to the largest value; flash attention computes in half precision


def spans_of(layout: StepLayout, device: torch.device, window: int | None) -> Spans | None:
    """
    Return the spans of a layout that has not been sent to a device yet; None if it needs masks: trees where nothing is
    compiled, and those that may be deeper than a model's sliding window, since nodes' columns are not their positions.
    """
    trees = _trees(layout)
    if trees is not None and (not has_triton(device) or _may_exceed(trees, window)):
        return None
    starts = np.flatnonzero(np.diff(layout.firsts, prepend=-1))
    firsts, counts = layout.firsts[starts], np.diff(starts, append=len(layout.firsts))
    used = np.maximum.reduceat(layout.columns, starts) + 1
    ends = np.array([len(layout.firsts), firsts[-1] + layout.parts[-1].stride, 0])
    return Spans(
        rows=torch.from_numpy(np.concatenate([np.stack([starts, firsts, used]), ends[:, None]], axis=1)),
        trees=trees,
        most_queries=int(counts.max()),
        most_keys=int(used.max()),
        # Rows that decode beside a prompt, too: flash attention computes whole tiles for few queries, and no trees.
        has_few_queries=trees is not None or (len(layout.firsts) <= MOST_QUERIES * len(starts) and has_triton(device)),
    )


def _may_exceed(trees: torch.Tensor, window: int | None) -> bool:
    return window is not None and window < 64 * (len(trees) - 2)  # bits of nodes


def _trees(layout: StepLayout) -> torch.Tensor | None:
    """Return `Spans.trees` of a layout."""
    seen = [part.seen_nodes for part in layout.parts if part.seen_nodes is not None]
    if not seen:
        return None
    trees = np.zeros((1 + max(map(len, seen)), len(layout.columns)), np.int64)
    trees[0], trees[1] = NO_TREE, layout.columns
    for part in layout.parts:
        if part.seen_nodes is None or part.query_positions is None:
            continue
        own, positions = trees[:, part.tokens], part.query_positions.numpy().reshape(-1)
        own[0], own[2 : 1 + len(part.seen_nodes)] = part.seen_nodes[0], part.seen_nodes[1:]
        own[1] = positions if part.scatter is None else positions[part.scatter.numpy()]
    return torch.from_numpy(trees)


# --- Attention -------------------------------------------------------------------------------------------------------


def varlen_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layout: StepLayout,
    window: int | None,
    scaling: float | None,
) -> torch.Tensor:
    """Compute `packed_attention`, for calls that have a `kind_of`."""
    spans = layout.spans
    assert spans is not None, "laid out for masks"
    if window is not None and window >= spans.most_keys:
        window = None
    if spans.has_few_queries:
        sizes = spans.most_queries, spans.most_keys
        return few_query_attention(query, key, value, spans.rows, *sizes, spans.trees, window, scaling)
    queries, keys, used = spans.flash_rows
    output, *_ = _flash_attention_forward(
        query,
        key,
        value,
        queries,
        keys,
        spans.most_queries,
        spans.most_keys,
        0.0,
        True,
        False,
        scale=scaling,
        window_size_left=None if window is None else window - 1,
        window_size_right=None if window is None else 0,
        seqused_k=used,
    )
    return output


# --- Trust -----------------------------------------------------------------------------------------------------------

_MASKED = "calls that need masks"
_DEVICE_TYPES = {"cuda"}
_is_right: dict[tuple, bool] = {}  # by kind of call, after its first result was compared with that of masks


def serves(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Return whether steps of such a model are laid out for flash attention."""
    return device.type in _DEVICE_TYPES and dtype.itemsize == 2 and head_dim <= _LARGEST_HEAD and not head_dim % 8


def kind_of(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layout: StepLayout, window: int | None
) -> tuple | None:
    """Return the kind of a call, by which its results are trusted; None if the call needs masks."""
    spans = layout.spans
    if spans is None or not serves(query.device, query.dtype, query.shape[2]):  # layers are tried out in float32, too
        return None
    if torch.is_grad_enabled() and query.requires_grad:  # compiled code has no gradients
        return None
    is_windowed, num_words = window is not None and window < spans.most_keys, 0
    needs_masks = key.stride() != value.stride() or key.shape != value.shape or query.stride(2) != 1  # as in MLA
    if spans.trees is not None:
        num_words = len(spans.trees) - 2
        needs_masks |= is_windowed and _may_exceed(spans.trees, window)
    if needs_masks:
        _is_right[query.device, _MASKED] = False  # recordings keep what masks are made from
        return None
    kind = query.device, query.dtype, query.shape[1:], key.shape[1], is_windowed
    return *kind, min(num_words, 2), spans.has_few_queries


def is_trusted(kind: tuple) -> bool | None:
    """Return whether calls of a kind are right; None where no call has been compared yet."""
    return _is_right.get(kind)


def all_are_right(device: torch.device) -> bool:
    """Return whether all kinds of calls that were compared on a device were right."""
    kinds = list(_is_right.items())  # at once, since other threads may add some
    return all([is_right for kind, is_right in kinds if kind[0] == device])


def judge(kind: tuple, attend: Callable[[], torch.Tensor], expected: torch.Tensor) -> None:
    """Compare the result of a kind's first call with that of masks, and record whether they agree."""
    try:
        output = attend()
        _is_right[kind] = bool((output - expected).abs().max() <= _TOLERANCE * expected.abs().max())
        if not _is_right[kind]:
            logger.warning_once(
                "Attention over rows of different lengths is computed with masks: compiled code gives other results."
            )
    except Exception as error:  # compilers raise errors of many types
        _is_right[kind] = False
        logger.warning_once(
            f"Attention over rows of different lengths is computed with masks: compiled code failed ({error!r})."
        )
