"""A block drafter's forward over one row, with dense masks: its context in pieces, then one block."""

from collections.abc import Sequence

import torch
from torch.nn.functional import scaled_dot_product_attention

from hf_smartspec.candidates.heads.blocks.drafter import BlockDrafter


def run_block(
    drafter: BlockDrafter, states: torch.Tensor, embeds: torch.Tensor, pieces: Sequence[int] | None = None
) -> torch.Tensor:
    """Return the hidden states of slots `[S, hidden]` after the target's states `[s, ...]`, given in these pieces."""
    num, start = len(embeds), len(states)
    caches: list[list] = [[] for _ in drafter.layers]
    begin = 0
    for size in pieces or [start]:
        positions = torch.arange(begin, begin + size)
        combined = drafter.combine(states[begin : begin + size])
        for cache, layer in zip(caches, drafter.layers):
            cache.append(layer.context(combined, drafter.rotation(positions)))
        begin += size
    assert begin == start
    positions = torch.arange(start + num)
    hidden, rotation = embeds[None], drafter.rotation(positions[None, start:])
    for cache, layer in zip(caches, drafter.layers):
        keys, values = (torch.cat(items) for items in zip(*cache)) if start else (torch.empty(0), torch.empty(0))
        mask = layer.sees(positions[start:], positions)

        def attend(query, key, value, sinks, keys=keys, values=values, mask=mask):
            if start:
                key, value = torch.cat([keys[None], key], dim=1), torch.cat([values[None], value], dim=1)
            query, key, value = (item.transpose(1, 2) for item in (query, key, value))
            if sinks is not None:
                groups = query.shape[1] // key.shape[1]
                key, value = (item.repeat_interleave(groups, dim=1) for item in (key, value))
                scores = (query @ key.mT / query.shape[-1] ** 0.5).masked_fill(~mask, -torch.inf)
                column = sinks[:, None, None].expand(*scores.shape[:3], 1)
                weights = torch.cat([scores, column], dim=-1).softmax(dim=-1)[..., :-1]
                return (weights @ value).transpose(1, 2)
            return scaled_dot_product_attention(query, key, value, mask, enable_gqa=True).transpose(1, 2)

        hidden = layer(hidden, rotation, attend)
    return drafter.norm(hidden)[0]
