"""
Attention on CUDA without masks: flash attention over rows of any length, in place of padded rectangles. Chains, prompts
and decoding without drafts are causal and take one call for all rows. Trees take two pieces, the keys common to all of
a row's queries and the few others, merged by their log-sum-exps.
"""

from collections.abc import Callable

import numpy as np
import torch

from ...log import get_logger
from ..layout.spans import Spans
from ..layout.step_layout import PaddedPart, StepLayout

logger = get_logger(__name__)

_LARGEST_HEAD = 256  # dimensions that flash attention supports
_flash_attention_forward = torch.ops.aten._flash_attention_forward
_TOLERANCE = 2e-2  # relative to the largest value; flash attention computes in half precision


def spans_of(layout: StepLayout) -> Spans:
    """Return the spans of a layout that has not been sent to a device yet."""
    starts = np.flatnonzero(np.diff(layout.firsts, prepend=-1))
    firsts, counts = layout.firsts[starts], np.diff(starts, append=len(layout.firsts))
    used = np.maximum.reduceat(layout.columns, starts) + 1
    common, bases, extents = layout.columns[starts].copy(), [], []
    for part in layout.parts:
        rows = np.flatnonzero((starts >= part.tokens.start) & (starts < part.tokens.stop))
        places = (firsts[rows] - part.first_line) // part.stride
        if part.tree_pairs is not None:  # nodes of an earlier forward come before the row's first query
            queries = np.arange(part.width) < counts[rows, None]
            limits = np.where(queries, part.limits.numpy()[places], np.iinfo(np.int64).max)
            common[rows] = np.minimum(common[rows], limits.min(axis=1))
        base = np.zeros(part.num_rows, np.int64)
        base[places] = common[rows]
        bases.append(base)
        extents.append(int((used[rows] - common[rows]).max()))
    return Spans(
        rows=torch.from_numpy(
            np.stack(
                [
                    np.append(starts, len(layout.firsts)),
                    np.append(firsts, firsts[-1] + layout.parts[-1].stride),
                    np.append(used, 0),
                    np.append(common, 0),
                ]
            )
        ),
        bases=torch.from_numpy(np.concatenate(bases)),
        most_queries=int(counts.max()),
        most_keys=int(used.max()),
        most_common=int(common.max()),
        extents=extents,
        has_trees=any(part.tree_pairs is not None for part in layout.parts),
    )


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
    if not spans.has_trees:
        return _flash(query, key, value, spans, False, window, scaling)[0]
    rest, rest_lse = _rest(query, key, value, layout, spans, scaling)
    if not spans.most_common:
        return rest
    output, lse = _flash(query, key, value, spans, True, None, scaling)
    lse = lse.masked_fill(lse.isposinf(), -torch.inf)  # flash attention's value for rows without common keys
    return torch.lerp(rest, output, torch.sigmoid(lse - rest_lse).t()[:, :, None].to(output.dtype))


