"""Scores of block drafters for the tokens after an anchor: candidates of each depth, and their probabilities."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import nn
from torch.nn.functional import embedding, linear, log_softmax, silu

from ....cpu.few_tokens import product
from ....sampling.top import likeliest_tokens

VANILLA, GATED, RNN = "vanilla", "gated", "rnn"  # kinds of Markov heads
SHORTLIST = 256  # tokens of a depth to whose logits something is added


class Linear(nn.Linear):
    """A linear layer that is as fast for a few tokens on a CPU as the target's own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = product(x.reshape(-1, self.in_features), self.weight, self.bias)
        return found.view(*x.shape[:-1], self.out_features)


class Lattice(NamedTuple):
    """
    What a tree is made of: L depths of k candidates, and for each the probabilities of those after it.

    Args:
        tokens (`torch.Tensor` of shape `[R, L, k]`, int64): Candidates of each depth, the target's tokens, best first.
        first (`torch.Tensor` of shape `[R, k]`, float32): Log-probabilities at depth 1, after the anchor.
        given (`torch.Tensor` of shape `[R, L - 1, k, k]`, float32): Log-probability of candidate c of depth d + 2
            after candidate p of depth d + 1, at `[:, d, p, c]`. Where depths are independent, the third size is 1.
        confidence (`torch.Tensor` of shape `[R, L, k]`, *optional*): Probability that a child is accepted (DSpark): at
            `[:, d, p]`, one of depth d + 1 after candidate p of depth d; at `[:, 0]`, one after the anchor.
    """

    tokens: torch.Tensor
    first: torch.Tensor
    given: torch.Tensor
    confidence: torch.Tensor | None = None


# From tokens [R, p] at one depth, the states [R, p, n] there and the hidden states [R, hidden_size] of the next slot
# to what the logits of that slot gain, as vectors [R, p, rank] for the head's map, and to the states at the next depth.
Step = Callable[[torch.Tensor, torch.Tensor | None, torch.Tensor], tuple[torch.Tensor, torch.Tensor | None]]


def independent(logits: torch.Tensor, width: int) -> Lattice:
    """
    Return the lattice of depths that do not depend on one another (DFlash, JetSpec).

    Args:
        logits (`torch.Tensor` of shape `[R, L, own vocab]`, float32): Tokens are their places in it.
        width (`int`): Largest number of candidates.
    """
    tokens, probs = (item.view(*logits.shape[:2], -1) for item in likeliest_tokens(logits.flatten(0, 1), width))
    scores = probs.log()
    return Lattice(tokens, scores[:, 0], scores[:, 1:, None])


def divided(vectors: torch.Tensor, temperatures: torch.Tensor | None) -> torch.Tensor:
    """Return vectors `[R, ...]` divided by temperatures `[R]`, if there are any."""
    return vectors if temperatures is None else vectors / temperatures.view(-1, *[1] * (vectors.dim() - 1)).to(vectors)


