"""Attention whose indexer chooses blocks of keys for every query (Qwen4-Exp), along draft trees."""

import math
import sys
from typing import Any

import torch

from ..cache.slot_cache import SlotCache
from ..layout.step_layout import PaddedPart

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
    whole = indexer.block_topk
    counts = [_visible(part).sum(-1) // indexer.compress_ratio for part in layout.parts]
    if all(int(count.max()) <= whole for count in counts):
        return None
    rotate = _function(indexer, "apply_rotary_pos_emb")
    cos, sin = position_embeddings
    queries = rotate(indexer.q_layernorm(queries)[None], cos=cos, sin=sin, unsqueeze_dim=2)[0]
    found = []
    for part, count in zip(layout.parts, counts):
        own = queries[part.tokens]
        own = own if part.gather is None else own.index_select(0, part.gather)
        seen = _chosen(indexer, rotate, own, part, part.view(keys)[:, 0], count)
        found.append(torch.zeros_like(seen, dtype=hidden_states.dtype).masked_fill_(~seen, -torch.inf)[:, None])
    return found


def _visible(part: PaddedPart) -> torch.Tensor:
    """Return the columns that the part's queries may attend to, `[R, S, K]`, bool."""
    mask = part.mask(None, 1, torch.float32)
    if mask is None:
        shape = part.num_rows, part.width, part.num_columns
        return torch.ones(shape, dtype=torch.bool, device=part.limits.device)
    return mask[:, 0] == 0


def _chosen(
    indexer: Any, rotate: Any, queries: torch.Tensor, part: PaddedPart, keys: torch.Tensor, counts: torch.Tensor
) -> torch.Tensor:
    """
    Return the columns that queries attend to, `[R, S, K]`, bool, of queries `[R * S, heads, size]` and keys `[R, K,
    size + 2 * rotary_dim]`, whose complete blocks are counted, `[R, S]`.
    """
    visible = _visible(part)
    seen, rows = visible.flatten(0, 1), torch.arange(part.num_rows, device=keys.device).repeat_interleave(part.width)
    ratio, counts = indexer.compress_ratio, counts.flatten()
    # Queries of equally many blocks together: `topk` picks others of equal scores if there are more to pick from.
    for num in counts.unique().tolist():
        if num <= indexer.block_topk:
            continue
        same = (counts == num).nonzero()[:, 0]
        for some in same.split(max(_MOST // (num * ratio * keys.shape[2]), 1)):
            columns = (~seen[some]).to(torch.int8).argsort(dim=1, stable=True)[:, : num * ratio]
            blocks = keys[rows[some][:, None], columns].unflatten(1, (num, ratio))
            scores = _scores(indexer, rotate, queries[some], blocks)
            best = scores.topk(indexer.block_topk, dim=1).indices
            kept = columns.unflatten(1, (num, ratio)).gather(1, best[..., None].expand(-1, -1, ratio)).flatten(1)
            seen[some] = seen[some].scatter(1, columns, False).scatter(1, kept, True)
    return seen.view_as(visible)


def _scores(indexer: Any, rotate: Any, queries: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
    """Return the scores `[Q, num]` of blocks `[Q, num, ratio, size + 2 * rotary_dim]`."""
    size = indexer.index_head_dim
    raw, cos, sin = blocks[..., :size], *blocks[:, :, 0, size:].chunk(2, dim=-1)
    pooled = indexer.k_layernorm(raw.float().mean(dim=2).to(raw.dtype))
    pooled = rotate(pooled[:, :, None], cos=cos, sin=sin, unsqueeze_dim=2)[:, :, 0]
    scores = torch.matmul(queries.float(), pooled.float().mT)
    return torch.relu(scores).sum(dim=1) / math.sqrt(size)


def _function(module: Any, name: str) -> Any:
    """Return a function of a module's modelling file."""
    return getattr(sys.modules[type(module).__module__], name)
