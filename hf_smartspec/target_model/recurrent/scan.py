"""
Linear recurrences over draft trees: the chunked form of the gated delta rule (Yang et al., 2024, arXiv 2412.06464), and
of state spaces (Mamba-2), with a mask of ancestors in place of the causal one. It is right since an ancestor's
ancestors are ancestors. A text without branches is a tree, too.

With G_i the sum of g over the path that ends in node i, `j ≼ i` for "j is an ancestor of i, or i itself", and the
committed state S of shape `[dk, dv]`:

    A_ij = β_i (k_i · k_j) e^(G_i - G_j)  for j ≺ i, else 0
    (I + A) U = R,  R_i = β_i (v_i - e^(G_i) k_iᵀ S)
    o_i = e^(G_i) q_iᵀ S + Σ_{j ≼ i} e^(G_i - G_j) (q_i · k_j) U_j

State spaces have no β: U is v. The state after a path that ends in e is e^(G_e) S + Σ_{j ≼ e} e^(G_e - G_j) k_j U_jᵀ.
"""

from typing import NamedTuple

import torch
from torch.nn.functional import softplus

from ...cpu.recurrence import Rates
from ...device import has_float64

_MOST_PAIRS = 2**25  # pairs of nodes, times the keys' channels: arrays in float64 and float32 exist at once


class Scanned(NamedTuple):
    """
    What a scan leaves, from which states at its nodes are computed.

    Args:
        keys (`torch.Tensor` of shape `[R, H, T, dk]`), writes (`torch.Tensor` of shape `[R, H, T, dv]`): k and U.
        decays, sums (`torch.Tensor` of shape `[R, H, T]`, or `[R, H, T, dk]` where every channel of the keys decays by
            itself): g, and G in float64 where the device has it.
    """

    keys: torch.Tensor
    writes: torch.Tensor
    decays: torch.Tensor
    sums: torch.Tensor

    @property
    def num_bytes(self) -> int:
        return sum(item.nbytes for item in self)

    def of(self, trees: torch.Tensor) -> "Scanned":
        """Return the part of some trees."""
        return Scanned(*[item[trees] for item in self])

    def state_after(self, state: torch.Tensor, ends: torch.Tensor, path: torch.Tensor) -> torch.Tensor:
        """
        Return the states `[R, H, dk, dv]` after a path in every tree.

        Args:
            ends (`torch.Tensor` of shape `[R]`): The last node of each path; any node where the path is empty.
            path (`torch.Tensor` of shape `[R, T]`, bool): The nodes of the paths.
        """
        key, writes, _, sums = self
        shape = len(ends), *[1] * (sums.dim() - 1)
        last = sums.take_along_dim(ends.view(shape), dim=2) * path.any(1).view(shape)
        hidden = ~(path[:, None] if sums.dim() == 3 else path[:, None, :, None])
        weights = (last - sums).to(key.dtype).masked_fill_(hidden, -torch.inf).exp_()
        kept = (last if sums.dim() == 3 else last[:, :, 0]).to(key.dtype).exp()[..., None]
        return state * kept + (key * (weights if sums.dim() == 4 else weights[..., None])).mT @ writes

    def state_at_end(self, state: torch.Tensor) -> torch.Tensor:
        """Return the states `[R, H, dk, dv]` after all nodes of trees without branches."""
        num, _, size = self.keys.shape[:3]
        path = torch.ones(num, size, dtype=torch.bool, device=state.device)
        return self.state_after(state, torch.full_like(path[:, 0], size - 1, dtype=torch.long), path)


