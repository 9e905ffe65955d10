"""The source that drafts with a block drafter."""

from collections.abc import Hashable, Sequence
from functools import partial

import numpy as np
import torch

from ....device import fetch_together, to_device
from ....drafts.price import LevelPrice
from ....drafts.tree import DraftTree
from ....sampling.noise import add_noise, noise_keys
from ....sampling.processors import process_lines
from ....target_model.drafters.blocks import BlockForward
from ....validate import check_positive
from ..hidden_states import HiddenStateCandidates, KnownStates
from ..trees import best_trees
from .config import XPRESS
from .drafter import BlockDrafter
from .scores import Lattice

_NUM_NODES, _MOST_NODES = 16, 64  # of a draft; where prices end it
_WIDTH = 8  # candidates of a depth


class BlockCandidates(HiddenStateCandidates):
    """
    Drafts with a `BlockDrafter`: one forward for all rows computes candidates of all depths of a block, and the tree is
    the nodes of highest path probability among them.

    Where the target samples, candidates are the best tokens of the drafter's scores *plus the target's noise*, as those
    of `GrowingCandidates`.

    Only the target's hidden states of committed tokens go into a request's row of keys and values; of a block, none
    stay. So a block costs the same however much of it is used: with an auction, rows get one or none, and then the
    nodes that are worth verifying.

    Args:
        heads (`BlockDrafter`): On the device of the target's output.
        num_nodes (`int`, *optional*): Nodes of a tree where the caller names no number, at most. Where not given, 16,
            and where goodput decides, as many as are worth it, up to 64.
        width (`int`, *optional*): Candidates of each depth; 1 drafts chains. Where not given, 8.

    Raises:
        ValueError: for numbers below 1.
    """

    heeds_prices = True
    heads: BlockDrafter

    def __init__(self, heads: BlockDrafter, num_nodes: int | None = None, width: int | None = None):
        for name, value in (("num_nodes", num_nodes), ("width", width)):
            if value is not None:
                check_positive(name, value)
        super().__init__(heads)
        self.default_num_nodes, self.most_nodes = num_nodes or _NUM_NODES, num_nodes or _MOST_NODES
        self._width = width or _WIDTH

    def _new_forward(self) -> BlockForward:
        return BlockForward(self.heads)

    @torch.no_grad()
    def propose(
        self, request_ids: Sequence[Hashable], max_nodes: Sequence[int], price: LevelPrice | None = None
    ) -> list[DraftTree]:
        """
        Draft the trees of highest path probability: of so many nodes, or, given a price, of those that are worth being
        verified; or of the shape that a policy fixes.
        """
        trees = [DraftTree.empty()] * len(request_ids)
        states = [self._state(name) for name in request_ids]
        asked = [place for place, state in enumerate(states) if max_nodes[place] > 0 and _is_known(state)]
        if not asked:
            return trees
        widths = () if price is None else price.widths
        limits = [max_nodes[place] for place in asked]
        lattice = self._lattice([states[place] for place in asked], max(limits), max(self._width, *widths, 0))
        least = 0.0 if price is None or widths else price.least_probability
        shape = widths or (self._width,) * self.heads.num_depths
        found = best_trees(*_probabilities(lattice), limits, least, shape)
        for place, tree in zip(asked, found):
            trees[place] = tree
        return trees

    def _lattice(self, states: Sequence[KnownStates], most_depths: int, width: int) -> Lattice:
        """Return the lattices of the blocks after the texts of some requests, no deeper than trees can be."""
        self._run_pending(states)
        forward = self._ragged
        assert isinstance(forward, BlockForward)
        anchors = [state.tokens[-1] for state in states]
        # Whole blocks as they were trained: Domino's may have a last slot that predicts nothing but is seen, and xPress
        # reads the mean over all slots.
        is_whole = most_depths >= self.heads.num_depths or self.heads.label == XPRESS
        num_slots = self.heads.block_size if is_whole else self.heads.first_slot + most_depths
        hidden = forward.blocks([state.row for state in states], anchors, num_slots)
        before = [[state.first_token, *state.tokens[-2:]][-2] for state in states]
        sent = to_device(np.array([anchors, before], np.int64), hidden.device)
        numbers = [state.processing.temperature for state in states]
        temperatures = None
        if any([number != 1 for number in numbers]):
            temperatures = to_device(np.array(numbers, np.float32), hidden.device)
        return self.heads.lattice(hidden, sent[0], width, partial(self._as_sampled, states), sent[1], temperatures)

    def _as_sampled(self, states: Sequence[KnownStates], logits: torch.Tensor) -> torch.Tensor:
        """
        Return the logits `[R, L, own vocab]` of some requests' blocks with what the target's will get where it samples:
        the processors that read scores alone, and the noise of each position. Both then pick the same token whenever
        their distributions nearly agree.
        """
        num, ids = logits.shape[1], self.heads.token_ids
        positions = [state.num_generated + depth for state in states for depth in range(num)]
        noise = noise_keys([state.seed for state in states for _ in range(num)], positions)
        if noise is None:
            return logits
        scores = process_lines(logits.flatten(0, 1), [(state.processing, num) for state in states], ids)
        return add_noise(scores, noise, ids).view(logits.shape)


def _is_known(state: KnownStates) -> bool:
    """Return whether the target's hidden states of all tokens but the newest have been delivered."""
    return state.num_known == len(state.tokens) > 0


def _probabilities(lattice: Lattice) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the tokens of a lattice, and the probabilities of its first candidates and of those after others."""
    tensors = [lattice.tokens, lattice.first.exp(), lattice.given.exp()]
    if lattice.confidence is None:
        tokens, first, given = fetch_together(tensors)
        return tokens, first, given
    tokens, first, given, confidence = fetch_together([*tensors, lattice.confidence])
    after = confidence[:, 1:, : given.shape[2]]
    return tokens, with_confidence(first, confidence[:, 0, 0]), with_confidence(given, after)


def with_confidence(probs: np.ndarray, confidence: np.ndarray) -> np.ndarray:
    """
    Return probabilities of candidates `[..., k]` of which the likeliest is accepted with a probability of `confidence`
    `[...]`; the others share the rest as they would without (DSpark, arXiv 2607.05147).
    """
    best = probs.max(axis=-1, keepdims=True)
    others = probs * ((1 - confidence[..., None]) / np.maximum(1 - best, 1e-6))
    return np.where(probs == best, confidence[..., None], others).astype(np.float32)
