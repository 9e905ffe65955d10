"""Drafting with a smaller model of the same vocabulary, for the whole batch at once."""

import os
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from transformers import LogitsProcessorList, PreTrainedModel

from ..device import to_device
from ..drafts.price import LevelPrice
from ..drafts.tree import DraftTree
from ..sampling.noise import add_gumbel_noise, draft_seed
from ..sampling.processors import process_lines, score_processors
from ..sampling.top import likeliest_tokens
from ..target.chains import ChainForward
from ..target.layout import CacheRow, RowInput
from ..target.packed import PackedForward
from ..target.support import can_pack
from ..target.written import packed_forward
from ..validate import is_integer
from .base import TreeCandidateGenerator

_CHAIN_NODES, _TREE_NODES = 5, 24  # of a draft; where prices end it
_TREE_WIDTH = 4  # children of a node, and nodes of a level that are grown further, where prices rule


@dataclass(eq=False)
class _DraftState:
    """One request's text, its row in the draft's cache, and the nodes whose keys and values lie behind it."""

    row: CacheRow
    tokens: list[int]
    processors: LogitsProcessorList = field(default_factory=LogitsProcessorList)
    seed: int | None = None
    num_generated: int = 0
    nodes: DraftTree = field(default_factory=DraftTree.empty)


@dataclass
class _Growth:
    """
    A tree that grows level by level. Candidates are all tokens the draft thought of; `expanded` are those of them
    that were run through the draft, in the order in which they lie in its cache.
    """

    state: _DraftState
    limit: int
    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)  # indices of candidates
    probs: list[float] = field(default_factory=list)
    path_probs: list[float] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)
    distributions: list[torch.Tensor] = field(default_factory=list)
    expanded: list[int] = field(default_factory=list)
    frontier: list[int] = field(default_factory=lambda: [-1])  # candidates whose children come next
    cached: DraftTree = field(default_factory=DraftTree.empty)  # the expanded candidates

    def expand(self) -> None:
        """Counts the frontier among the expanded candidates."""
        self.expanded += [node for node in self.frontier if node >= 0]
        self.cached = self._tree_of(self.expanded)

    def tree(self) -> DraftTree:
        """The candidates of highest path probability, as many as the draft may have."""
        nodes = list(range(len(self.tokens)))
        if len(nodes) > self.limit:  # ties go to the earlier node: a child never outranks its parent
            nodes = sorted(sorted(nodes, key=lambda node: -self.path_probs[node])[: self.limit])
        return self._tree_of(nodes, torch.stack(self.distributions) if self.distributions else None)

    def _tree_of(self, nodes: list[int], distributions: torch.Tensor | None = None) -> DraftTree:
        """Some of the candidates, parents first, as a tree of their own."""
        index = {node: position for position, node in enumerate(nodes)} | {-1: -1}
        return DraftTree(
            np.array([self.tokens[node] for node in nodes], np.int64),
            np.array([index[self.parents[node]] for node in nodes], np.int64),
            np.array([self.probs[node] for node in nodes], np.float32),
            distributions,
        )

    def add_children(self, node: int, tokens: list[int], probs: list[float], trust: float, least: float) -> None:
        """Candidates behind candidate `node` (-1: behind the text), the best first, with paths of `least` or more."""
        path_prob = self.path_probs[node] if node >= 0 else 1.0
        paths = [path_prob * min(prob * trust, 1.0) for prob in probs]
        num = sum(path >= least for path in paths)
        num = max(num, node == self.frontier[0])  # every level has a node, so that its costs can be told
        tokens, probs = tokens[:num], probs[:num]
        self.tokens += tokens
        self.parents += [node] * len(tokens)
        self.probs += probs
        self.path_probs += paths[:num]
        self.depths += [self.depths[node] + 1 if node >= 0 else 1] * len(tokens)