def _flash(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    spans: Spans,
    of_common: bool,
    window: int | None,
    scaling: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Run flash attention over the keys common to all of a row's queries, or over all keys, causal from the row's last
    query and key backwards. Return output `[N, heads, dim]` and log-sum-exp `[heads, N]`.
    """
    queries, keys, used, common = spans.flash_rows
    output, lse, *_ = _flash_attention_forward(
        query,
        key,
        value,
        queries,
        keys,
        spans.most_queries,
        spans.most_common if of_common else spans.most_keys,
        0.0,
        not of_common,
        False,
        scale=scaling,
        window_size_left=None if window is None else window - 1,
        window_size_right=None if window is None else 0,
        seqused_k=common if of_common else used,
    )
    return output, lse


def _rest(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layout: StepLayout,
    spans: Spans,
    scaling: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Attend to the keys that only some of a row's queries attend to; return output `[N, heads, dim]` and log-sum-exp
    `[heads, N]`, float32.
    """
    outputs, lses = [], []
    bases = spans.bases.split([part.num_rows for part in layout.parts])
    for part, base, extent in zip(layout.parts, bases, spans.extents):
        lines, visible = _square(part, base, extent)
        output, lse = _of_part(query[part.tokens], key[lines], value[lines], visible, part, scaling)
        outputs.append(output)
        lses.append(lse)
    return torch.cat(outputs), torch.cat(lses, dim=1)


def _square(part: PaddedPart, base: torch.Tensor, extent: int) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Return the lines after the common ones, `[R, E]`, and which queries attend to them, bool `[R, S, E]`; computed once
    per step.
    """
    key = ("square", extent)
    if key not in part._masks:
        columns = base[:, None] + torch.arange(extent, device=base.device)
        visible = columns[:, None, :] < part.limits[:, :, None]
        if part.tree_pairs is not None:
            query, column = part.tree_pairs // part.num_columns, part.tree_pairs % part.num_columns
            visible.view(-1).index_fill_(0, query * extent + column - base[query // part.width], True)
        firsts = part.first_line + part.stride * torch.arange(part.num_rows, device=base.device)
        part._masks[key] = firsts[:, None] + columns.clamp(max=part.stride - 1), visible
    return part._masks[key]


def _of_part(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    visible: torch.Tensor,
    part: PaddedPart,
    scaling: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    num_heads, kv_heads = query.shape[1], key.shape[2]
    padded = query if part.gather is None else query.index_select(0, part.gather)
    folded = padded.view(part.num_rows, part.width, kv_heads, num_heads // kv_heads, -1).float()
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    scores = torch.einsum("rskgd,rekd->rskge", folded * scale, key.float())
    scores = scores.masked_fill(~visible[:, :, None, None, :], -torch.inf)
    lse = scores.logsumexp(dim=-1)
    # Queries without a key in the rest get the weight 0 in the merge; their outputs must not be NaN.
    weights = (scores - lse.masked_fill(lse.isneginf(), 0.0)[..., None]).exp()
    output = torch.einsum("rskge,rekd->rskgd", weights, value.float()).flatten(2, 3).flatten(0, 1).to(query.dtype)
    lse = lse.flatten(2, 3).flatten(0, 1)
    if part.scatter is not None:
        output, lse = output.index_select(0, part.scatter), lse.index_select(0, part.scatter)
    return output, lse.t()


# --- Trust -----------------------------------------------------------------------------------------------------------

_DEVICE_TYPES = {"cuda"}
_is_right: dict[tuple, bool] = {}  # by kind of call, after its first result was compared with that of masks


def serves(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Return whether steps of such a model are laid out for flash attention."""
    return device.type in _DEVICE_TYPES and dtype.itemsize == 2 and head_dim <= _LARGEST_HEAD and not head_dim % 8


def kind_of(query: torch.Tensor, key: torch.Tensor, layout: StepLayout, window: int | None) -> tuple | None:
    """
    Return the kind of a call, by which its results are trusted; None if the call needs masks, as trees in a sliding
    window do, whose nodes' columns are not their positions.
    """
    spans = layout.spans
    if spans is None or not serves(query.device, query.dtype, query.shape[2]):  # layers are tried out in float32, too
        return None
    is_windowed = window is not None and window < spans.most_keys
    if is_windowed and spans.has_trees:
        return None
    return query.device, query.dtype, query.shape[1:], key.shape[1], is_windowed, spans.has_trees


def is_trusted(kind: tuple) -> bool | None:
    """Return whether calls of a kind are right; None where no call has been compared yet."""
    return _is_right.get(kind)


def all_are_right(device: torch.device) -> bool:
    """Return whether all kinds of calls that were compared on a device were right."""
    return all([is_right for kind, is_right in _is_right.items() if kind[0] == device])


def judge(kind: tuple, attend: Callable[[], torch.Tensor], expected: torch.Tensor) -> None:
    """Compare the result of a kind's first call with that of masks, and record whether they agree."""
    try:
        output = attend()
        _is_right[kind] = bool((output - expected).abs().max() <= _TOLERANCE * expected.abs().max())
        if not _is_right[kind]:
            logger.warning_once("Flash attention over rows of different lengths is not used: it gives other results.")
    except (RuntimeError, TypeError, ValueError, NotImplementedError) as error:
        _is_right[kind] = False
        logger.warning_once(f"Flash attention over rows of different lengths is not used: {error!r}")
