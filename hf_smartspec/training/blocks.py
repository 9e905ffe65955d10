"""
Training of block drafters (DFlash, arXiv 2602.06036; DSpark, arXiv 2607.05147): many blocks of each text in one
forward, each from an anchor of its own.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from ..candidates.heads.blocks.config import DFLASH, DSPARK, JETSPEC
from ..candidates.heads.blocks.drafter import BlockDrafter
from ..candidates.heads.blocks.scores import RNN
from ..device import without_autocast
from .accuracy import accuracy, likeliest
from .target import (
    check_layers,
    target_probs,
    target_states,
)
from .texts import IGNORED, Text, chosen, collate, send

_TRAINED = (DFLASH, DSPARK, JETSPEC)
_EPS = 1e-6  # of probabilities, whose logarithm is finite
_MOST_LOGITS = 2**24  # that are kept at a time


class Slots(NamedTuple):
    """
    The n slots of some blocks that predict tokens of responses.

    Args:
        places (`torch.Tensor` of shape `[n]`, int64): The places of the tokens in a batch `[rows, length]`, counted
            through all rows, on the host.
        depths (`torch.Tensor` of shape `[n]`, int64): How many places each token comes after its block's first
            prediction, on the host.
        before (`torch.Tensor` of shape `[n]`, int64): The tokens before these.
        hidden (`torch.Tensor` of shape `[n, hidden_size]`): Outputs after the final norm.
        added (`torch.Tensor` of shape `[n, rank]`): What the Markov head's map adds to the logits (DSpark); rank 0
            where there is none.
    """

    places: torch.Tensor
    depths: torch.Tensor
    before: torch.Tensor
    hidden: torch.Tensor
    added: torch.Tensor


class BlockTraining(nn.Module):
    """
    Module whose forward returns the loss of a block drafter, from blocks at anchors that are drawn at random. Only the
    drafter is trained and saved; the target is frozen.

    Args:
        target (`PreTrainedModel`): A decoder.
        drafter (`BlockDrafter`): The drafter, in float32.
        num_blocks (`int`): Blocks of each text in an update.
        seed (`int`): Seed of the anchors, together with the number of updates so far.

    Raises:
        ValueError: for drafters that read the last layer's output, which transformers returns only after the final
            norm, for kinds that are not DFlash, JetSpec or DSpark, and for layers with sinks.
    """

    num_updates: torch.Tensor

    def __init__(self, target: PreTrainedModel, drafter: BlockDrafter, num_blocks: int = 32, seed: int = 0):
        super().__init__()
        check_layers(drafter.hidden_layers, target)
        if drafter.label not in _TRAINED or any(drafter.spec.has_sinks):
            sinks = " with sinks" * any(drafter.spec.has_sinks)
            raise ValueError(f"Block drafters of this kind cannot be trained: {drafter.label}{sinks}.")
        self.drafter = drafter.requires_grad_(True)
        self.num_blocks, self.seed = num_blocks, seed
        self.register_buffer("num_updates", torch.zeros((), dtype=torch.long))  # of the trained weights: in checkpoints
        self._frozen = (target.eval().requires_grad_(False),)  # in a tuple, so that it is no submodule

    @property
    def target(self) -> PreTrainedModel:
        return self._frozen[0]

    @property
    def decay(self) -> float:
        """Number of depths over which a slot's weight in the loss falls to 1 / e: half a block, as DFlash's 4 of 8."""
        return self.drafter.block_size / 2

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """
        Return the loss of a batch.

        Args:
            input_ids, labels (`torch.Tensor` of shape `[rows, length]`): As `texts.collate` makes them.

        Returns:
            `loss`: the slots' cross-entropies with the target's distributions, as their mean with weights
            exp(-(j - 1) / decay) of depth j. DSpark's confidence adds its own with the share of drafts that rejection
            sampling accepts, 1 minus the distance of the distributions in total variation.
        """
        generator = torch.Generator().manual_seed(self.seed + int(self.num_updates))
        self.num_updates += self.training
        labels = labels.cpu()  # places are picked on the host, with no wait for a GPU after this one
        anchors = self._anchors(labels, 1, generator)
        with self._autocast():
            states, hidden = target_states(self.target, self.drafter.hidden_layers, input_ids)
            slots = self._slots(input_ids, labels, states, anchors)
            if not len(slots.places):  # a loss with gradients where texts are too short
                return {"loss": self.drafter.fc.weight.sum() * 0.0}
            # Slots of a place come into one piece, which computes the target's probabilities there once.
            order = torch.argsort(slots.places, stable=True)
            sent = send(order, input_ids.device)
            ordered = slots.places[order], slots.depths[order], *(item.index_select(0, sent) for item in slots[2:])
            pieces = list(self._pieces(Slots(*ordered)))
            if len(pieces) == 1:
                loss = self._loss(input_ids, hidden, pieces[0])
            else:  # lines of the vocabulary are computed again for gradients, and kept for one piece at a time
                run = partial(checkpoint, self._loss, input_ids, hidden, use_reentrant=False, preserve_rng_state=False)
                loss = torch.stack([run(piece) for piece in pieces]).sum()
            return {"loss": loss / float(torch.exp(-slots.depths / self.decay).sum())}

    def _pieces(self, slots: Slots) -> Iterator[Slots]:
        """Yield the slots in pieces that have no more than `_MOST_LOGITS` logits."""
        num = max(_MOST_LOGITS // self.drafter.spec.draft_vocab, 1)
        for first in range(0, max(len(slots.places), 1), num):
            yield Slots(*(item[first : first + num] for item in slots))

    def _loss(self, input_ids: torch.Tensor, hidden: torch.Tensor, slots: Slots) -> torch.Tensor:
        """Return the weighted sum of some slots' losses, given the target's last hidden states of the texts."""
        own, logits, confidence = self.drafter.token_ids, *self._scores(slots)
        unique = torch.unique(slots.places, return_inverse=True)  # many share a place
        places, number = (send(item, hidden.device) for item in unique)
        states, tokens = hidden.flatten(0, 1).index_select(0, places - 1), input_ids.flatten().index_select(0, places)
        probs = target_probs(self.target, own, states, tokens)
        wanted, log_probs = probs.index_select(0, number), logits.log_softmax(dim=-1)
        losses = -(wanted * log_probs).sum(-1)
        if confidence is not None:
            share = torch.minimum(wanted, log_probs.detach().exp()).sum(-1)
            found = confidence.clamp(_EPS, 1 - _EPS)
            losses = losses - share * found.log() - (1 - share) * (1 - found).log()
        return (send(torch.exp(-slots.depths / self.decay), losses.device) * losses).sum()

    def _scores(self, slots: Slots) -> tuple[torch.Tensor, torch.Tensor | None]:
        """
        Return logits `[n, own vocab]` of the tokens of some slots, and the probability that a token drafted there is
        accepted, given that those before it were (`[n]`, DSpark's confidence).
        """
        drafter, before = self.drafter, None
        logits = drafter.logits(slots.hidden)
        if drafter.markov_head is not None:
            logits = logits + drafter.markov_head.markov_w2(slots.added).float()
            if drafter.spec.options.get("confidence_head_with_markov"):
                before = drafter.markov_head.markov_w1(slots.before)[:, None, None]
        if drafter.confidence_head is None:
            return logits, None
        with without_autocast(slots.hidden.device):  # a probability that is rounded to 1 has an infinite loss
            return logits, drafter.confidence_head(slots.hidden[:, None], before).flatten()

    def _autocast(self) -> torch.autocast:
        """Return the context in which drafters run in a half-precision target's dtype: several times as fast."""
        return torch.autocast(self.target.device.type, self.target.dtype, enabled=self.target.dtype.itemsize == 2)

    def _anchors(self, labels: torch.Tensor, num_tokens: int, generator: torch.Generator) -> torch.Tensor:
        """
        Draw anchors `[rows, blocks]` at random, without repetition, from those places that at least one token and whose
        next `num_tokens` tokens are of the response; -1 where a text has no more of them. All on the host.
        """
        length = labels.shape[1]
        is_response = labels != IGNORED
        ends = torch.nn.functional.pad(is_response[:, 1:], (0, num_tokens)).unfold(1, num_tokens, 1)[:, :length].all(-1)
        ends[:, 0] = False  # no text before it
        order = torch.rand(ends.shape, generator=generator).masked_fill(~ends, -1.0)
        num = min(self.num_blocks, max(int(ends.sum(1).max()), 1))
        found = order.topk(num, dim=1)
        return found.indices.masked_fill(found.values < 0, -1)

    def _slots(
        self, input_ids: torch.Tensor, labels: torch.Tensor, states: torch.Tensor, anchors: torch.Tensor
    ) -> Slots:
        """
        Return the predictions of the blocks at `anchors`, as far as they lie in the texts' responses; labels and
        anchors are on the host.
        """
        drafter, length = self.drafter, input_ids.shape[1]
        places = anchors[:, :, None] + 1 + torch.arange(drafter.num_depths)
        known = nn.functional.pad(labels, (0, drafter.num_depths), value=IGNORED)
        is_asked = (known.gather(1, places.flatten(1)).view_as(places) != IGNORED) & (anchors >= 0)[:, :, None]
        rows, _, depths = is_asked.nonzero(as_tuple=True)
        at = send(anchors.clamp(min=0), input_ids.device)
        previous = send((places - 1).clamp(0, length - 1), input_ids.device)
        before = input_ids.gather(1, previous.flatten(1)).view_as(previous)
        hidden = self._outputs(input_ids, states, at)
        added = self._added(hidden.flatten(0, 1), before.flatten(0, 1)).view(*before.shape, -1)
        of_slots = hidden[:, :, drafter.first_slot :], added, before
        picked, added, before = (chosen(item.flatten(0, 1), is_asked.flatten(0, 1)) for item in of_slots)
        return Slots(rows * length + places[is_asked], depths, before, picked, added)

    def _added(self, hidden: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
        """
        Return what the Markov head's map adds `[blocks, depths, rank]`, given hidden states `[blocks, block_size,
        hidden_size]` and the texts' own tokens before each slot that predicts, `[blocks, depths]`.
        """
        head, first, states = self.drafter.markov_head, self.drafter.first_slot, None
        if head is None:
            return hidden.new_empty(*before.shape, 0)
        if head.kind != RNN:  # no states: all slots at once
            vectors, _ = head.step(before.flatten()[:, None], None, hidden[:, first:].flatten(0, 1))
            return vectors.view(*before.shape, -1)
        if first:  # slot 0 has the anchor before it, too
            _, states = head.step(before[:, :1], None, hidden[:, 0])
        added = []
        for depth, tokens in enumerate(before.split(1, dim=1)):
            vectors, states = head.step(tokens, states, hidden[:, first + depth])
            added.append(vectors)
        return torch.cat(added, dim=1)

    def _outputs(self, input_ids: torch.Tensor, states: torch.Tensor, anchors: torch.Tensor) -> torch.Tensor:
        """
        Return outputs after the final norm `[rows, blocks, block_size, hidden]` of blocks at anchors `[rows, blocks]`.
        A block reads the text before its anchor, and itself.
        """
        drafter, size, num_rows = self.drafter, self.drafter.block_size, len(anchors)
        text = torch.arange(input_ids.shape[1], device=anchors.device)
        slots = anchors[:, :, None] + torch.arange(size, device=anchors.device)
        positions = slots.flatten(1)
        is_before = text < anchors.repeat_interleave(size, dim=1)[:, :, None]
        number = torch.arange(anchors.shape[1], device=anchors.device).repeat_interleave(size)
        is_own = number[:, None] == number
        combined = drafter.combine(states)
        of_text, of_slots = drafter.rotation(text), drafter.rotation(slots.flatten(0, 1))
        hidden = drafter.embed(input_ids.gather(1, anchors).flatten(), size)
        layers: Any = drafter.layers
        for layer in layers:
            seen = (
                is_before & layer.sees(positions, text.expand(num_rows, -1)),
                is_own & layer.sees(positions, positions),
            )
            attend = partial(_attend, layer.context(combined, of_text), torch.cat(seen, dim=-1)[:, None])
            hidden = layer(hidden, of_slots, attend)
        return drafter.norm(hidden).unflatten(0, anchors.shape)

    def accuracy(self, texts: Sequence[Text], max_length: int, batch_size: int = 8) -> list[dict[int, float]]:
        """
        Return, for each depth of a block, the share of places where the right token is among the 1, 3 or 8 likeliest,
        in up to `num_blocks` whole blocks of each text.
        """
        return accuracy(self._guesses, self.drafter.num_depths, texts, max_length, batch_size, self.target.device)

    def _guesses(self, ids: torch.Tensor, labels: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        slots = self._whole_blocks(ids, labels)
        best, wanted = self._best(slots, likeliest), ids.flatten()[slots.places.to(ids.device)]
        depths = slots.depths.to(ids.device)
        for depth in range(self.drafter.num_depths):
            yield best[depths == depth], wanted[depths == depth]

    def accepted_length(self, texts: Sequence[Text], max_length: int, batch_size: int = 8) -> float:
        """
        Return how many drafted tokens of a block are accepted in the mean: those before the first that differs from the
        text. Drafts are chains of each slot's likeliest token.
        """
        num_accepted = num_blocks = 0
        for start in range(0, len(texts), batch_size):
            batch = collate([item.example(max_length) for item in texts[start : start + batch_size]])
            ids, labels = (batch[name].to(self.target.device) for name in ("input_ids", "labels"))
            slots = self._whole_blocks(ids, labels)
            is_right = self._best(slots, partial(torch.argmax, dim=-1)) == ids.flatten()[slots.places.to(ids.device)]
            blocks = is_right.view(-1, self.drafter.num_depths)  # whole, and in order
            num_accepted, num_blocks = num_accepted + int(blocks.cumprod(dim=1).sum()), num_blocks + len(blocks)
        return num_accepted / max(num_blocks, 1)

    @torch.no_grad()
    def _best(self, slots: Slots, choose: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """Return the tokens that are chosen by the slots' logits `[n, own vocab]`, from a line of places in each."""
        ids = self.drafter.token_ids
        with self._autocast():
            best = torch.cat([choose(self._scores(piece)[0]) for piece in self._pieces(slots)])
        return best if ids is None else ids[best]

    @torch.no_grad()
    def _whole_blocks(self, ids: torch.Tensor, labels: torch.Tensor) -> Slots:
        """Return the predictions of blocks that lie in responses as a whole, the same ones at each call."""
        labels = labels.cpu()
        anchors = self._anchors(labels, self.drafter.num_depths, torch.Generator().manual_seed(self.seed))
        with self._autocast():
            states, _ = target_states(self.target, self.drafter.hidden_layers, ids)
            return self._slots(ids, labels, states, anchors)


def _attend(
    context: tuple[torch.Tensor, torch.Tensor],
    seen: torch.Tensor,
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """
    Return attention of the slots of all blocks, for `BlockLayer.forward`; layers with sinks are not trained.

    Args:
        context (tuple of `torch.Tensor` of shape `[rows, length, kv_heads, head_dim]`): Keys and values of the texts.
        seen (`torch.Tensor` of shape `[rows, 1, slots, length + slots]`): What each slot of a row's blocks sees.
    """
    assert sinks is None, "`BlockTraining` refuses them"
    rows, dtype = len(seen), values.dtype
    own = [item.to(dtype).reshape(rows, -1, *item.shape[2:]) for item in (queries, keys, values)]
    held = [torch.cat([item.to(dtype), new], dim=1).transpose(1, 2) for item, new in zip(context, own[1:])]
    found = scaled_dot_product_attention(own[0].transpose(1, 2), held[0], held[1], attn_mask=seen, enable_gqa=True)
    return found.transpose(1, 2).reshape(queries.shape)
