"""The sources that draft for a request, in order, and the data that they need."""

from collections.abc import Sequence
from functools import cached_property, lru_cache

from ..candidates.base import TreeCandidateGenerator
from ..candidates.committed import HIDDEN_STATES, SCORES
from ..goodput.policy import DraftCost
from .learning import Recorder


class SourceChain:
    """
    Sources in the order in which they draft for a request.

    Args:
        sources (sequence of `TreeCandidateGenerator`): The sources.
        recorders (sequence of `Recorder`): Recorders that learn from the request.

    Attributes:
        costs (tuple of `DraftCost`): Costs of the sources.
        watching (tuple of pairs): Position and source of those that observe nothing but tokens.
        hidden_layers (frozenset of `int`), needs_scores, needs_logits, needs_more (`bool`): What the others, and
            recorders, need.
        num_likeliest (`int`): See `TreeCandidateGenerator`.
        shows_likeliest (`bool`): Whether some of those that need more than tokens use likely tokens.
        observes_every_step (`bool`): Whether some of them cannot wait until a source is asked.
    """

    def __init__(self, sources: Sequence[TreeCandidateGenerator], recorders: Sequence[Recorder] = ()):
        self.sources, self.recorders = tuple(sources), tuple(recorders)
        self.costs = _shared(tuple(map(draft_cost, sources)))
        self.watching = tuple(item for item in enumerate(sources) if not item[1].needs)
        layers = [item.hidden_layers for item in sources if HIDDEN_STATES in item.needs]
        layers += [recorder.hidden_layers for recorder in recorders]
        self.hidden_layers = frozenset[int]().union(*layers)
        self.needs_scores = any(SCORES in source.needs for source in sources)
        self.needs_logits = self.needs_scores or bool(recorders)
        self.needs_more = any(source.needs for source in sources) or bool(recorders)
        self.num_likeliest = max(source.num_likeliest for source in sources)
        self.shows_likeliest = any(source.needs and source.num_likeliest for source in sources)
        self.observes_every_step = self.needs_logits or any(source.observes_every_step for source in sources)

    @cached_property
    def drafter(self) -> str | None:
        """Name of the autoregressive source that drafts alone; None if there are several sources or none is such."""
        return self.costs[0].source if len(self.costs) == 1 and self.costs[0].is_autoregressive else None


@lru_cache(maxsize=64)
def _shared(costs: tuple[DraftCost, ...]) -> tuple[DraftCost, ...]:
    """Return one object for equal costs, mostly, so that rows that draft alike are found by identity."""
    return costs


def draft_cost(source: TreeCandidateGenerator) -> DraftCost:
    """Return the cost of a source, as far as it is known before it has drafted: without seconds."""
    return DraftCost(
        is_autoregressive=source.is_autoregressive,
        width=source.width,
        source=source.name,
        heeds_prices=source.heeds_prices,
        follows_target=source.follows_target,
        is_learned=source.is_learned,
    )
