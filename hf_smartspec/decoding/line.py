"""The sources that draft for a request, in line, and what they need to be told."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from ..candidates.base import TreeCandidateGenerator
from ..candidates.committed import HIDDEN_STATES, SCORES
from ..goodput.policy import DraftCost
from .learning import GuardedRecorders, Recorder


@dataclass(frozen=True, eq=False)
class SourceLine:
    """
    Args:
        sources (tuple of `TreeCandidateGenerator`): In the order in which they are asked.
        costs (tuple of `DraftCost`): Theirs.
        watching (tuple of pairs): Position and source of those that see tokens alone.
        hidden_layers (frozenset of `int`), needs_scores, needs_more (`bool`): What they need beside tokens.
        num_likeliest (`int`): See `TreeCandidateGenerator`.
        recorders (`GuardedRecorders`): What learns from the request.
    """

    sources: tuple[TreeCandidateGenerator, ...]
    costs: tuple[DraftCost, ...]
    watching: tuple[tuple[int, TreeCandidateGenerator], ...]
    hidden_layers: frozenset[int]
    needs_scores: bool
    needs_more: bool
    num_likeliest: int
    recorders: GuardedRecorders

    @classmethod
    def of(cls, sources: Sequence[TreeCandidateGenerator], recorders: Sequence[Recorder] = ()) -> "SourceLine":
        looking: list[TreeCandidateGenerator | Recorder] = [item for item in sources if HIDDEN_STATES in item.needs]
        looking += recorders
        return cls(
            sources=tuple(sources),
            costs=_shared(tuple(map(draft_cost, sources))),
            watching=tuple(item for item in enumerate(sources) if not item[1].needs),
            hidden_layers=frozenset(layer for source in looking for layer in source.hidden_layers),
            needs_scores=any(SCORES in source.needs for source in sources),
            needs_more=any(source.needs for source in sources) or bool(recorders),
            num_likeliest=max(source.num_likeliest for source in sources),
            recorders=GuardedRecorders(recorders),
        )

    @cached_property
    def drafter(self) -> str | None:
        """The name of the autoregressive source that drafts all by itself, if one does."""
        return self.costs[0].source if len(self.costs) == 1 and self.costs[0].is_autoregressive else None


@lru_cache(maxsize=64)
def _shared(costs: tuple[DraftCost, ...]) -> tuple[DraftCost, ...]:
    """Equal costs as one object, mostly: that rows of several calls draft alike is then seen at a glance."""
    return costs


def draft_cost(source: TreeCandidateGenerator) -> DraftCost:
    """What is known of a source beforehand: seconds are measured as they come."""
    return DraftCost(
        is_autoregressive=source.is_autoregressive,
        width=source.width,
        source=source.name,
        heeds_prices=source.heeds_prices,
        follows_target=source.follows_target,
        is_learned=source.is_learned,
    )
