"""Drafters by name, for a target as it is or enlarged."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import nn
from transformers import PreTrainedModel

from ...candidates import DraftModelCandidates, PromptLookupCandidates, SuffixTreeCandidates, TreeCandidateGenerator
from ...candidates.heads.kinds import load, source_of
from ...candidates.heads.learned import LearnedDrafter
from ...goodput import Calibrator
from ...prepare.sources import resolve
from .arguments import UsageError
from .models import load_draft, name_of
from .names import is_model, parts_of, shown
from .narrowed import NarrowedCandidates

_MODEL_FREE = {"suffix": SuffixTreeCandidates, "prompt_lookup": PromptLookupCandidates}


class Drafter(NamedTuple):
    """
    A loaded drafter.

    Args:
        name (`str`): Name in tables.
        assistant: Passed as `assistant=`.
        num_parameters (`int`): Parameters that it does not share with the target.
    """

    name: str
    assistant: Any
    num_parameters: int


class DrafterFiles:
    """
    Drafters of a target; each folder or hub id is loaded once.

    Args:
        target (`PreTrainedModel`): The target that learned drafters were trained for.
        larger (`PreTrainedModel`, *optional*): The target enlarged, where they are to draft for that.
        option (`str`): Option of the command, for error messages.
    """

    def __init__(self, target: PreTrainedModel, larger: PreTrainedModel | None = None, option: str = "--drafters"):
        self.target, self.larger, self._option = target, larger, option
        self._known: dict[str, PreTrainedModel | LearnedDrafter] = {}

    def named(self, name: str) -> Drafter:
        """
        Return one drafter, or a list of drafters whose names are joined by plus signs.

        Raises:
            UsageError: for an unknown name, or a drafter of another target.
        """
        items = parts_of(name)
        assistants = [self._assistant(item) for item in items]
        assistant = assistants if len(items) > 1 else assistants[0]
        try:
            resolve(assistant, self.larger or self.target)
        except (TypeError, ValueError, OSError) as error:
            raise UsageError(f"{self._option}: {error}") from error
        return Drafter(shown(name), assistant, sum(_num_own(self._known.get(item), self.target) for item in items))

    def new_source(self, name: str) -> TreeCandidateGenerator:
        """Return the drafter as a new source, without anything learnt."""
        sources = [self._source(item) for item in parts_of(name)]
        return resolve(sources, self.larger or self.target).source if len(sources) > 1 else sources[0]

    def _assistant(self, item: str) -> Any:
        if not is_model(item):
            return item
        drafter = self.loaded(item)
        is_narrowed = isinstance(drafter, LearnedDrafter) and self.larger is not None
        return self._source(item) if is_narrowed else drafter

    def _source(self, item: str) -> TreeCandidateGenerator:
        if item in _MODEL_FREE:
            return _MODEL_FREE[item]()
        drafter = self.loaded(item)
        if isinstance(drafter, PreTrainedModel):
            return DraftModelCandidates(drafter)
        source = source_of(drafter, Calibrator(), None)
        size = self.target.config.get_text_config(decoder=True).hidden_size
        return source if self.larger is None else NarrowedCandidates(source, size)

    def loaded(self, item: str) -> PreTrainedModel | LearnedDrafter:
        """Return the model or learned drafter of one folder or hub id."""
        if item not in self._known:
            try:
                drafter = load(item, self.target)
            except (ValueError, OSError) as error:
                raise UsageError(f"{self._option}: {error}") from error
            dtype = name_of(self.target.dtype)
            self._known[item] = load_draft(item, self.target, dtype) if drafter is None else drafter
        return self._known[item]


def load_drafters(names: Sequence[str], files: DrafterFiles) -> list[Drafter]:
    return [files.named(name) for name in dict.fromkeys(names)]


def _num_own(drafter: nn.Module | None, target: PreTrainedModel) -> int:
    """Return the number of parameters that are not the target's."""
    shared = {item.data_ptr() for item in target.parameters()}
    return sum(item.numel() for item in drafter.parameters() if item.data_ptr() not in shared) if drafter else 0
