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


class Scanned(NamedTuple):
    """
    What a scan leaves, from which states at its nodes are computed.

    Args:
        keys (`torch.Tensor` of shape `[R, H, T, dk]`), writes (`torch.Tensor` of shape `[R, H, T, dv]`): k and U.
        decays (`torch.Tensor` of shape `[R, H, T]`, or `[R, H, T, dk]` where every channel of the keys has its own): G.
    """

    keys: torch.Tensor
    writes: torch.Tensor
    decays: torch.Tensor

    def of(self, trees: torch.Tensor) -> "Scanned":
        """Return the part of some trees."""
        return Scanned(*[item[trees] for item in self])


def scan(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor | None,
    state: torch.Tensor,
    sees: torch.Tensor,
) -> tuple[torch.Tensor, Scanned]:
    """
    Compute the outputs of all nodes of R trees of at most T nodes, all float32.

    Args:
        query, key (`torch.Tensor` of shape `[R, H, T, dk]`), value (`torch.Tensor` of shape `[R, H, T, dv]`): Inputs,
            parents before their children.
        decay (`torch.Tensor` of shape `[R, H, T]` or `[R, H, T, dk]`): g, the logarithm of every node's decay.
        beta (`torch.Tensor` of shape `[R, H, T]`, *optional*): The delta rule's β; without it, values are added.
        state (`torch.Tensor` of shape `[R, H, dk, dv]`): States before the roots.
        sees (`torch.Tensor` of shape `[R, 1, T, T]`, bool): Whether node j is an ancestor of node i, or i itself.

    Returns:
        Outputs `[R, H, T, dv]`, and what `state_after` needs.
    """
    by_channel = decay.dim() == 4
    paths = sees.to(decay.dtype)
    sums = paths @ decay if by_channel else (paths @ decay[..., None])[..., 0]
    into = sums.exp() if by_channel else sums.exp()[..., None]
    if by_channel:
        between = (sums[..., :, None, :] - sums[..., None, :, :]).masked_fill_(~sees[..., None], -torch.inf).exp_()
    else:
        between = (sums[..., :, None] - sums[..., None, :]).masked_fill_(~sees, -torch.inf).exp_()

    def scores(left: torch.Tensor) -> torch.Tensor:
        if by_channel:
            return ((left[..., :, None, :] * between) * key[..., None, :, :]).sum(-1)
        return (left @ key.mT) * between

    writes = value
    if beta is not None:
        writes = beta[..., None] * (value - (key * into) @ state)
        if key.shape[2] > 1:
            system = beta[..., None] * scores(key)
            writes = torch.linalg.solve_triangular(system, writes, upper=False, unitriangular=True)
    output = (query * into) @ state + scores(query) @ writes
    return output, Scanned(key, writes, sums)


def state_after(state: torch.Tensor, scanned: Scanned, ends: torch.Tensor, path: torch.Tensor) -> torch.Tensor:
    """
    Return the states `[R, H, dk, dv]` after a path in every tree.

    Args:
        ends (`torch.Tensor` of shape `[R]`): The last node of each path; any node where the path is empty.
        path (`torch.Tensor` of shape `[R, T]`, bool): The nodes of the paths.
    """
    key, writes, sums = scanned
    shape = len(ends), *[1] * (sums.dim() - 1)
    last = sums.take_along_dim(ends.view(shape), dim=2) * path.any(1).view(shape)
    hidden = ~(path[:, None] if sums.dim() == 3 else path[:, None, :, None])
    weights = (last - sums).masked_fill_(hidden, -torch.inf).exp_()
    kept = (last if sums.dim() == 3 else last[:, :, 0]).exp()[..., None]
    return state * kept + (key * (weights if sums.dim() == 4 else weights[..., None])).mT @ writes
