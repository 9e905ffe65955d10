"""The drafts of one step, from drafting until the step's outcome is known."""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from ..candidates.base import label_of
from ..drafts.merge import Draft, first_drafters
from ..drafts.tree import DraftTree
from ..goodput.policy import StepOutcome, StepRows, StepSeconds
from .call import Request
from .source_guard import GuardedSources


class StepDrafts(NamedTuple):
    """
    Drafts of one step: the proposed trees, and the selected ones, which are verified. Where the policy is not called,
    there are none, and no `policy_rows`.
    """

    policy_rows: StepRows | None
    rows: list[Request]
    proposed: list[DraftTree]
    trees: list[DraftTree]
    start: StepSeconds  # seconds spent before the step

    @property
    def has_prompts(self) -> bool:
        return self.policy_rows is not None and self.policy_rows.num_prefill_tokens > 0

    def begin_traces(self, sources: GuardedSources) -> None:
        """Begin the step in the traces of its rows, before their sources observe its outcome."""
        assert self.policy_rows is not None, "no step of a traced row rests"
        for index, (request, drafted, verified) in enumerate(zip(self.rows, self.proposed, self.trees)):
            if request.trace is None:
                continue
            nodes = list(range(len(drafted))) if verified is drafted else Draft.of(drafted).nodes_of(verified)
            if -1 in nodes:  # the policy has selected nodes that were not proposed
                drafted, nodes = verified, list(range(len(verified)))
            proposals = [(stage.position, stage.proposed[index]) for stage in self.policy_rows.stages]
            labels = first_drafters(
                drafted,
                [
                    (Draft.of(tree), partial(sources.drafted_by, request, place))
                    for place, tree in proposals
                    if len(tree)
                ],
            )
            request.trace.begin(drafted, nodes, [label or label_of(request.chain.sources[0]) for label in labels])

    def seconds(self, end: StepSeconds) -> StepSeconds:
        """Return the step's own seconds, from those spent at its end."""
        return StepSeconds(*(after - before for before, after in zip(self.start, end)))

    def outcome(self, accepted: Sequence[int], tokens: Sequence[np.ndarray], end: StepSeconds) -> StepOutcome:
        """Return the outcome for the policy, from accepted nodes and committed tokens of rows, and the step's end."""
        assert self.policy_rows is not None, "a step that the policy is called for"
        return StepOutcome(self.policy_rows, self.proposed, self.trees, accepted, self.seconds(end), tokens)
