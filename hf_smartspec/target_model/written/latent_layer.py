"""Attention to latents, layer by layer."""

from collections.abc import Mapping

import torch

from ...cpu.attention import can_attend_to_latents, latent_attention
from ..attention.seen_lines import has_lines, lines_of
from ..attention.tree_attention import packed_attention
from ..cache.slot_layer import SlotLayer
from ..layout.step_layout import StepLayout
from .inputs import Tables
from .latent import LatentPlan
from .plan import LayerPlan


def attend_to_latents(
    plan: LayerPlan,
    latent: LatentPlan,
    x: torch.Tensor,
    layout: StepLayout,
    memory: SlotLayer,
    tables: Mapping[str | None, Tables],
) -> torch.Tensor:
    """Run a layer's attention as `decoder.attend` does, where keys and values are made of latents."""
    num, heads, size, rank = len(x), plan.num_heads, latent.expansion.key_size, latent.expansion.rank
    compressed = plan.query_key_value(x)
    if latent.down is not None and latent.down_norm is not None:
        x = latent.down_norm(latent.down(x))
    queries = latent.queries(x).view(num, heads, size + latent.turned_size)
    latents = latent.norm(compressed[:, :rank].contiguous())
    turned = torch.cat([queries[..., size:], compressed[:, None, rank:]], dim=1)
    assert plan.rotation is not None
    plan.rotation.rotate(turned, heads, tables[plan.layer_type])
    keys, rotated = memory.write(latents[:, None], turned[:, heads:])
    own = latent.expansion.queries(queries[..., :size].transpose(0, 1).contiguous())
    turned = turned[:, :heads].transpose(0, 1).contiguous()
    # Compiled code is faster for any number of tokens: torch's needs latents and rotated keys side by side.
    if all([has_lines(part, None) for part in layout.parts]) and can_attend_to_latents(own, turned, keys, rotated):
        attended = latent_attention(own, turned, keys, rotated, lines_of(layout, layout.parts, None), plan.scaling)
    else:
        both = torch.cat([own, turned], dim=-1).transpose(0, 1)
        found = packed_attention(both, torch.cat([keys, rotated], dim=-1), keys, layout, None, plan.scaling)
        attended = found.transpose(0, 1).contiguous()
    return plan.attention_output(latent.expansion.values(attended))
