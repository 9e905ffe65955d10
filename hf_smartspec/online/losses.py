"""Losses of drafters: distances from the target's distributions (Online Speculative Decoding, section 4.1)."""

import torch

LOSSES = ("kl", "reverse_kl", "jsd", "labels")
_LEAST = 1e-6  # smallest probability in logarithms


def divergence(
    logits: torch.Tensor,
    top_ids: torch.Tensor,
    top_probs: torch.Tensor,
    tokens: torch.Tensor,
    loss: str = "kl",
    beta: float = 0.5,
    temperature: float = 1.0,
) -> torch.Tensor:
    """
    Return the distance of each line from the target's distribution, of which only the likeliest tokens are known: all
    others count as one. This is equation 3 of the paper; with p the target's distribution and q the drafter's,

        kl: D(p || q)      reverse_kl: D(q || p)      jsd: β D(p || m) + (1 - β) D(q || m), m = β p + (1 - β) q

    and `labels` is the cross-entropy with the target's tokens alone (the paper's "FT").

    Args:
        logits (`torch.Tensor` of shape `[n, vocab]`): The drafter's logits.
        top_ids, top_probs (`torch.Tensor` of shape `[n, k]`): The target's likeliest tokens and their probabilities;
            ids of -1 are tokens that the drafter cannot propose, which are left out.
        tokens (`torch.Tensor` of shape `[n]`): Tokens that the target chose, or -1.
        temperature (`float`): Softens both distributions.

    Returns:
        `torch.Tensor` of shape `[n]`, float32: The distances.
    """
    log_q = (logits.float() / temperature).log_softmax(dim=-1)
    if loss == "labels":
        chosen = log_q.gather(1, tokens.clamp(min=0)[:, None])[:, 0]
        return -torch.where(tokens >= 0, chosen, 0.0)
    p = _with_rest(top_ids, top_probs, temperature)
    known = log_q.gather(1, top_ids.clamp(min=0)).masked_fill(top_ids < 0, -torch.inf)
    rest = torch.log1p(-known.exp().sum(dim=-1, keepdim=True).clamp(max=1 - _LEAST))
    # Tokens that the drafter lacks are masked below; a finite number here keeps 0 * inf out of gradients.
    log_q = torch.cat([known.masked_fill(top_ids < 0, 0.0), rest], dim=-1)
    is_known = torch.cat([top_ids >= 0, torch.ones_like(top_ids[:, :1], dtype=torch.bool)], dim=-1)
    q = log_q.exp() * is_known
    if loss == "kl":
        return _kl(p, log_q, is_known)
    if loss == "reverse_kl":
        return (q * (log_q - p.clamp(min=_LEAST).log())).masked_fill(~is_known, 0.0).sum(dim=-1)
    mixed = (beta * p + (1 - beta) * q).clamp(min=_LEAST).log()
    return beta * _kl(p, mixed, is_known) + (1 - beta) * (q * (log_q - mixed)).masked_fill(~is_known, 0.0).sum(-1)


def _kl(p: torch.Tensor, log_q: torch.Tensor, is_known: torch.Tensor) -> torch.Tensor:
    return (p * (p.clamp(min=_LEAST).log() - log_q)).masked_fill(~is_known, 0.0).sum(dim=-1)


def _with_rest(top_ids: torch.Tensor, top_probs: torch.Tensor, temperature: float) -> torch.Tensor:
    """
    Return the target's probabilities `[n, k + 1]`, the last one that of all other tokens; 0 for tokens that the drafter
    cannot propose.
    """
    rest = (1 - top_probs.sum(dim=-1, keepdim=True)).clamp(min=0.0)
    p = torch.cat([top_probs.masked_fill(top_ids < 0, 0.0), rest], dim=-1)
    if temperature != 1:
        p = p ** (1 / temperature)
    return p / p.sum(dim=-1, keepdim=True).clamp(min=_LEAST)


def overlap(logits: torch.Tensor, top_ids: torch.Tensor, top_probs: torch.Tensor) -> torch.Tensor:
    """
    Return the probability that a token sampled from the drafter is accepted: the sum of min(p, q) over the known tokens
    (Leviathan et al.), float32 `[n]`.
    """
    q = logits.float().softmax(dim=-1).gather(1, top_ids.clamp(min=0))
    return torch.minimum(q, top_probs).masked_fill(top_ids < 0, 0.0).sum(dim=-1)
