"""Drafts that grow level by level, for the whole batch at once, each level by a small forward."""

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from itertools import repeat
from typing import Any

import numpy as np
import torch

from ...device import fetch_together, waits_are_free
from ...drafts.price import LevelPrice
from ...drafts.tree import DraftTree
from ...sampling.noise import NoiseKeys, add_noise, draft_seed, noise_keys
from ...sampling.processors import process_lines
from ...sampling.top import likeliest_tokens
from ...target_model.forward.ragged import ForwardSeries, PlannedForward, RaggedForward
from ...validate import check_positive
from ..request import SourceRequest
from .draft_ahead import DraftLevel, plan_levels
from .draft_growth import Growth, Outlook, distribute_features
from .rows import RowCandidates

_CHAIN_NODES, _TREE_NODES = 5, 24  # of a draft; where prices end it
_TREE_WIDTH = 4  # children of a node, and nodes of a level that are grown further, where prices rule


class GrowingCandidates(RowCandidates):
    """
    Drafts that a small forward grows level by level, coupled with the target: where the target samples, the draft
    proposes the best tokens of its own scores *plus the target's noise*, so that both pick the same token whenever
    their distributions nearly agree.

    Rows of a slot cache hold each request's text. Subclasses say what is run (`_new_forward`), and what is to be done
    before drafts begin (`_prepare`).

    Args:
        num_nodes (`int`, *optional*): Nodes per draft where the caller names no number, at most. Where not given, 5,
            and where goodput decides, as many as are worth it, up to 24.
        width (`int`, *optional*): 1 drafts chains. More drafts trees: at every level, the `width` most probable nodes
            each get their `width` most probable children, and the best `num_nodes` of all candidates are proposed.
            Where not given, chains, and where goodput decides, trees whose width at every node is what is worth it,
            up to 4.
        confidence_threshold (`float`): A chain, or a branch where goodput decides, ends early after a token that the
            draft gives a lower probability.
        samples (`bool`): Draws drafts from the draft's own distribution, with independent noise, and hands the
            distributions on, as verification by rejection needs them. Chains only.
        draws_trees (`bool`): Whether the forward runs trees.
        num_positions (`int`, *optional*): The longest text that it runs.
        vocab_size (`int`, *optional*): The target's, where the draft has scores of fewer tokens.
    """

    is_autoregressive = True

    def __init__(
        self,
        num_nodes: int | None = None,
        width: int | None = None,
        confidence_threshold: float = 0.0,
        samples: bool = False,
        draws_trees: bool = True,
        num_positions: int | None = None,
        vocab_size: int | None = None,
    ):
        super().__init__()
        for name, value in (("num_nodes", num_nodes), ("width", width)):
            if value is not None:
                check_positive(name, value)
        if not 0 <= confidence_threshold <= 1:
            raise ValueError(f"`confidence_threshold` must lie in [0, 1], got {confidence_threshold!r}.")
        if samples and (width or 1) > 1:
            raise ValueError("Sampled drafts are chains: `samples=True` needs `width=1`.")
        self.default_num_nodes, self.width = num_nodes or _CHAIN_NODES, width or 1
        # Sampled drafts must not end, or lose nodes, for what was drawn: what is left would be no sample.
        self.heeds_prices = not samples
        self.most_nodes = num_nodes or (_CHAIN_NODES if samples else _TREE_NODES)
        self._draws_trees = draws_trees
        self._widest = width or (_TREE_WIDTH if draws_trees else 1)
        self.confidence_threshold, self.samples = confidence_threshold, samples
        self._num_positions, self._vocab_size = num_positions, vocab_size
        self._outlook = Outlook()  # of all requests

    @property
    def _token_ids(self) -> torch.Tensor | None:
        """The target's token that each score `[vocab_size]` stands for; None where these are its tokens in order."""
        return None

    def _prepare(self) -> None:
        """Do what is due before drafts begin."""

    def _can_grow(self, growth: Growth) -> bool:
        """Return whether the request has all that its draft begins with."""
        return True

    def begin(self, request: SourceRequest) -> int | None:
        num = super().begin(request)
        self._states[request.request_id].outlook = self._outlook.for_new_request()
        return num

    @torch.no_grad()
    def propose(
        self, request_ids: Sequence[Hashable], max_nodes: Sequence[int], price: LevelPrice | None = None
    ) -> list[DraftTree]:
        """
        Draft until a further level promises less than it costs, with branches where these promise more than they cost.
        """
        price = price if self.heeds_prices else None
        assert self._forward is not None, "no request has been started"
        self._prepare()
        growths = [Growth(self._states[name], limit) for name, limit in zip(request_ids, max_nodes)]
        growing = [growth for growth in growths if self._max_depth(growth, price) > 0 and self._can_grow(growth)]
        for growth in growing:
            # The last token is always fed, also where an earlier attempt failed after it: its logits are needed.
            row = growth.state.row
            self._forward.cut(row, min(row.length, len(growth.state.tokens) - 1))
        # Of a shape with branches, and where confidence ends drafts, the next level is not known before it is read.
        is_shaped = price is not None and (max(price.widths, default=1) > 1 or price.confidence > 0)
        if growing and (self._reads_every_level or is_shaped):
            self._grow_by_level(growing, price)
        elif growing:
            self._grow_at_once(growing, price)
        for growth in growths:
            growth.state.nodes = growth.cached
        least = 0.0 if price is None else price.node
        confidence = 0.0 if price is None and self.width > 1 else self.confidence_threshold
        return [growth.tree(least, confidence) for growth in growths]

    @property
    def _reads_every_level(self) -> bool:
        """
        Return whether each level is read before the next is planned: where waiting for the device costs nothing, and
        where layers with states plan their part by the tree.
        """
        forward = self._forward
        return not isinstance(forward, RaggedForward) or forward.plans_by_trees or waits_are_free(forward.device)

    def _grow_by_level(self, growths: list[Growth], price: LevelPrice | None) -> None:
        """Run one level after another, for the trees only where it is worth its cost."""
        assert self._forward is not None
        while growths:
            logits, offsets = self._forward.forward([growth.next_input() for growth in growths])
            growths = [growths[index] for index in np.argsort(offsets)]
            numbers = [len(growth.frontier) for growth in growths]
            distribute_features(self._forward.hidden, growths, numbers)
            noise = self._noise(growths, numbers, growths[0].depth)
            children = self._best_children(growths, numbers, logits, noise, self._width(price, growths[0].depth))
            tokens, probs = fetch_together(children)
            self._add_children(growths, tokens, probs, price)
            growths = self._worth_growing(growths, price)

    def _grow_at_once(self, growths: list[Growth], price: LevelPrice | None) -> None:
        """Run a number of levels that is fixed beforehand, and read them when all have been launched."""
        forward, width = self._forward, self._width(price)
        assert isinstance(forward, RaggedForward)
        lengths = [growth.state.row.length for growth in growths]
        try:
            trust = 1.0 if price is None else price.trust
            levels = plan_levels(forward, growths, self._depths(growths, price), width, self._noise, trust)
            found = self._run_levels(forward, levels, width)
        except BaseException:  # what has not been run is not in the cache
            for growth, length in zip(growths, lengths):
                forward.cut(growth.state.row, length)
            raise
        for level, (tokens, probs, chosen) in zip(levels, found):
            level.take_frontier(chosen)
            self._add_children(level.growths, tokens, probs, price)
            if price is not None and not price.widths:
                for growth in level.growths:
                    growth.promises.append(growth.promise_of(self._worth_children(growth, price)))
        for growth in growths:
            growth.state.outlook.learn(growth.promises)
            self._outlook.learn(growth.promises)

    def _run_levels(self, forward: RaggedForward, levels: list[DraftLevel], width: int) -> list[list[np.ndarray]]:
        """Return for every level its children, their probabilities, and which nodes of the level above had children."""
        series = ForwardSeries(
            [level.planned for level in levels],
            [tensor for level in levels for tensor in level.tensors()],
            partial(self._run_on_device, levels, width),
            partial(self._signature, levels, width),
        )
        arrays = forward.run_series(series)
        return [arrays[first : first + 3] for first in range(0, len(arrays), 3)]

    def _run_on_device(
        self,
        levels: list[DraftLevel],
        width: int,
        planned: list[PlannedForward],
        tensors: list[torch.Tensor],
        run: Callable[[PlannedForward], torch.Tensor],
    ) -> list[torch.Tensor]:
        """Run `_run_levels` on the device, with these tensors in place of the levels' own."""
        found: list[torch.Tensor] = []
        frontier, left = None, iter(tensors)
        for depth, level in enumerate(map(DraftLevel.with_tensors, levels, repeat(left), planned), start=1):
            logits = level.run(run, frontier)
            numbers = [level.num_nodes] * len(level.growths)
            tokens, probs = self._best_children(level.growths, numbers, logits, level.noise, width)
            found += [tokens, probs, tokens[:0] if frontier is None else frontier.chosen]
            if depth < len(levels):
                frontier = level.choose(tokens, probs, frontier)
        return found

    def _signature(self, levels: list[DraftLevel], width: int) -> Hashable:
        """Return everything but tensors that determines the result of levels; None where it cannot be compared."""
        if self.samples or self._token_ids is not None:
            return None
        facts: list[Any] = [type(self), width]
        for level in levels:
            has = [item is not None for item in (level.noise, level.continuing, level.trust)]
            facts.append((len(level.growths), level.num_nodes, *has))
            if level.noise is not None:
                signatures = [growth.state.processing.signature for growth in level.growths]
                if None in signatures:
                    return None
                facts += signatures
        return tuple(facts)

    def _best_children(
        self, growths: list[Growth], numbers: list[int], logits: torch.Tensor, noise: NoiseKeys | None, width: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """
        Return the `width` best tokens after every node `[nodes, width]`, and their probabilities, for growths of so
        many nodes each.
        """
        scores, ids = logits.float(), self._token_ids
        if noise is not None:
            if self.samples and ids is not None:  # the distributions are of the target's tokens
                scores, ids = self._in_whole_vocabulary(scores, ids), None
            owners = [(growth.state.processing, num) for growth, num in zip(growths, numbers)]
            scores = process_lines(scores, owners, ids)
            if self.samples:  # a chain
                for growth, line in zip(growths, scores.softmax(dim=-1)):
                    if growth.state.seed is not None:
                        growth.distributions.append(line)
            scores = add_noise(scores, noise, ids)
        tokens, probs = likeliest_tokens(scores, width)
        return tokens if ids is None else ids[tokens], probs

    def _in_whole_vocabulary(self, scores: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """
        Return scores `[nodes, len(ids)]` of some tokens as scores `[nodes, vocab_size]` of the target's vocabulary.
        """
        assert self._vocab_size is not None, "scores of some tokens need the size of the vocabulary"
        return scores.new_full((len(scores), self._vocab_size), -torch.inf).index_copy_(1, ids, scores)

    def _noise(self, growths: list[Growth], numbers: list[int], depth: int) -> NoiseKeys | None:
        """Return the noise keys of growths of so many nodes each, `depth` tokens after the text."""
        seeds: list[int | None] = []
        positions: list[int] = []
        for growth, num in zip(growths, numbers):
            seed = growth.state.seed
            seeds += [draft_seed(seed) if self.samples and seed is not None else seed] * num
            positions += [growth.state.num_generated + depth] * num
        return noise_keys(seeds, positions)

    def _add_children(
        self, growths: list[Growth], tokens: np.ndarray, probs: np.ndarray, price: LevelPrice | None
    ) -> None:
        """Add the best tokens after every frontier node (`[nodes, width]`) as candidates."""
        trust = 1.0 if price is None else price.trust
        lines = iter(zip(tokens.tolist(), probs.tolist()))
        for growth in growths:
            for node in growth.frontier:
                growth.add_children(node, *next(lines), trust)

    def _width(self, price: LevelPrice | None, depth: int = 0) -> int:
        """Return the children of every node at a depth."""
        if price is not None and price.widths:
            return price.widths[depth] if self._draws_trees else 1
        return self.width if price is None else self._widest

    def _worth_growing(self, growths: list[Growth], price: LevelPrice | None) -> list[Growth]:
        """Set the frontiers of the next level, and return the growths that get one."""
        if price is None:
            return [growth for growth in growths if self._choose_frontier(growth)]
        if price.widths:
            return [growth for growth in growths if self._follow_shape(growth, price)]
        for growth in growths:
            growth.frontier = self._worth_children(growth, price)
        promises = [growth.promise_of(growth.frontier) for growth in growths]
        return self._worth_a_level(growths, promises, growths[0].depth, price)

    def _follow_shape(self, growth: Growth, price: LevelPrice) -> bool:
        """Set all confident ones of the newest candidates to be expanded next; return False if the draft ends."""
        least = price.confidence if price.confidence > 0 else -1.0
        growth.frontier = [node for node in growth.newest if growth.probs[node] > least]
        return bool(growth.frontier) and growth.depth < self._max_depth(growth, price)

    def _worth_children(self, growth: Growth, price: LevelPrice) -> list[int]:
        """Return the newest nodes that are worth children."""
        paths, probs = growth.path_probs, growth.probs
        best = growth.best(self._widest)
        return [node for node in best if paths[node] >= price.node and probs[node] >= self.confidence_threshold]

    def _worth_a_level(
        self, growths: list[Growth], promises: list[float], depth: int, price: LevelPrice
    ) -> list[Growth]:
        """Return the growths for which a level after `depth` others promises more tokens than it costs."""
        cost = price.beyond(depth)
        gains = {growth: promise - cost.row for growth, promise in zip(growths, promises)}
        paying = [growth for growth in growths if gains[growth] > 0 and depth < self._max_depth(growth, price)]
        return paying if sum(gains[growth] for growth in paying) > cost.call else []

    def _depths(self, growths: list[Growth], price: LevelPrice | None) -> list[int]:
        """
        Return the number of levels of trees that grow at once, from the promises of earlier drafts of the requests.
        """
        if price is None or price.widths:
            return [self._max_depth(growth, price) for growth in growths]
        depths = dict.fromkeys(growths, 0)
        continuing = growths
        while continuing:
            for growth in continuing:
                depths[growth] += 1
            depth = depths[continuing[0]]
            continuing = self._worth_a_level(
                continuing, [item.state.outlook.at(depth) for item in continuing], depth, price
            )
        return list(depths.values())

    def _choose_frontier(self, growth: Growth) -> bool:
        """
        Set the most probable of the newest candidates to be expanded next; return False if the tree is large enough.
        """
        growth.frontier = growth.best(self.width)
        is_over = self.width == 1 and growth.probs[-1] < self.confidence_threshold
        return not is_over and growth.depth < self._max_depth(growth, None)

    def _max_depth(self, growth: Growth, price: LevelPrice | None) -> int:
        """
        Return the most levels of a tree: a chain is as deep as it has nodes, and no node lies beyond the draft's
        positions.
        """
        room = growth.limit
        if self._num_positions is not None:
            room = self._num_positions - len(growth.state.tokens) + 1
        if price is not None:
            return min(growth.limit, room, len(price.widths) or growth.limit)
        num_levels = -(-growth.limit // self.width) + (self.width > 1)
        return min(growth.limit, num_levels, room)
