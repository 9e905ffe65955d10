"""Who produced which token: draft trees with the source of every node, of requests for which somebody asks."""

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
        path_probs (list of `float`): How probable it was held that the target's text runs through each node.
        sources (list of `str`): Labels of the sources that drafted them; the first in line, where several did.
        is_verified (list of `bool`): Whether the length policy let a node into the target's forward.
        accepted (list of `int`): The nodes on the accepted path.
        num_generated (`int`): Tokens that came of it: the accepted ones and, behind them, the target's own.
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
    How one request, or one row of a `generate` call, came about.

    Args:
        token_sources (list): One entry per generated token: the label of the source that drafted it ("suffix",
            "prompt_lookup", "draft_model", ...), None for the target's own tokens.
        steps (list of `TracedStep`): What was drafted, and what came of it.
    """

    token_sources: list[str | None]
    steps: list[TracedStep]


class RequestTrace:
    """Keeps what a request that runs is traced by."""

    def __init__(self, request: RequestText):
        self._request = request
        self._steps: list[TracedStep] = []  # that have ended
        self._done: list[str | None] = []  # whose the tokens of these steps are
        self._drafted = DraftTree.empty()  # in the step under way
        self._sources: list[str] = []
        self._nodes: list[int] = []  # of it, those that are verified

    def traced(self) -> TracedRequest:
        """All there is so far: later steps do not change it."""
        under_way = self._behind(self._request.path if self._request.is_verifying else [])
        return TracedRequest([*self._done, *under_way][: self._request.num_valid], list(self._steps))

    def begin(self, drafted: DraftTree, nodes: list[int], sources: list[str]) -> None:
        """A step has drafted a tree, of which these nodes make up the one that is verified."""
        self._drafted, self._nodes, self._sources = drafted, nodes, sources

    def end(self) -> None:
        """The path of the step under way has ended."""
        start, tree, path = len(self._done), self._drafted, self._request.path
        self._done += self._behind(path)
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

    def _behind(self, path: list[int]) -> list[str | None]:
        """Whose the tokens behind the steps that have ended are: accepted drafts, and the target's own."""
        accepted = [self._sources[self._nodes[node]] for node in path]
        return [*accepted, *[None] * (self._request.num_generated - len(self._done) - len(accepted))]