class DraftModelCandidates(TreeCandidateGenerator):
    """
    Drafts with a smaller causal language model, coupled with the target: where the target samples, the draft proposes
    the best tokens of its own scores *plus the target's noise*, so that both pick the same token whenever their
    distributions nearly agree.

    The draft has a slot cache of its own, which holds each request's committed text and is cut back to it after every
    verification. Models that cannot be packed (bloom, falcon, ...) draft chains, row by row.

    Args:
        model (`PreTrainedModel`): A causal LM whose tokenizer is the target's.
        num_nodes (`int`, *optional*): Nodes per draft where the caller names no number, at most. Where not given, 5,
            and where goodput decides, as many as are worth it, up to 24.
        width (`int`, *optional*): 1 drafts chains. More drafts trees: at every level, the `width` most probable nodes
            each get their `width` most probable children, and the best `num_nodes` of all candidates are proposed.
            Where not given, chains, and where goodput decides, trees whose width at every node is what is worth it,
            up to 4.
        confidence_threshold (`float`): A chain, or a branch where goodput decides, ends early behind a token that the
            draft gives a lower probability.
        samples (`bool`): Draws drafts from the draft's own distribution, with independent noise, and hands the
            distributions on, as verification by rejection needs them. Chains only.

    Attributes:
        weights_version (`int`): To be counted up by whoever changes the model's weights while requests run: keys and
            values that were computed with the old ones are then computed anew, with the next draft.
    """

    is_autoregressive = True
    weights_version = 0

    def __init__(
        self,
        model: PreTrainedModel,
        num_nodes: int | None = None,
        width: int | None = None,
        confidence_threshold: float = 0.0,
        samples: bool = False,
    ):
        if not isinstance(model, PreTrainedModel):
            raise TypeError(f"`model` must be a PreTrainedModel, got {type(model).__name__}.")
        for name, value in (("num_nodes", num_nodes), ("width", width)):
            if value is not None and (not is_integer(value) or value < 1):
                raise ValueError(f"`{name}` must be a positive integer, got {value!r}.")
        if not 0 <= confidence_threshold <= 1:
            raise ValueError(f"`confidence_threshold` must lie in [0, 1], got {confidence_threshold!r}.")
        if samples and (width or 1) > 1:
            raise ValueError("Sampled drafts are chains: `samples=True` needs `width=1`.")
        self._draws_trees = can_pack(model)
        if (width or 1) > 1 and not self._draws_trees:
            raise ValueError(f"{type(model).__name__} cannot be packed, so that it drafts chains: leave `width` out.")
        self.model, self.default_num_nodes, self.width = model, num_nodes or _CHAIN_NODES, width or 1
        # Sampled drafts must not end, or lose nodes, for what was drawn: what is left would be no sample.
        self.heeds_prices = not samples
        self._most_nodes = num_nodes or (_CHAIN_NODES if samples else _TREE_NODES)
        self._widest = width or (_TREE_WIDTH if self._draws_trees else 1)
        self.confidence_threshold, self.samples = confidence_threshold, samples
        config = model.config.get_text_config(decoder=True)
        self._num_positions: int | None = getattr(config, "max_position_embeddings", None)
        self._forward: PackedForward | ChainForward | None = None
        self._states: dict[Hashable, _DraftState] = {}
        self._cached_version = self.weights_version  # what the cache was computed with
        self._coupling: dict[Hashable, tuple[LogitsProcessorList, int | None]] = {}

    @property
    def name(self) -> str:
        path = getattr(self.model, "name_or_path", "") or type(self.model).__name__
        return f"{type(self).__name__}({os.path.basename(path)}, {id(self.model):x})"  # models of one path may differ

    @property
    def most_nodes(self) -> int:
        return self._most_nodes

    def couple(self, request_id: Hashable, processors: LogitsProcessorList, seed: int | None) -> None:
        self._coupling[request_id] = (score_processors(processors), seed)

    def start(self, request_id: Hashable, prompt: np.ndarray) -> None:
        # The cache lives while requests do: weights may change between calls.
        self._forward = self._forward or self._new_forward()
        processors, seed = self._coupling.pop(request_id, (LogitsProcessorList(), None))
        if seed is None:
            processors = LogitsProcessorList()  # the arg max does not change
        self._states[request_id] = _DraftState(self._forward.add(), prompt.tolist(), processors, seed)

    def _new_forward(self) -> PackedForward | ChainForward:
        return packed_forward(self.model) if self._draws_trees else ChainForward(self.model)

    def stop(self, request_id: Hashable) -> None:
        self._coupling.pop(request_id, None)
        state = self._states.pop(request_id, None)
        if state is not None and self._forward is not None:
            self._forward.remove(state.row)
        if not self._states:
            self._forward = None

    def observe(self, request_id: Hashable, tokens: np.ndarray) -> None:
        state = self._states[request_id]
        if state.row.length == len(state.tokens):
            assert self._forward is not None
            # The last token stays out even if it was drafted: the next draft needs its logits.
            self._forward.commit([state.row], [state.nodes.path_along(tokens[:-1])])
        state.nodes = DraftTree.empty()
        state.tokens += tokens.tolist()
        state.num_generated += len(tokens)

    @torch.no_grad()
    def propose(
        self, request_ids: Sequence[Hashable], max_nodes: Sequence[int], price: LevelPrice | None = None
    ) -> list[DraftTree]:
        """Drafts end where a level promises less than it costs, and branch where that promises more than it costs."""
        price = price if self.heeds_prices else None
        assert self._forward is not None, "no request has been started"
        self._drop_outdated()
        growths = [_Growth(self._states[name], limit) for name, limit in zip(request_ids, max_nodes)]
        growing = [growth for growth in growths if self._max_depth(growth, price) > 0]
        for growth in growing:
            # The last token is always fed, also where an earlier attempt failed behind it: its logits are needed.
            row = growth.state.row
            self._forward.cut(row, min(row.length, len(growth.state.tokens) - 1))
        while growing:
            self._grow_level(growing, price)
            growing = self._worth_growing(growing, price)
        for growth in growths:
            growth.state.nodes = growth.cached
        return [growth.tree() for growth in growths]

    def _drop_outdated(self) -> None:
        """Begins with empty rows where their keys and values are of other weights than the model has now."""
        if self.weights_version == self._cached_version:
            return
        self._cached_version = self.weights_version
        self._forward = self._new_forward()  # dtype or device may be others now, too
        for state in self._states.values():
            state.row, state.nodes = self._forward.add(), DraftTree.empty()

    def _grow_level(self, growths: list[_Growth], price: LevelPrice | None) -> None:
        """Runs every frontier node through the draft and adds its best children as candidates."""
        assert self._forward is not None
        inputs = []
        for growth in growths:
            state = growth.state
            feed = np.array(state.tokens[state.row.length :], np.int64)
            first = len(growth.expanded)
            growth.expand()
            inputs.append(RowInput(state.row, feed, growth.cached, first))
        logits, offsets = self._forward.forward(inputs)
        lines = [offset + i for growth, offset in zip(growths, offsets) for i in range(len(growth.frontier))]
        if lines != list(range(len(logits))):  # also where rows have changed slots, and lines their order
            logits = logits[to_device(np.array(lines), logits.device)]
        width = self.width if price is None else self._widest
        tokens, probs, distributions = self._best_children(growths, logits, width)
        trust, least = (1.0, 0.0) if price is None else (price.trust, price.node)
        owners = ((growth, node) for growth in growths for node in growth.frontier)
        for line, (growth, node) in enumerate(owners):
            growth.add_children(node, tokens[line], probs[line], trust, least)
            if distributions is not None and growth.state.seed is not None:
                growth.distributions.append(distributions[line])

    def _best_children(
        self, growths: list[_Growth], logits: torch.Tensor, width: int
    ) -> tuple[list[list[int]], list[list[float]], torch.Tensor | None]:
        """The `width` best tokens of every line, their probabilities, and the distributions if drafts are sampled."""
        scores = logits.float()
        distributions = None
        if any(growth.state.seed is not None for growth in growths):
            scores = process_lines(scores, [(growth.state.processors, len(growth.frontier)) for growth in growths])
            seeds: list[int | None] = []
            positions: list[int] = []
            for growth in growths:
                state = growth.state
                seed = draft_seed(state.seed) if self.samples and state.seed is not None else state.seed
                seeds += [seed] * len(growth.frontier)
                depths = (growth.depths[node] if node >= 0 else 0 for node in growth.frontier)
                positions += [state.num_generated + depth for depth in depths]
            distributions = scores.softmax(dim=-1) if self.samples else None
            scores = add_gumbel_noise(scores, seeds, positions)
        return *likeliest_tokens(scores, width), distributions

    def _worth_growing(self, growths: list[_Growth], price: LevelPrice | None) -> list[_Growth]:
        """Those that get a further level, with the nodes that it hangs on."""
        if price is None:
            return [growth for growth in growths if self._choose_frontier(growth)]
        price = price.beyond(growths[0].depths[-1])  # they grow together
        going_on, profit = [], -price.call
        for growth in growths:
            newest = range(growth.depths.index(growth.depths[-1]), len(growth.depths))
            paths = growth.path_probs
            best = sorted(newest, key=lambda node: -paths[node])[: self._widest]
            frontier = [node for node in best if paths[node] >= price.node and self._is_confident(growth, node)]
            gain = sum(paths[node] for node in frontier) - price.row
            if gain > 0 and growth.depths[-1] < self._max_depth(growth, price):
                growth.frontier = frontier
                going_on.append(growth)
                profit += gain
        return going_on if profit > 0 else []

    def _is_confident(self, growth: _Growth, node: int) -> bool:
        return growth.probs[node] >= self.confidence_threshold

    def _choose_frontier(self, growth: _Growth) -> bool:
        """The most probable of the newest candidates are expanded next; False if the tree is large enough."""
        depth = growth.depths[-1]
        newest = list(range(growth.depths.index(depth), len(growth.depths)))
        if self.width == 1:
            growth.frontier = newest
            return depth < self._max_depth(growth, None) and self._is_confident(growth, -1)
        newest.sort(key=lambda node: -growth.path_probs[node])
        growth.frontier = newest[: self.width]
        return depth < self._max_depth(growth, None)

    def _max_depth(self, growth: _Growth, price: LevelPrice | None) -> int:
        """Levels of the tree: a chain is as deep as it has nodes, and no node stands beyond the draft's positions."""
        room = growth.limit
        if self._num_positions is not None:
            room = self._num_positions - len(growth.state.tokens) + 1
        if price is not None:
            return min(growth.limit, room)
        num_levels = -(-growth.limit // self.width) + (self.width > 1)
        return min(growth.limit, num_levels, room)
