"""
Attention in pieces that are merged by their log-sum-exps. Rows that share a prefix have two: the queries of all these
rows over the prefix, which is read once, and each row's queries over its own lines. Compiled attention of few tokens
takes both in one pass, so that its sums are those of rows that share nothing. A sink is a piece without values.
"""

import torch

from ...cpu.attention import can_attend, few_token_attention
from ..layout.shared_prefix import SharedPart
from ..layout.step_layout import PaddedPart, StepLayout
from .folding import fold, unfold, unpad
from .seen_lines import has_few_tokens, lines_of

_flash_attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


def shared_attention(
    packed: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layout: StepLayout,
    scaling: float | None,
    dropout: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute `packed_attention` of a step with shared prefixes, for layers without window, soft cap or bias."""
    have_few = all([has_few_tokens(part, None, packed.dtype) for part in layout.parts])
    if have_few and not dropout and can_attend(packed, key, value, scaling, sinks):
        return few_token_attention(packed, key, value, lines_of(layout, layout.parts, None), scaling, sinks)
    outputs, lses = [], []
    for part in layout.parts:
        own = packed if len(layout.parts) == 1 else packed[part.tokens]
        output, lse = _of_part(own, key, value, part, None, scaling, dropout)
        outputs.append(output)
        lses.append(lse)
    output, lse = (outputs[0], lses[0]) if len(outputs) == 1 else (torch.cat(outputs), torch.cat(lses))
    for shared in layout.shared:
        _merge(output, lse, *_of_shared(packed, key, value, shared, scaling, dropout), shared.tokens)
    return output if sinks is None else _share(output, lse, sinks)


def part_with_sinks(
    packed: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    part: PaddedPart,
    window: int | None,
    scaling: float | None,
    dropout: float,
    sinks: torch.Tensor,
) -> torch.Tensor:
    """Compute `packed_attention` of one part, where each head has a sink."""
    return _share(*_of_part(packed, key, value, part, window, scaling, dropout), sinks)


def _share(output: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
    """Multiply outputs `[tokens, heads, dim]` by the share of the scores in a softmax that sinks `[heads]` join."""
    return output * torch.sigmoid(lse - sinks[:, None]).to(output.dtype)


def _of_part(
    packed: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    part: PaddedPart,
    window: int | None,
    scaling: float | None,
    dropout: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Attend to the lines of a part's own rows; return output `[tokens, heads, dim]` and log-sum-exp `[tokens, heads, 1]`.
    """
    num_heads, kv_heads = packed.shape[1], key.shape[1]
    mask = part.mask(window, num_heads // kv_heads, packed.dtype)
    folded = fold(packed, part, kv_heads)
    output, lse = attention_with_lse(folded, part.view(key), part.view(value), mask, scaling, dropout)
    return unpad(unfold(output, part, num_heads), part), unpad(unfold(lse, part, num_heads), part)


def _of_shared(
    packed: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    shared: SharedPart,
    scaling: float | None,
    dropout: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend to a shared prefix with all its tokens, grouped heads being further queries; return as `_of_part` does."""
    queries = packed if len(shared.tokens) == len(packed) else packed.index_select(0, shared.tokens)
    num, num_heads, _ = queries.shape
    kv_heads = key.shape[1]
    groups = num_heads // kv_heads
    if num == 1:
        folded = queries.view(1, kv_heads, groups, -1)
    else:
        folded = queries.view(num, kv_heads, groups, -1).transpose(0, 1).reshape(1, kv_heads, num * groups, -1)
    results = attention_with_lse(folded, shared.view(key), shared.view(value), None, scaling, dropout)
    if num > 1:
        results = results[0].view(kv_heads, num, groups, -1), results[1].view(kv_heads, num, groups, 1)
        results = results[0].transpose(0, 1), results[1].transpose(0, 1)
    return results[0].reshape(num, num_heads, -1), results[1].reshape(num, num_heads, 1)


def _merge(
    output: torch.Tensor, lse: torch.Tensor, other: torch.Tensor, other_lse: torch.Tensor, tokens: torch.Tensor
) -> None:
    """Merge the attention of some tokens over another piece into their outputs and log-sum-exps, in place."""
    if len(tokens) == len(output):
        output.lerp_(other, torch.sigmoid(other_lse - lse).to(output.dtype))
        torch.logaddexp(lse, other_lse, out=lse)
        return
    own_lse = lse.index_select(0, tokens)
    weight = torch.sigmoid(other_lse - own_lse).to(output.dtype)
    output.index_copy_(0, tokens, torch.lerp(output.index_select(0, tokens), other, weight))
    lse.index_copy_(0, tokens, torch.logaddexp(own_lse, other_lse))


def attention_with_lse(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float | None,
    dropout: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Compute attention and its log-sum-exp.

    Args:
        query, key, value (`torch.Tensor` of shape `[R, heads, length, dim]`): Values may have another `dim`.
        mask (`torch.Tensor`, *optional*): Added to scores; broadcast to `[R, heads, queries, keys]`. Every query must
            attend to some key.

    Returns:
        Output `[R, heads, queries, dim]`, and log-sum-exp `[R, heads, queries, 1]` in float32 or wider.
    """
    if dropout or query.device.type != "cpu" or key.shape != value.shape:
        return _by_scores(query, key, value, mask, scaling, dropout)
    # On CPUs, a single query of half precision takes several times as long as two.
    is_slow = query.shape[2] == 1 and query.dtype.itemsize == 2
    if is_slow:
        query = query.repeat(1, 1, 2, 1)
    output, lse = _flash_attention(query, key, value, attn_mask=mask, scale=scaling)
    return (output[:, :, :1], lse[:, :, :1, None]) if is_slow else (output, lse[..., None])


def _by_scores(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float | None,
    dropout: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    scores = torch.matmul(query, key.transpose(2, 3)) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    if mask is not None:
        scores += mask  # in place, for their size
    lse = scores.logsumexp(dim=-1, keepdim=True)
    weights = torch.dropout(scores.sub_(lse).exp_(), dropout, dropout > 0)
    return torch.matmul(weights.to(query.dtype), value), lse
