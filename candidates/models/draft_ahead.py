"""
Several levels of a draft, planned and sent to the device at once: the number of nodes of each level is fixed before the
first one runs, and the tokens that the nodes hold are read only after the last one.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch

from ...sampling.noise import NoiseKeys
from ...target_model.forward.ragged import PlannedForward, RaggedForward
from ...target_model.graphs.padding import extended
from ...target_model.layout.step_layout import send
from .draft_growth import Growth


class Frontier(NamedTuple):
    """The nodes that a level runs, on the device."""

    tokens: torch.Tensor  # [rows, width] int64
    paths: torch.Tensor  # [rows, width] float32, their path probabilities
    # [rows, width, levels between] int64: their parent's place in its level, its parent's, and so on.
    ancestors: torch.Tensor
    chosen: torch.Tensor  # [rows, width] int64, which of the children in the level above they are
    features: torch.Tensor | None = None  # [rows, width, D], what their parents have left


@dataclass(eq=False)
class DraftLevel:
    """
    A planned level.

    Args:
        growths (list of `Growth`): The trees that get it, in the order of their rows' lines.
        planned (`PlannedForward`): Forward of the text, or of as many nodes as the level has.
        num_nodes (`int`): Number of nodes of every tree that have children in it; 1 for the text.
        noise (`NoiseKeys`, *optional*): Noise of its logits.
        continuing (`torch.Tensor`, *optional*): The growths that have a further level; by default, all.
        trust (`torch.Tensor` of shape `[1]`, int64, *optional*): Factor on its probabilities, as the bits of two
            float32; by default, 1.
    """

    growths: list[Growth]
    planned: PlannedForward
    num_nodes: int
    noise: NoiseKeys | None = None
    continuing: torch.Tensor | None = None
    trust: torch.Tensor | None = None

    def tensors(self) -> list[torch.Tensor]:
        """Return its tensors beside those of its layout."""
        return [item for item in (*(self.noise or ()), self.continuing, self.trust) if item is not None]

    def with_tensors(self, tensors: Iterator[torch.Tensor], planned: PlannedForward) -> "DraftLevel":
        """Return the level with the next of these tensors in place of its own."""
        noise = None if self.noise is None else NoiseKeys(next(tensors), next(tensors))
        continuing, trust = (None if item is None else next(tensors) for item in (self.continuing, self.trust))
        return replace(self, planned=planned, noise=noise, continuing=continuing, trust=trust)

    def run(self, run: Callable[[PlannedForward], torch.Tensor], frontier: Frontier | None) -> torch.Tensor:
        """Return logits `[nodes, vocab_size]` after the frontier, or after the text."""
        if frontier is not None:
            tokens = frontier.tokens.reshape(1, -1)
            self.planned.layout.tokens = extended(tokens, self.planned.layout.positions.shape[1])
            self._set_ancestors(frontier.ancestors)
            if frontier.features is not None:
                self.planned.features = frontier.features.flatten(0, 1)
        return run(self.planned)

    def _set_ancestors(self, ancestors: torch.Tensor) -> None:
        """Replace the layout's placeholder ancestors, the first node of every level, with the real ones."""
        layout, (num_rows, width, num_levels) = self.planned.layout, ancestors.shape
        if not num_levels:
            return
        offsets = ancestors.flatten(0, 1).T  # [levels between, nodes]
        for part in layout.parts:
            if part.tree_pairs is not None:
                offset = offsets[:, part.tokens]
                own, others, padding = part.tree_pairs.split(
                    [offset.shape[1], offset.numel(), len(part.tree_pairs) - offset.shape[1] - offset.numel()]
                )
                part.tree_pairs, part.seen_nodes = torch.cat([own, others + offset.flatten(), padding]), None
        if layout.spans is not None:
            own = torch.arange(width, device=ancestors.device).expand(num_rows, -1)[:, :, None]
            levels = torch.arange(num_levels, -1, -1, device=ancestors.device)
            nodes = torch.cat([own, ancestors], dim=2) + levels * width
            layout.spans.set_seen_nodes(extended(nodes.flatten(0, 1).T, layout.positions.shape[1]))

    def take_frontier(self, chosen: np.ndarray) -> None:
        """Set which of the trees' newest nodes have children here (`[rows, width]`; none: the text)."""
        for growth, children in zip(self.growths, chosen.tolist()):
            growth.frontier = [growth.newest[child] for child in children]
        for growth in self.growths:
            growth.expand()

    def choose(self, tokens: torch.Tensor, probs: torch.Tensor, above: Frontier | None) -> Frontier:
        """Return the best of the children `[nodes, width]`, as many in every row as a node has."""
        num_rows, width = len(self.growths), tokens.shape[1]
        if width == 1:
            no_ancestors, first = tokens[:, :, None][:, :, :0], torch.zeros_like(tokens)
            return self._continuing(Frontier(tokens, probs, no_ancestors, first, self._child_features(first)))
        trusted = probs if self.trust is None else probs * self.trust.view(torch.float32)[:1]
        paths = trusted.clamp(max=1.0)
        if above is not None:
            paths = above.paths.reshape(-1, 1) * paths
        tokens, paths = tokens.reshape(num_rows, -1), paths.reshape(num_rows, -1)
        chosen = paths.sort(dim=1, descending=True, stable=True).indices[:, :width]
        parents = chosen // width
        if above is None:
            ancestors = parents.new_zeros(num_rows, width, 0)
        else:
            further = above.ancestors.gather(1, parents[:, :, None].expand(-1, -1, above.ancestors.shape[2]))
            ancestors = torch.cat([parents[:, :, None], further], dim=2)
        nodes = Frontier(
            tokens.gather(1, chosen), paths.gather(1, chosen), ancestors, chosen, self._child_features(parents)
        )
        return self._continuing(nodes)

    def _child_features(self, parents: torch.Tensor) -> torch.Tensor | None:
        """
        Return the features that nodes of this level `[rows, width]` pass to their children, `[rows, width, D]`, if any.
        """
        hidden = self.planned.hidden
        if hidden is None:
            return None
        left = hidden.view(len(parents), -1, hidden.shape[-1])
        return left.gather(1, parents[:, :, None].expand(-1, -1, left.shape[-1]))

    def _continuing(self, frontier: Frontier) -> Frontier:
        """Return the rows of a frontier that have a further level."""
        rows = self.continuing
        if rows is None:
            return frontier
        return Frontier(*[None if item is None else item.index_select(0, rows) for item in frontier])  # type: ignore[arg-type]


