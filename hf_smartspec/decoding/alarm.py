"""Warnings about drafters with wrong files, which only acceptance shows, since outputs stay right."""

from collections.abc import Sequence
from math import comb
from threading import Lock

import numpy as np
from transformers import PreTrainedModel

from ..drafts.tree import DraftTree
from ..log import get_logger
from ..sampling.processors import TokenPicker
from ..target_model.model_state import state_of

logger = get_logger(__name__)

_LEAST = 0.05  # the least share of drafts that begin with the right token, of a drafter that fits
_DOUBT = 0.05  # probability of reporting a drafter that just fits
_MOST_HITS = 12  # right first tokens after which a drafter is no longer watched ...
_MOST_DRAFTS = 500  # ... and drafts after which it is not either
_MOST_TEMPERATURE = 1.0


class AcceptanceAlarm:
    """
    Warns, once each, of a model's learned sources whose first drafts hardly ever begin with the right token. Deeper
    nodes are not judged, since they depend on those before them. Loops in several threads may share an alarm, so that
    short calls add up.
    """

    def __init__(self) -> None:
        self._counts: dict[str, tuple[int, int]] = {}  # numbers of drafts and of right first tokens
        self._settled: set[str] = set()  # names of sources that are watched no longer
        self._lock = Lock()

    def watches(self, source: str) -> bool:
        """Return whether the source of this name is still watched."""
        return source not in self._settled

    def observe(self, source: str, trees: Sequence[DraftTree], tokens: Sequence[np.ndarray]) -> None:
        """
        Count a source's drafts of one step, verified or not, and warn if too few begin with the right token.

        Args:
            source (`str`): Its name.
            trees (sequence of `DraftTree`), tokens (sequence of `np.ndarray`): The draft of each row and its committed
                tokens; rows without either do not count.
        """
        judged = [(tree, line[0]) for tree, line in zip(trees, tokens) if len(tree.tokens) and len(line)]
        hits = sum(bool((tree.tokens[tree.parents < 0] == token).any()) for tree, token in judged)
        with self._lock:
            if source in self._settled:
                return
            num_drafts, num_hits = self._counts.get(source, (0, 0))
            num_drafts, num_hits = num_drafts + len(judged), num_hits + hits
            self._counts[source] = num_drafts, num_hits
            is_bad = is_near_zero(num_drafts, num_hits)
            if is_bad or num_hits >= _MOST_HITS or num_drafts >= _MOST_DRAFTS:
                self._settled.add(source)
                del self._counts[source]
        if is_bad:
            logger.warning(
                f"{source} hardly ever drafts what comes: {num_hits} of its first {num_drafts} drafts began with the "
                "right token. Outputs are right, but drafting is wasted. Likely causes: its files are of another "
                "target or another tokenizer, its weights are damaged or untrained, or it reads other layers of the "
                "target than it was trained on."
            )


def alarm_of(model: PreTrainedModel) -> AcceptanceAlarm:
    """Return the alarm of a target, for all loops that run it."""
    state = state_of(model)
    with state.lock:
        if state.alarm is None:
            state.alarm = AcceptanceAlarm()
        return state.alarm


def is_near_zero(num_drafts: int, num_hits: int) -> bool:
    """
    Return whether so few hits are too unlikely (binomial, one-sided) for a source that drafts the right first token
    once in 20 times: none of 59, one of 93, two of 124.
    """
    if num_hits >= _LEAST * num_drafts:
        return False
    terms = (
        comb(num_drafts, hits) * _LEAST**hits * (1 - _LEAST) ** (num_drafts - hits) for hits in range(num_hits + 1)
    )
    return sum(terms) <= _DOUBT


def leaves_drafts_a_chance(picker: TokenPicker) -> bool:
    """
    Return whether good drafts are accepted under these processors: not at high temperatures, nor where processors of
    unknown kind may force tokens.
    """
    temperatures = [getattr(processor, "temperature", 0.0) for processor in picker.processors]
    return picker.is_known and all(value <= _MOST_TEMPERATURE for value in temperatures)
