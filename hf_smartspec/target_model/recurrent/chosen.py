"""Attention whose indexer chooses blocks of keys for every query (Qwen4-Exp), along draft trees."""

import math
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from ...device import to_device
from ..cache.slot_cache import SlotCache
from ..layout.step_layout import PaddedPart, StepLayout

_MOST = 2**24  # numbers of keys that are gathered at once


def chosen_keys(
    cache: SlotCache, indexer: Any, hidden_states: torch.Tensor, position_embeddings: tuple[torch.Tensor, torch.Tensor]
) -> list[torch.Tensor] | None:
    """
    Write the indexer's keys of a packed step, and choose keys for its queries: of the complete blocks of a query's own
    text, those with the highest scores, and all tokens after the last complete block.

    Args:
        indexer (`torch.nn.Module`): The layer's indexer.
        hidden_states (`torch.Tensor` of shape `[1, N, hidden_size]`): Inputs of the layer's attention.
        position_embeddings (pair of `torch.Tensor` of shape `[1, N, rotary_dim]`): Cosines and sines.

    Returns:
        For each part of the layout, what is added to scores, `[R, 1, S, K]`: 0 for chosen keys, -inf for others. None
        where every query attends to its whole text.
    """
    layout, size = cache.layout, indexer.index_head_dim
    assert layout is not None, "a slot cache is written by a packed forward only"
    projected = indexer.index_qk_proj(hidden_states)[0].unflatten(1, (-1, size))
    queries, raw_keys = projected.split([indexer.index_n_heads, 1], dim=1)
    # A block is rotated by the position of its first token: every key is kept with its own rotation.
    rotations = torch.cat([item[0] for item in position_embeddings], dim=1)
    keys = cache.layer(indexer.layer_idx).write_index(raw_keys[:, 0], rotations)
    groups = [_groups(layout, part, indexer.compress_ratio, indexer.block_topk) for part in layout.parts]
    if not any(groups):
        return None
    rotate = _function(indexer, "apply_rotary_pos_emb")
    cos, sin = position_embeddings
    queries = rotate(indexer.q_layernorm(queries)[None], cos=cos, sin=sin, unsqueeze_dim=2)[0]
    found = []
    for part, of_part in zip(layout.parts, groups):
        own = queries[part.tokens]
        own = own if part.gather is None else own.index_select(0, part.gather)
        chosen = _chosen(indexer, rotate, own, part, part.view(keys)[:, 0], of_part)
        found.append(torch.zeros_like(chosen, dtype=hidden_states.dtype).masked_fill_(~chosen, -torch.inf)[:, None])
    return found


class _Group(NamedTuple):
    """
    Queries that see equally many complete blocks, of which they choose.

    Args:
        num (`int`): The number of these blocks.
        num_common (`int`): Blocks below the limits of all these queries: those of their rows' texts.
        queries (`torch.Tensor` of shape `[Q]`, int64): Indices into the padded queries `[R * S]`.
    """

    num: int
    num_common: int
    queries: torch.Tensor


def _groups(layout: StepLayout, part: PaddedPart, ratio: int, most: int) -> list[_Group]:
    """Return the queries of more than `most` blocks of `ratio` keys, which are found on the host, once per step."""
    key = part, ratio, most
    if key not in layout.groups:
        assert part.on_host is not None, "hybrids share no prefixes"
        limits, counts = (item.reshape(-1) // ratio for item in part.on_host)
        order = np.argsort(counts, kind="stable")
        order = order[np.searchsorted(counts[order], most, side="right") :]
        nums, starts = np.unique(counts[order], return_index=True)
        common = np.minimum.reduceat(limits[order], starts) if len(order) else starts
        queries = to_device(order, part.limits.device).tensor_split(starts[1:].tolist())
        layout.groups[key] = list(map(_Group, nums.tolist(), common.tolist(), queries))
    return layout.groups[key]


def _visible(part: PaddedPart) -> torch.Tensor:
    """Return the columns that the part's queries may attend to, `[R * S, K]`, bool."""
    mask = part.mask(None, 1, torch.float32)
    if mask is None:
        shape = part.num_rows * part.width, part.num_columns
        return torch.ones(shape, dtype=torch.bool, device=part.limits.device)
    return (mask == 0).flatten(0, 2)


def _chosen(
    indexer: Any, rotate: Any, queries: torch.Tensor, part: PaddedPart, keys: torch.Tensor, groups: Sequence[_Group]
) -> torch.Tensor:
    """
    Return the columns that queries attend to, `[R, S, K]`, bool.

    Args:
        queries (`torch.Tensor` of shape `[R * S, heads, size]`), keys (`torch.Tensor` of shape `[R, K, size + 2 *
            rotary_dim]`): Of the indexer.
        groups (sequence of `_Group`): The queries that choose; others attend to all columns that they see.
    """
    ratio, num_columns = indexer.compress_ratio, keys.shape[1]
    seen = _visible(part)
    # Below its limit, a query has the blocks of its row. Only later ones, which end in a tree, are the query's own.
    of_rows = _blocks(indexer, rotate, keys[:, : num_columns - num_columns % ratio].unflatten(1, (-1, ratio)))
    # Queries of equally many blocks together: `topk` picks others of equal scores if there are more to pick from.
    for num, first, same in groups:
        text = torch.arange(first * ratio, device=keys.device)
        for some in same.split(max(_MOST // (num * keys.shape[2]), 1)):
            row = some // part.width
            hidden = (~seen[some, len(text) :]).to(torch.int8)
            later = hidden.argsort(dim=1, stable=True)[:, : num * ratio - len(text)] + len(text)
            own = _blocks(indexer, rotate, keys[row[:, None], later].unflatten(1, (num - first, ratio)))
            scores = _scores(queries[some], torch.cat([of_rows[row, :first], own], dim=1))
            best = scores.topk(indexer.block_topk, dim=1).indices
            columns = torch.cat([text.expand(len(some), -1), later], dim=1)
            kept = columns.unflatten(1, (num, ratio)).gather(1, best[..., None].expand(-1, -1, ratio)).flatten(1)
            seen[some] = seen[some].scatter(1, columns, False).scatter(1, kept, True)
    return seen.view(part.num_rows, part.width, num_columns)


def _blocks(indexer: Any, rotate: Any, keys: torch.Tensor) -> torch.Tensor:
    """Return the keys `[Q, num, size]` of blocks of keys `[Q, num, ratio, size + 2 * rotary_dim]`."""
    size = indexer.index_head_dim
    raw, cos, sin = keys[..., :size], *keys[:, :, 0, size:].chunk(2, dim=-1)
    pooled = indexer.k_layernorm(raw.float().mean(dim=2).to(raw.dtype))
    return rotate(pooled[:, :, None], cos=cos, sin=sin, unsqueeze_dim=2)[:, :, 0]


def _scores(queries: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
    """Return the scores `[Q, num]` that queries `[Q, heads, size]` give to blocks `[Q, num, size]`."""
    scores = torch.matmul(queries.float(), blocks.float().mT)
    return torch.relu(scores).sum(dim=1) / math.sqrt(queries.shape[-1])


def _function(module: Any, name: str) -> Any:
    """Return a function of a module's modelling file."""
    return getattr(sys.modules[type(module).__module__], name)