def plan_levels(
    forward: RaggedForward,
    growths: Sequence[Growth],
    depths: Sequence[int],
    width: int,
    noise: Callable[[list[Growth], list[int], int], NoiseKeys | None],
    trust: float = 1.0,
) -> list[DraftLevel]:
    """
    Lay out and send all levels of trees that are `depths` deep, of `width` nodes per level. `noise` returns the keys of
    some trees' logits, with so many nodes each, at a depth; `trust` corrects the draft's probabilities. The rows then
    count as fed, as if the levels had been run.
    """
    # Of the right shape, but for who descends from whom: all nodes hang on the first one of the level above.
    shapes = {growth: Growth(growth.state, growth.limit) for growth in growths}
    # What is planned must not move before it is run.
    needs = [len(item.state.tokens) + width * depth for item, depth in zip(growths, depths)]
    forward.cache.reserve([item.state.row for item in growths], needs)
    order = sorted(zip(growths, depths), key=lambda item: item[0].state.row.line)  # as forwards order rows
    levels: list[DraftLevel] = []
    for depth in range(max(depths)):
        members = [growth for growth, most in order if most > depth]
        inputs = [shapes[growth].next_input() for growth in members]
        planned = forward.plan(inputs if depth else forward.run_long_feeds(inputs))
        planned.settle()
        num_nodes = width if depth else 1
        levels.append(DraftLevel(members, planned, num_nodes, noise(members, [num_nodes] * len(members), depth)))
        for growth in members:
            shape = shapes[growth]
            shape.add_children(shape.frontier[0], [0] * width, [0.0] * width)
            shape.frontier = list(shape.newest)
    for level, further in pairwise(levels):
        if len(further.growths) < len(level.growths):
            stay = set(further.growths)
            level.continuing = torch.tensor([number for number, growth in enumerate(level.growths) if growth in stay])
    if width > 1 and trust != 1.0:
        for level in levels[:-1]:
            level.trust = torch.tensor([trust, trust], dtype=torch.float32).view(torch.int64)
    return _send(forward, levels)


def _send(forward: RaggedForward, levels: Sequence[DraftLevel]) -> list[DraftLevel]:
    others = [tensor for level in levels for tensor in level.tensors()]
    sent = iter(send([level.planned.layout for level in levels], forward.device, forward.staging, others))
    return [level.with_tensors(sent, level.planned) for level in levels]