def scan(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor | None,
    state: torch.Tensor,
    sees: torch.Tensor,
    before: Scanned | None = None,
) -> tuple[torch.Tensor, Scanned]:
    """
    Compute the outputs of the last W of at most T nodes of R trees, all float32.

    Args:
        query, key (`torch.Tensor` of shape `[R, H, W, dk]`), value (`torch.Tensor` of shape `[R, H, W, dv]`): Inputs,
            parents before their children.
        decay (`torch.Tensor` of shape `[R, H, W]` or `[R, H, W, dk]`): g, the logarithm of every node's decay.
        beta (`torch.Tensor` of shape `[R, H, W]`, *optional*): The delta rule's β; without it, values are added.
        state (`torch.Tensor` of shape `[R, H, dk, dv]`): States before the roots.
        sees (`torch.Tensor` of shape `[R, 1, T, T]`, bool): Whether node j is an ancestor of node i, or i itself.
        before (`Scanned`, *optional*): What scans of the first nodes have left; where not given, W is T.

    Returns:
        Outputs `[R, H, W, dv]`, and what states are computed from, of all nodes.
    """
    num, by_channel = key.shape[2], decay.dim() == 4
    keys = key if before is None else torch.cat([before.keys, key], dim=2)
    decays = decay if before is None else torch.cat([before.decays, decay], dim=2)
    sums = path_sums(sees, decays)
    last, hidden = sums[:, :, -num:], ~sees[:, :, -num:]
    into = (last if by_channel else last[..., None]).to(key.dtype).exp()
    lefts = [query, key] if beta is not None and keys.shape[2] > 1 else [query]
    if by_channel:
        size = max(_MOST_PAIRS * num // max(key.numel() * keys.shape[2], 1), 1)
        groups = [slice(first, first + size) for first in range(0, num, size)]
        found = [
            _scores_by_channel([left[:, :, part] for left in lefts], keys, last[:, :, part], sums, hidden[:, :, part])
            for part in groups
        ]
        scores = [torch.cat(parts, dim=2) for parts in zip(*found)]
    else:
        between = (last[:, :, :, None] - sums[:, :, None]).to(key.dtype).masked_fill_(hidden, -torch.inf).exp_()
        scores = [(left @ keys.mT) * between for left in lefts]

    writes = value
    if beta is not None:
        writes = beta[..., None] * (value - (key * into) @ state)
        if len(scores) > 1:
            system = beta[..., None] * scores[1]
            if before is not None:
                writes = writes - system[..., :-num] @ before.writes
            writes = torch.linalg.solve_triangular(system[..., -num:], writes, upper=False, unitriangular=True)
    if before is not None:
        writes = torch.cat([before.writes, writes], dim=2)
    output = (query * into) @ state + scores[0] @ writes
    return output, Scanned(keys, writes, decays, sums)


def path_sums(sees: torch.Tensor, decays: torch.Tensor) -> torch.Tensor:
    """Return G of g, `[R, H, T]` or `[R, H, T, dk]`."""
    # Differences of these large sums become exponents: float32 would ruin them, and so would TF32, which a caller may
    # allow in products.
    exact = torch.float64 if has_float64(decays.device) else decays.dtype
    sums = sees.to(exact) @ (decays if decays.dim() == 4 else decays[..., None]).to(exact)
    return sums if decays.dim() == 4 else sums[..., 0]


def normalized(vectors: torch.Tensor, eps: float) -> torch.Tensor:
    """Return vectors of length 1, `eps` under the root; if it is 0, they stay as they are."""
    return vectors * torch.rsqrt((vectors * vectors).sum(-1, keepdim=True) + eps) if eps else vectors


def rates_of(numbers: torch.Tensor, rates: Rates | None) -> torch.Tensor:
    """
    Return g, `[N, heads]`: `-exp(A) softplus(x + b)` in float32 with the rates A and b, `[heads]`; without rates, x.
    """
    return numbers if rates is None else -rates[0].float().exp() * steps_of(numbers, rates)


def steps_of(numbers: torch.Tensor, rates: Rates) -> torch.Tensor:
    """Return `softplus(x + b)`, `[N, heads]`, in float32."""
    return softplus(numbers.float() + rates[1])


def _scores_by_channel(
    lefts: list[torch.Tensor], keys: torch.Tensor, last: torch.Tensor, sums: torch.Tensor, hidden: torch.Tensor
) -> list[torch.Tensor]:
    """Return Σ_c left_ic e^(G_ic - G_jc) k_jc, `[R, H, W, T]`, for queries or keys of some nodes i."""
    between = (last[:, :, :, None] - sums[:, :, None]).to(keys.dtype).masked_fill_(hidden[..., None], -torch.inf).exp_()
    return [(left[:, :, :, None] * between).mul_(keys[:, :, None]).sum(-1) for left in lefts]
