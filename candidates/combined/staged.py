"""Sources in line, the cheapest first: where its drafts promise little, the next one is asked as well."""

from collections import defaultdict
from collections.abc import Hashable, Sequence
from functools import partial

import numpy as np

from ...drafts.merge import Draft, join
from ...drafts.tree import DraftTree
from ...goodput.estimates.decayed import DecayedMean
from ..base import TreeCandidateGenerator
from ..committed import Committed
from .base import CombinedCandidates

_LEAST_WEIGHT = 0.05  # of the newest draft in the running mean of accepted lengths


class StagedCandidates(CombinedCandidates):
    """
    Any number of sources of any cost. The engine asks one `stage` after the other, each where its nodes bring more,
    beside those that are there already, than they cost.

    Without a policy that weighs that (a fixed number of nodes, transformers' own loop), it is SuffixDecoding's hybrid
    (appendix B.1): a later source is asked where the tree so far promises too few tokens (SCORE, the sum of its path
    probabilities, is at most τ). Its nodes join the tree; or, as published (`replaces`), its draft is verified in place
    of the tree.

    Args:
        sources (sequence of `TreeCandidateGenerator`): The stages, cheap ones first.
        threshold (`float`, *optional*): τ, in tokens. By default the running mean of what is accepted of the drafts of
            the source in question.
        vocab_size (`int`, *optional*): See `CombinedCandidates`.
        replaces (`bool`): The published hybrid: τ decides under every policy, and a later source's draft takes the
            tree's place. A policy that weighs gains against costs may still not ask where the draft does not pay.
    """

    def __init__(
        self,
        sources: Sequence[TreeCandidateGenerator],
        threshold: float | None = None,
        vocab_size: int | None = None,
        replaces: bool = False,
    ):
        super().__init__(sources, vocab_size=vocab_size)
        if threshold is not None and not threshold >= 0:
            raise ValueError(f"`threshold` must not be negative, got {threshold!r}.")
        self.threshold, self.replaces = threshold, replaces
        self._lengths: defaultdict[int, DecayedMean] = defaultdict(  # accepted, by stage; begin with one token
            partial(DecayedMean, _LEAST_WEIGHT, 1.0, 1)
        )
        self._drafts: dict[tuple[Hashable, int], DraftTree] = {}  # the latest of each stage

    @property
    def stages(self) -> Sequence[TreeCandidateGenerator]:
        return self.sources

    def propose(self, request_ids: Sequence[Hashable], max_nodes: Sequence[int]) -> list[DraftTree]:
        trees = self._ask(self.sources[0], request_ids, max_nodes)
        self._drafts |= {(name, 0): draft for name, draft in zip(request_ids, trees)}
        for stage, source in enumerate(self.sources[1:], start=1):
            limit = self._lengths[stage].mean if self.threshold is None else self.threshold
            rows = [row for row, tree in enumerate(trees) if float(tree.path_probs.sum()) <= limit]
            names = [request_ids[row] for row in rows]
            most = [min(max_nodes[row], source.default_num_nodes) for row in rows]  # it may cost by the node
            drafts = self._ask(source, names, most)
            self._drafts |= {(name, stage): draft for name, draft in zip(names, drafts) if len(draft)}
            if not self.replaces:
                drafts = join([trees[row] for row in rows], drafts, [max_nodes[row] for row in rows])
            for row, tree in zip(rows, drafts):
                trees[row] = tree
        return trees

    def drafted_by(self, request_id: Hashable, tree: DraftTree) -> list[str]:
        drafts = [self._drafts.get((request_id, stage), DraftTree.empty()) for stage in range(len(self.sources))]
        return self._drafters(request_id, tree, map(Draft.of, drafts))

    def observe(self, request_id: Hashable, tokens: np.ndarray | Committed) -> None:
        step = Committed.of(tokens)
        self._drafts.pop((request_id, 0), None)
        for stage in range(1, len(self.sources)):
            draft = self._drafts.pop((request_id, stage), None)
            if draft is not None:
                self._lengths[stage].add(len(draft.path_along(step.tokens)))
        super().observe(request_id, step)

    def stop(self, request_id: Hashable) -> None:
        for stage in range(len(self.sources)):
            self._drafts.pop((request_id, stage), None)
        super().stop(request_id)