def scaled(step: Step, temperatures: torch.Tensor | None) -> Step:
    """Return a step whose vectors are divided by temperatures `[R]`, if there are any."""

    def divide(
        tokens: torch.Tensor, states: torch.Tensor | None, hidden: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        vectors, states = step(tokens, states, hidden)
        return divided(vectors, temperatures), states

    return step if temperatures is None else divide


def conditioned(
    logits: torch.Tensor,
    hidden: torch.Tensor,
    anchors: torch.Tensor,
    width: int,
    step: Step,
    states: torch.Tensor | None,
    output: nn.Linear,
    to_target: Callable[[torch.Tensor], torch.Tensor],
) -> Lattice:
    """
    Return the lattice of a head that adds to the logits of a slot what follows from the token before it (DSpark,
    Domino).

    It is added for the `SHORTLIST` likeliest tokens of each depth only, where the authors' code adds it for all, at the
    price of a further head in each slot; the probability of these tokens together stays what it was. The candidates of
    a depth are the likeliest of them after candidate 0 of the depth before: so candidates 0 are the authors' greedy
    draft. A state per path (rnn, Domino) is kept for the likeliest path to each candidate, which for candidate 0 is the
    greedy one.

    Args:
        logits (`torch.Tensor` of shape `[R, L, own vocab]`, float32): Logits without what is added.
        hidden (`torch.Tensor` of shape `[R, L, hidden_size]`): Hidden states of the slots that predict.
        anchors (`torch.Tensor` of shape `[R]`): The tokens before the first of these slots.
        width (`int`): Largest number of candidates.
        step (`Callable`), states (`torch.Tensor`, *optional*): See `Step`; the states of the first depth.
        output (`nn.Linear`): Maps what `step` returns to logits.
        to_target (`Callable`): Returns the target's tokens for places in the logits.
    """
    base, own = logits.topk(min(max(width, SHORTLIST), logits.shape[-1]), dim=-1)
    share = base.logsumexp(-1) - logits.logsumexp(-1)
    maps, known, num = embedding(own, output.weight), to_target(own), min(width, base.shape[-1])
    parents, weights = anchors[:, None], logits.new_zeros(len(anchors), 1)
    tokens, given = [], []
    for depth in range(logits.shape[1]):
        vectors, states = step(parents, states, hidden[:, depth])
        added = (vectors @ maps[:, depth].transpose(1, 2)).float()
        scores = log_softmax(base[:, depth, None] + added, dim=-1) + share[:, depth, None, None]
        best = scores[:, 0].topk(num, dim=-1).indices
        scores = scores.gather(2, best[:, None].expand(-1, scores.shape[1], -1))
        weights, origins = (weights[:, :, None] + scores).max(dim=1)
        if states is not None:
            origins[:, 0] = 0
            states = states.gather(1, origins[:, :, None].expand(-1, -1, states.shape[-1]))
        parents = known[:, depth].gather(1, best)
        tokens.append(parents)
        given.append(scores)
    rest = torch.stack(given[1:], dim=1) if len(given) > 1 else logits.new_zeros(len(anchors), 0, num, num)
    return Lattice(torch.stack(tokens, dim=1), given[0][:, 0], rest)


class Selector(nn.Module):
    """
    DFlash2's selector: score_j(p → c) = unary_j[c] + Σ A[p] ∘ P h_j ∘ S[c], over the `num` likeliest tokens of each
    depth, with codebooks A of tokens before and S of tokens after, and a projection P.
    """

    def __init__(self, vocab: int, hidden: int, rank: int, num: int):
        super().__init__()
        self.num = num
        self.predecessor_codebook = nn.Parameter(torch.empty(vocab, rank))
        self.successor_codebook = nn.Parameter(torch.empty(vocab, rank))
        self.hidden_projection = Linear(hidden, rank, bias=False)

    def lattice(
        self,
        logits: torch.Tensor,
        hidden: torch.Tensor,
        anchors: torch.Tensor,
        temperatures: torch.Tensor | None = None,
    ) -> Lattice:
        """Return the lattice, of `num` candidates; for the arguments, see `conditioned` and `BlockDrafter.lattice`."""
        unary, tokens = logits.topk(min(self.num, logits.shape[-1]), dim=-1)
        projected = divided(self.hidden_projection(hidden).float(), temperatures)
        after = embedding(tokens, self.successor_codebook).float() * projected[:, :, None]
        first = unary[:, 0] + (after[:, 0] @ embedding(anchors, self.predecessor_codebook).float()[:, :, None])[..., 0]
        before = embedding(tokens[:, :-1], self.predecessor_codebook).float()
        given = unary[:, 1:, None] + before @ after[:, 1:].transpose(2, 3)
        return Lattice(tokens, log_softmax(first, dim=-1), log_softmax(given, dim=-1))


class MarkovHead(nn.Module):
    """
    DSpark's head (arXiv 2607.05147): adds W2 v to the logits of a slot, where v comes from e = W1[token before] alone
    (vanilla), from e and the slot's hidden state (gated), or from these and a state of the path (rnn).
    """

    def __init__(self, kind: str, vocab: int, draft_vocab: int, hidden: int, rank: int):
        super().__init__()
        self.markov_w1 = nn.Embedding(vocab, rank)
        self.markov_w2 = Linear(rank, draft_vocab, bias=False)
        if kind == GATED:
            self.gate_proj = Linear(hidden + rank, rank)
        elif kind == RNN:
            self.joint_proj = Linear(2 * rank + hidden, 3 * rank)
        self.kind = kind

    def step(
        self, tokens: torch.Tensor, states: torch.Tensor | None, hidden: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See `Step`."""
        e = self.markov_w1(tokens)
        if self.kind == VANILLA:
            return e, None
        rank = e.shape[-1]
        if self.kind == GATED:
            weight, num = self.gate_proj.weight, hidden.shape[-1]
            gate = linear(hidden, weight[:, :num])[:, None] + linear(e, weight[:, num:], self.gate_proj.bias)
            return gate.sigmoid() * e, None
        states = torch.zeros_like(e) if states is None else states
        weight = self.joint_proj.weight
        joint = linear(torch.cat([states, e], dim=-1), weight[:, : 2 * rank], self.joint_proj.bias)
        z, u, o = (joint + linear(hidden, weight[:, 2 * rank :])[:, None]).chunk(3, dim=-1)
        z = z.sigmoid()
        return o.tanh(), z * states + (1 - z) * u.tanh()


class RefinerHead(nn.Module):
    """
    xPress's head: adds to the logits of all slots at once what follows from their hidden states and the tokens before
    them, mixed over the slots, in passes of which each takes the tokens that the one before found likeliest.

    Args:
        sizes (mapping of `str` to `int`): Entries of files.
        block_size (`int`): Slots of a whole block.
    """

    def __init__(self, sizes: Mapping[str, int], vocab: int, draft_vocab: int, hidden: int, block_size: int):
        super().__init__()
        rank, inner, self.num_passes = sizes["xpress_rank"], sizes["xpress_mlp_ratio"], sizes["num_jacobi_passes"]
        self.token_embed = nn.Embedding(vocab, rank)
        self.down_h, self.down_g = (Linear(hidden, rank, bias=False) for _ in range(2))
        self.in_proj = Linear(3 * rank, rank, bias=False)
        self.mix_l = nn.Parameter(torch.zeros(rank, block_size, block_size))
        self.mlp_gate, self.mlp_up = (Linear(rank, inner * rank, bias=False) for _ in range(2))
        self.mlp_down = Linear(inner * rank, rank, bias=False)
        self.readout = Linear(rank, draft_vocab, bias=False)

    def forward(
        self,
        logits: torch.Tensor,
        hidden: torch.Tensor,
        ahead: torch.Tensor,
        to_target: Callable[[torch.Tensor], torch.Tensor],
        temperatures: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """
        Return refined logits `[R, L, own vocab]` of the last L of S slots.

        Args:
            logits (`torch.Tensor` of shape `[R, L, own vocab]`, float32): Those of these slots alone.
            hidden (`torch.Tensor` of shape `[R, S, hidden_size]`): Hidden states of all slots.
            ahead (`torch.Tensor` of shape `[R, S - L + 1]`): The tokens before the first slots.
            to_target (`Callable`): Returns the target's tokens for places in the logits.
            temperatures (`torch.Tensor` of shape `[R]`, *optional*): See `BlockDrafter.lattice`.
        """
        num = hidden.shape[1]
        mean = self.down_g(hidden.mean(dim=1, keepdim=True)).expand(-1, num, -1)
        states, mix = torch.cat([self.down_h(hidden), mean], dim=-1), self.mix_l[:, :num, :num].tril()
        refined = logits
        for _ in range(self.num_passes):
            before = torch.cat([ahead, to_target(refined[:, :-1].argmax(-1))], dim=1)
            y = self.in_proj(torch.cat([states, self.token_embed(before)], dim=-1))
            y = y + torch.einsum("rji,nir->njr", mix, y)
            y = y + self.mlp_down(silu(self.mlp_gate(y)) * self.mlp_up(y))
            refined = logits + divided(self.readout(y[:, num - logits.shape[1] :]).float(), temperatures)
        return refined


class ConfidenceHead(nn.Module):
    """DSpark's confidence: sigmoid(proj [h_j; e]), or of h_j alone: that the token drafted at slot j is accepted."""

    def __init__(self, hidden: int, rank: int, has_bias: bool):
        super().__init__()
        self.proj = Linear(hidden + rank, 1, has_bias)

    def forward(self, hidden: torch.Tensor, before: torch.Tensor | None) -> torch.Tensor:
        """
        Return probabilities `[R, L, k]`, or `[R, L, 1]` without `before`, float32.

        Args:
            hidden (`torch.Tensor` of shape `[R, L, hidden_size]`): Of the slots that predict.
            before (`torch.Tensor` of shape `[R, L, k, rank]`, *optional*): W1 of candidates before each slot.
        """
        weight, num = self.proj.weight.float(), hidden.shape[-1]
        logits = linear(hidden.float(), weight[:, :num], None if self.proj.bias is None else self.proj.bias.float())
        if before is not None:
            logits = logits + linear(before.float(), weight[:, num:])[..., 0]
        return logits.sigmoid()
