"""Drafters and other sources by name, for a target as it is or enlarged."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from transformers import PreTrainedModel

from ...candidates import (
    DraftModelCandidates,
    PromptLookupCandidates,
    SSSDCandidates,
    StagedCandidates,
    SuffixTreeCandidates,
    TokenRecyclingCandidates,
    TreeCandidateGenerator,
)
from ...candidates.base import NoCandidates
from ...candidates.committed import Committed
from ...candidates.forwarding import ForwardingSource
from ...candidates.heads.kinds import load, source_of
from ...candidates.heads.learned import LearnedDrafter
from ...drafts.tree import DraftTree
from ...goodput import Calibrator
from ...prepare.sources import resolve
from .arguments import usage_errors
from .baselines import PIACandidates
from .models import load_draft, name_of
from .names import is_model, parts_of, shown

_MODEL_FREE: dict[str, Callable[[], TreeCandidateGenerator]] = {
    "suffix": SuffixTreeCandidates,
    "suffix_decoding": SuffixTreeCandidates.published,
    "prompt_lookup": PromptLookupCandidates,
    "pld": PromptLookupCandidates.published,
    "sssd": SSSDCandidates,
    "token_recycling": TokenRecyclingCandidates,
}
_BASELINES = {"pia": PIACandidates}  # of comparisons alone: no presets of `assistant=`


class Drafter(NamedTuple):
    """A loaded drafter."""

    name: str
    assistant: Any  # passed as `assistant=`
    num_parameters: int  # parameters that it does not share with the target


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
        Return one drafter, or a list of drafters whose names are joined by plus signs; raises `UsageError` for an
        unknown name, or a drafter of another target.
        """
        items = parts_of(name)
        assistants = [self._assistant(item) for item in items]
        assistant = assistants if len(items) > 1 else assistants[0]
        with usage_errors(self._option):
            resolve(assistant, self.larger or self.target)
        shared = {item.data_ptr() for item in self.target.parameters()}
        models = [self._known[item] for item in items if item in self._known]
        own = [item for model in models for item in model.parameters() if item.data_ptr() not in shared]
        return Drafter(shown(name), assistant, sum(item.numel() for item in own))

    def new_source(self, name: str) -> TreeCandidateGenerator:
        """Return the drafter as a new source, without anything learnt."""
        sources = [self._source(item) for item in parts_of(name)]
        return resolve(sources, self.larger or self.target).source if len(sources) > 1 else sources[0]

    def _assistant(self, item: str) -> Any:
        if item in _BASELINES:
            return _BASELINES[item]()
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
            with usage_errors(self._option):
                drafter = load(item, self.target)
            dtype = name_of(self.target.dtype)
            self._known[item] = load_draft(item, self.target, dtype) if drafter is None else drafter
        return self._known[item]


def load_drafters(names: Sequence[str], files: DrafterFiles) -> list[Drafter]:
    return [files.named(name) for name in dict.fromkeys(names)]


class NarrowedCandidates(ForwardingSource):
    """
    A source of a small target that drafts for the enlarged one: it gets the first `size` numbers of each hidden state,
    which are the small target's (`cost_matched.enlarge` adds zeros after them).

    Args:
        source (`TreeCandidateGenerator`): The source of the small target.
        size (`int`): The small target's hidden size.
    """

    def __init__(self, source: TreeCandidateGenerator, size: int):
        super().__init__(source)
        self.size = size

    def observe(self, request_id: Hashable, tokens: np.ndarray | Committed) -> None:
        assert isinstance(tokens, Committed), "the source needs hidden states"
        states = {layer: item[:, : self.size] for layer, item in tokens.hidden_states.items()}
        super().observe(request_id, replace(tokens, hidden_states=states))


def new_source(
    name: str, target: PreTrainedModel, drafter: TreeCandidateGenerator | None, wrong_token: int
) -> TreeCandidateGenerator:
    """
    Return a new source, without anything learnt.

    Args:
        name (`str`): One of `SOURCES`: "auto" is the source of `assistant="auto"`, "hybrid" suffix trees and the draft
            model as a list, "wrong" a source whose drafts are never accepted.
        target (`PreTrainedModel`): The target.
        drafter (`TreeCandidateGenerator`, *optional*): The source of "draft", and a part of "hybrid".
        wrong_token (`int`): A token that the target will not pick, for "wrong".
    """
    if name == "wrong":
        return WrongCandidates(wrong_token)
    if name in _MODEL_FREE:
        return _MODEL_FREE[name]()
    if name == "auto":
        source = resolve("auto", target).source
        if isinstance(source, SuffixTreeCandidates):  # one object for all calls of the model
            source.remove_namespace("")
        return source
    assert drafter is not None, "asked for where there is a draft only"
    if name == "draft":
        return drafter
    vocab_size = target.config.get_text_config(decoder=True).vocab_size
    return StagedCandidates([SuffixTreeCandidates(), drafter], vocab_size=vocab_size)


class WrongCandidates(NoCandidates):
    """Source that always drafts `token`, which the target never picks, with high probability: policies' worst case."""

    default_num_nodes = 8

    def __init__(self, token: int):
        self._chain = DraftTree.chain([token] * self.default_num_nodes, [0.9] * self.default_num_nodes)

    def propose(self, request_ids: Sequence[Hashable], max_nodes: Sequence[int]) -> list[DraftTree]:
        return [self._chain.most_likely(limit) for limit in max_nodes]
