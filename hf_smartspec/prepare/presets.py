"""Presets: names that `assistant=` may have, and the sources that they stand for."""

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, TypeVar

from transformers import PreTrainedModel
from transformers.generation import CandidateGenerator

from ..candidates import (
    Datastore,
    DatastoreCandidates,
    PromptLookupCandidates,
    SSSDCandidates,
    SuffixTreeCandidates,
    TokenRecyclingCandidates,
    TreeCandidateGenerator,
)
from ..candidates.base import NoCandidates
from ..candidates.combined.tuned import TunedSource, TunedSources
from ..candidates.heads.mtp import MTP
from ..target_model.model_state import state_of
from .draft_models import load_drafter

SourceT = TypeVar("SourceT", bound=TreeCandidateGenerator)

DATASTORE, SSSD, TUNED = "datastore:", "sssd:", "tuned:"  # prefixes of a path
EARLY_EXIT = "early_exit:"  # prefix of a number of layers
# Sources that remember: one object per model serves all calls.
_REMEMBERING: dict[str, Callable[..., TreeCandidateGenerator]] = {
    "suffix_decoding": SuffixTreeCandidates.published,
    "token_recycling": TokenRecyclingCandidates,
}
PRESETS: dict[str, Callable[[], TreeCandidateGenerator]] = {
    "none": NoCandidates,
    "prompt_lookup": PromptLookupCandidates,
    "pld": PromptLookupCandidates.published,
    "sssd": SSSDCandidates,
}
PRESET_NAMES = [
    *("auto", "suffix", MTP, *PRESETS, *_REMEMBERING),
    *(f"{DATASTORE}PATH", f"{EARLY_EXIT}N", f"{SSSD}PATH", f"{TUNED}PATH"),
]


def is_preset(assistant: Any) -> bool:
    """Return whether `assistant` is the name of a source, and not of a drafter that has to be loaded."""
    if not isinstance(assistant, str) or assistant == MTP:
        return False
    return assistant in PRESET_NAMES or assistant.startswith((DATASTORE, SSSD, TUNED))


def is_source(assistant: Any) -> bool:
    """Return whether `assistant` is a source with its own options, and not a draft model."""
    return is_preset(assistant) or isinstance(assistant, CandidateGenerator)


def early_exit_layers(name: str) -> int:
    """
    Return the N of "early_exit:N".

    Raises:
        ValueError: if it is no number.
    """
    number = name.removeprefix(EARLY_EXIT)
    if not number.isdecimal():
        raise ValueError(f"`assistant={name!r}` must name a number of layers, such as '{EARLY_EXIT}4'.")
    return int(number)


def expand(
    assistants: Sequence[Any], target: PreTrainedModel
) -> tuple[list[Any], list[float | Sequence[float]], dict[str, Any]]:
    """Return the assistants, with each tuned file replaced by its sources, their discounts, and options of fusing."""
    items: list[Any] = []
    discounts: list[float | Sequence[float]] = []
    options: dict[str, Any] = {}
    for item in assistants:
        if not is_tuned(item):
            items.append(item)
            discounts.append(1.0)
            continue
        path = item.removeprefix(TUNED)
        tuned = TunedSources.load(path)
        try:
            items += [_tuned_source(source, path, target) for source in tuned.sources]
        except (TypeError, ValueError) as error:
            raise ValueError(f"{path} does not fit: {error} Tune anew.") from error
        options = dict(tuned.fused)
        discounts += options.pop("discounts", [1.0] * len(tuned.sources))
    return items, discounts, options


def is_tuned(assistant: Any) -> bool:
    """Return whether `assistant` names a file of tuned sources."""
    return isinstance(assistant, str) and assistant.startswith(TUNED)


def _tuned_source(source: TunedSource, path: str, target: PreTrainedModel) -> TreeCandidateGenerator:
    if source.name == "suffix":
        return _kept(target, os.path.realpath(path), SuffixTreeCandidates, **source.options)
    if datastore := source.options.get("datastore"):
        source = replace(source, options={**source.options, "datastore": _opened(datastore)})
    return source.build()


def find_named(name: str, target: PreTrainedModel) -> Any:
    """Return the source of a preset, or the drafter of the target that is loaded from a folder or hub id."""
    if name in ("auto", "suffix"):
        return suffix_trees(target)
    if name.startswith(DATASTORE):
        return DatastoreCandidates(_opened(name.removeprefix(DATASTORE)))
    if name.startswith(SSSD):
        return SSSDCandidates(_opened(name.removeprefix(SSSD)))
    if name in PRESETS:
        return PRESETS[name]()
    if name in _REMEMBERING:
        return _kept(target, name, _REMEMBERING[name])
    return load_drafter(os.path.expanduser(name), target)


def suffix_trees(model: PreTrainedModel) -> SuffixTreeCandidates:
    """
    Return the suffix trees of `assistant="auto"` and `"suffix"`: one object per model, which keeps the outputs of all
    calls within its bound on memory. `suffix_trees(model).remove_namespace("")` deletes these outputs.
    """
    return _kept(model, "", SuffixTreeCandidates)


def _kept(model: PreTrainedModel, name: str, make: Callable[..., SourceT], **options: Any) -> SourceT:
    """Return the source that a model keeps for a preset or the path of a tuned file; a new one for new options."""
    state = state_of(model)
    with state.lock:
        if name not in state.sources or state.sources[name][0] != options:
            state.sources[name] = options, make(**options)
        found: SourceT = state.sources[name][1]
        return found


def _opened(path: str) -> Datastore:
    return _opened_datastore(path, os.stat(path).st_mtime_ns if os.path.exists(path) else 0)


@lru_cache(maxsize=4)
def _opened_datastore(path: str, modified: int) -> Datastore:
    """Open and check the file, once until it is modified."""
    return Datastore.open(path)
