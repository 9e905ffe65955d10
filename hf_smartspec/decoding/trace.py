"""Traces of requests: the source of every token, and the draft tree of every step with the source of each node."""

from dataclasses import dataclass
from typing import NamedTuple

from ..drafts.tree import DraftTree
from .text import RequestText


@dataclass(frozen=True)
class TracedStep:
    """
    One verification step of one request. Lists have one entry per node that was drafted, parents before children.

    Args:
        start (`int`): Generated tokens before the step.
        tokens, parents (lists of `int`): As in `DraftTree`.
        path_probs (list of `float`): Estimated probability of each node that the target accepts it.
        sources (list of `str`): Label of the source that drafted each node, the first one if several did.
        is_verified (list of `bool`): Whether the length policy selected the node for the target's forward.
        accepted (list of `int`): The nodes on the accepted path.
        num_generated (`int`): Tokens that the step generated: the accepted ones and, after them, the target's own.
    """

    start: int
    tokens: list[int]
    parents: list[int]
    path_probs: list[float]
    sources: list[str]
    is_verified: list[bool]
    accepted: list[int]
    num_generated: int


class TracedRequest(NamedTuple):
    """
    Trace of one request, or of one row of a `generate` call.

    Args:
        token_sources (list): One entry per generated token: the label of the source that drafted it ("suffix",
            "prompt_lookup", "draft_model", ...), None for the target's own tokens.
        steps (list of `TracedStep`): The steps with their drafts.
    """

    token_sources: list[str | None]
    steps: list[TracedStep]


class RequestTrace:
    """Records the trace of a running request."""

    def __init__(self, request: RequestText):
        self._request = request
        self._steps: list[TracedStep] = []  # that have ended
        self._done: list[str | None] = []  # the sources of these steps' tokens
        self._drafted = DraftTree.empty()  # in the current step
        self._sources: list[str] = []
        self._nodes: list[int] = []  # those of `_drafted` that are verified

    def traced(self) -> TracedRequest:
        """Return a copy of the trace so far, which later steps do not change."""
        current = self._token_sources(self._request.path if self._request.is_verifying else [])
        return TracedRequest([*self._done, *current][: self._request.num_valid], list(self._steps))

    def begin(self, drafted: DraftTree, nodes: list[int], sources: list[str]) -> None:
        """Begin a step with its drafted tree, the nodes of it that are verified, and the source of each node."""
        self._drafted, self._nodes, self._sources = drafted, nodes, sources

    def end(self) -> None:
        """End the current step, whose path is known."""
        start, tree, path = len(self._done), self._drafted, self._request.path
        self._done += self._token_sources(path)
        verified = set(self._nodes)
        self._steps.append(
            TracedStep(
                start=start,
                tokens=tree.tokens.tolist(),
                parents=tree.parents.tolist(),
                path_probs=tree.path_probs.tolist(),
                sources=self._sources,
                is_verified=[node in verified for node in range(len(tree))],
                accepted=[self._nodes[node] for node in path],
                num_generated=len(self._done) - start,
            )
        )

    def _token_sources(self, path: list[int]) -> list[str | None]:
        """Return the source label of each token of the current step; None for the target's own."""
        accepted = [self._sources[self._nodes[node]] for node in path]
        return [*accepted, *[None] * (self._request.num_generated - len(self._done) - len(accepted))]
