"""The source that drafts with heads of P-EAGLE: all depths in one forward."""

from collections.abc import Hashable, Sequence
from typing import cast

import numpy as np
import torch

from ....device import fetch_together
from ....drafts.price import LevelPrice
from ....drafts.tree import DraftTree
from ....goodput.estimates.calibrator import Calibrator
from ....sampling.noise import noise_keys
from ....target_model.layout.rows import RowInput
from ...committed import Committed
from ...models.draft_growth import Growth
from ..feature_source import FeatureCandidates
from ..medusa.source import DepthCalibration
from ..trees import best_trees, full_tree
from .config import DEPTHS, MASK_TOKEN
from .heads import EagleHeads

_NUM_NODES, _WIDTH = 32, 8  # of a tree at most; candidates of each depth


class ParallelCandidates(FeatureCandidates):
    """
    Drafts with heads that predict all depths in one forward (P-EAGLE, arXiv 2602.01469). Depth 1 is EAGLE-3's, from the
    last token and the target's hidden states; each further depth reads a mask token and `mask_hidden` in their place,
    and attends to the text and to the depths before it. Its keys and values are dropped.

    Depths do not depend on the tokens drafted before them: trees have the nodes of the highest joint probability, as
    those of Medusa. Where the target samples, the candidates are the best ones of each depth's scores with the target's
    noise.

    Args:
        heads (`EagleHeads`): With a `mask_hidden`, on the device of the target's output.
        num_nodes (`int`, *optional*): Nodes of a tree where the caller names no number, at most; 32 by default.
        width (`int`, *optional*): Candidates of each depth, 8 by default; 1 drafts chains.
        calibrator (`Calibrator`, *optional*): Calibrates each depth's probabilities; by default, they stay raw.

    Raises:
        ValueError: for heads without `mask_hidden`.
    """

    is_autoregressive = False
    heeds_shapes = True

    def __init__(
        self,
        heads: EagleHeads,
        num_nodes: int | None = None,
        width: int | None = None,
        calibrator: Calibrator | None = None,
    ):
        super().__init__(heads, num_nodes or _NUM_NODES)
        if heads.mask_hidden is None:
            raise ValueError("`ParallelCandidates` needs heads of P-EAGLE: these have no `mask_hidden`.")
        self.heeds_prices = False
        self.mask_token: int = getattr(heads.config, MASK_TOKEN)
        self.num_depths: int = getattr(heads.config, DEPTHS)
        self._num_candidates = width or _WIDTH
        self._calibration = None if calibrator is None else DepthCalibration(calibrator, self.name, self.num_depths)
        self._drafted: dict[Hashable, tuple[np.ndarray, np.ndarray]] = {}  # candidates and probabilities, [depths, w]

    @torch.no_grad()
    def propose(
        self, request_ids: Sequence[Hashable], max_nodes: Sequence[int], price: LevelPrice | None = None
    ) -> list[DraftTree]:
        """Draft the best trees, or full ones where a policy fixes their shape."""
        shape = () if price is None else price.widths[: self.num_depths]
        trees = dict.fromkeys(request_ids, DraftTree.empty())
        growths = {name: Growth(self._states[name], limit) for name, limit in zip(request_ids, max_nodes)}
        asked = [name for name, growth in growths.items() if growth.limit > 0 and self._can_grow(growth)]
        if asked:
            num = len(shape) or min(self.num_depths, max(growths[name].limit for name in asked))
            asked, tokens, probs = self._run_depths({name: growths[name] for name in asked}, num, max(shape, default=0))
            worth = probs if self._calibration is None else self._calibration.calibrated(probs)
            limits = [growths[name].limit for name in asked]
            if shape:
                found = [full_tree(tuple(shape)).of(*row) for row in zip(tokens, worth, limits)]
            else:
                found = best_trees(tokens, worth[:, 0], worth[:, 1:, None], limits)
            trees |= zip(asked, found)
            self._drafted |= zip(asked, zip(tokens, probs))
        return [trees[name] for name in request_ids]

    def _run_depths(
        self, growths: dict[Hashable, Growth], num: int, width: int
    ) -> tuple[list[Hashable], np.ndarray, np.ndarray]:
        """
        Run `num` depths after the texts of some requests. Return the requests in the order of the rows, the candidates
        of each depth `[requests, num, w]`, the likeliest first, and their probabilities.
        """
        forward, heads = self._forward, cast(EagleHeads, self.heads)
        assert forward is not None and heads.mask_hidden is not None
        mask = heads.mask_hidden.expand(num - 1, -1)
        chain = DraftTree.chain([self.mask_token] * (num - 1))
        inputs = []
        for growth in growths.values():
            row, text = growth.state.row, growth.state.tokens
            forward.cut(row, min(row.length, len(text) - 1))
            features = growth.state.features()
            assert features is not None, "a draft begins with the target's hidden states"
            feed = np.array(text[row.length :], np.int64)
            inputs.append(RowInput(row, feed, chain, features=torch.cat([features, mask.to(features.dtype)])))
        logits, offsets = forward.forward(inputs)
        names = [list(growths)[index] for index in np.argsort(offsets)]
        states = [growths[name].state for name in names]
        seeds = [state.seed for state in states for _ in range(num)]
        noise = noise_keys(seeds, [state.num_generated + depth for state in states for depth in range(num)])
        sizes = [num] * len(names)
        width = max(width, self._num_candidates)
        found = self._best_children([growths[name] for name in names], sizes, logits, noise, width)
        tokens, probs = fetch_together(found)
        return names, tokens.reshape(len(names), num, -1), probs.reshape(len(names), num, -1)

    def observe(self, request_id: Hashable, committed: Committed) -> None:
        drafted = self._drafted.pop(request_id, None)
        if drafted is not None and self._calibration is not None:
            self._calibration.learn(*drafted, committed.tokens)
        super().observe(request_id, committed)

    def stop(self, request_id: Hashable) -> None:
        self._drafted.pop(request_id, None)
        super().stop(request_id)
