"""Resolve `assistant=`: a name, a model or a list becomes the source that drafts."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from threading import Lock
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

from transformers import PreTrainedModel
from transformers.generation import CandidateGenerator

from ..candidates import (
    Datastore,
    DatastoreCandidates,
    DraftModelCandidates,
    EarlyExitCandidates,
    FusedCandidates,
    RoutedCandidates,
    StagedCandidates,
    SuffixTreeCandidates,
    TreeCandidateGenerator,
    WrappedCandidates,
)
from ..candidates.combined.base import CombinedCandidates
from ..candidates.heads.kinds import source_of
from ..candidates.heads.learned import LearnedDrafter
from ..candidates.models.draft_model import SharedVocabulary
from ..candidates.models.translated.source import TranslatedDraftCandidates
from ..candidates.models.translated.translation import Translation
from ..goodput import Calibrator
from ..jit import compile_ahead
from ..target_model.forward.ranks import is_sharded
from ..target_model.model_state import state_of
from ..target_model.private import warn_of_release
from .checks import check_assistant
from .config import SmartSpecConfig
from .draft_models import Tokenizers, check_draft_model
from .policies import named_policy
from .presets import EARLY_EXIT, early_exit_layers, expand, find_named, is_source, is_tuned

_NOT_OF_SOURCES: dict[str, Any] = {"width": None, "tokenizer": None, "assistant_tokenizer": None}


class Assistant(NamedTuple):
    """A resolved `assistant=`: its options, and the source that drafts."""

    config: SmartSpecConfig
    source: TreeCandidateGenerator


class Drafters:
    """Cache of drafter sources: requests with the same drafter share one source and its batched forwards."""

    def __init__(self) -> None:
        self._lock = Lock()
        # Keys hold ids of models, which are not reused while their sources live: a source holds its model, and is
        # freed with the last request that needs it.
        self._sources: WeakValueDictionary[tuple, TreeCandidateGenerator] = WeakValueDictionary()

    def __len__(self) -> int:
        return len(self._sources)

    def of_model(
        self,
        model: PreTrainedModel,
        width: int | None,
        samples: bool,
        vocabulary: SharedVocabulary | Translation | None,
    ) -> TreeCandidateGenerator:
        """Return the source of a draft model: see `DraftModelCandidates` and `TranslatedDraftCandidates`."""
        make: Callable[[], TreeCandidateGenerator]
        if isinstance(vocabulary, Translation):
            make = partial(TranslatedDraftCandidates, model, vocabulary, width=width, samples=samples)
        else:
            make = partial(DraftModelCandidates, model, width=width, samples=samples, vocabulary=vocabulary)
        return self._shared((id(model), width, samples, vocabulary), make)

    def of_layers(
        self, target: PreTrainedModel, num_layers: int, width: int | None, samples: bool
    ) -> TreeCandidateGenerator:
        """Return the source of the target's first layers: see `EarlyExitCandidates`."""
        make = partial(EarlyExitCandidates, target, num_layers, width=width, samples=samples)
        return self._shared((id(target), num_layers, width, samples, EARLY_EXIT), make)

    def of_learned(self, heads: LearnedDrafter, width: int | None, calibrator: Calibrator) -> TreeCandidateGenerator:
        return self._shared((id(heads), width), partial(source_of, heads, calibrator, width))

    def _shared(self, key: tuple, make: Callable[[], TreeCandidateGenerator]) -> TreeCandidateGenerator:
        with self._lock:
            source = self._sources.get(key)
            if source is None:
                source = self._sources[key] = make()
            return source


def resolve(assistant: Any, target: PreTrainedModel, drafters: Drafters | None = None) -> Assistant:
    """
    Return the options and the source that `assistant=` names for `target`.

    Args:
        assistant: As `SmartSpecConfig.assistant`, or a `SmartSpecConfig`.
        drafters (`Drafters`, *optional*): Sources shared by requests that run together; by default, none are shared.

    Raises:
        ValueError: for an unknown preset, a draft model with another vocabulary, or a table that was not measured.
        TypeError: for anything that cannot draft.
    """
    if isinstance(assistant, Assistant):
        return _with_tag_checked(assistant)
    warn_of_release()
    compile_ahead()
    config = assistant if isinstance(assistant, SmartSpecConfig) else SmartSpecConfig(assistant)
    check_assistant(config)
    source = _as_source(config, target, Drafters() if drafters is None else drafters)
    if config.online is not None:
        config.online.check(source, target)
    if is_sharded(target):
        _check_for_sharded(config, source)
    if config.verification == "rejection" and not getattr(source, "samples", False):
        raise ValueError(
            "`verification='rejection'` needs the draft's distributions, which only draft models have: pass a "
            "draft model, or use the default `verification='coupled'`."
        )
    if isinstance(config.policy, str):
        config = replace(config, policy=named_policy(config.policy, target, source))
    return _with_tag_checked(Assistant(config, source))


def _check_for_sharded(config: SmartSpecConfig, source: TreeCandidateGenerator) -> None:
    """Raise `ValueError` for sources that need all processes: the first process drafts for all of them alone."""
    if config.verification == "rejection":
        raise ValueError("`verification='rejection'` does not work with a target that several processes hold.")
    for stage in source.stages:
        if isinstance(getattr(stage, "heads", None), LearnedDrafter):
            raise ValueError(
                f"{stage.name} drafts with parts of the target, which several processes hold. Pass a draft model, or a "
                "source without a model."
            )
        if isinstance(draft := getattr(stage, "model", None), PreTrainedModel) and is_sharded(draft):
            raise ValueError("A draft model must be whole: load it without `tp_plan`, in every process.")


def tagged(assistant: Any, tag: str | None) -> Any:
    """Return `assistant`, resolved or not, with the tag set."""
    if tag is None:
        return assistant
    if isinstance(assistant, Assistant):
        return Assistant(replace(assistant.config, tag=tag), assistant.source)
    return replace(assistant if isinstance(assistant, SmartSpecConfig) else SmartSpecConfig(assistant), tag=tag)


def _with_tag_checked(assistant: Assistant) -> Assistant:
    if assistant.config.tag is not None and not any(isinstance(x, RoutedCandidates) for x in assistant.source.stages):
        raise ValueError(
            f"`tag={assistant.config.tag!r}` has an effect on `RoutedCandidates` only, and {assistant.source.name} "
            "drafts. Leave it out."
        )
    return assistant


def _as_source(config: SmartSpecConfig, target: PreTrainedModel, drafters: Drafters) -> TreeCandidateGenerator:
    assistant = config.assistant
    if is_tuned(assistant):
        return _fused(replace(config, assistant=[assistant]), target, drafters)
    samples = config.verification == "rejection"
    width = 1 if samples else config.width
    if isinstance(assistant, str) and assistant.startswith(EARLY_EXIT):
        return drafters.of_layers(target, early_exit_layers(assistant), width, samples)
    if isinstance(assistant, str):
        assistant = find_named(assistant, target)
    if isinstance(assistant, SuffixTreeCandidates):
        assistant.warm_up()  # compiles, once per installation: here rather than in the middle of decoding
    if hasattr(assistant, "get_base_model"):  # PEFT's wrapper: the model inside has the adapter's layers
        assistant = assistant.get_base_model()
    if isinstance(assistant, PreTrainedModel):
        tokenizers = Tokenizers(config.tokenizer, config.assistant_tokenizer)
        vocabulary = check_draft_model(assistant, target, tokenizers)
        return drafters.of_model(assistant, width, samples, vocabulary)
    if isinstance(assistant, LearnedDrafter):
        assistant.check_fit(target)
        return drafters.of_learned(assistant, config.width, state_of(target).calibrator)
    if isinstance(assistant, RoutedCandidates):
        _prepare_drafters(assistant, config, target, drafters)
        return assistant
    if isinstance(assistant, TreeCandidateGenerator):
        _fit(assistant, target)
        return assistant
    if isinstance(assistant, CandidateGenerator):
        num_layers = getattr(target.config.get_text_config(decoder=True), "num_hidden_layers", None)
        return WrappedCandidates(assistant, target.device, num_layers)
    return _fused(config, target, drafters)


def _fit(source: TreeCandidateGenerator, target: PreTrainedModel) -> None:
    """Prepare a source that the caller has made, and its members, for the target; raise if one does not fit."""
    for member in source.sources if isinstance(source, CombinedCandidates) else ():
        _fit(member, target)
    if isinstance(source, DatastoreCandidates):
        check_datastore(source.datastore, target)
    if isinstance(source, RoutedCandidates):
        _prepare_drafters(source, SmartSpecConfig(), target, Drafters())
    if isinstance(source, TranslatedDraftCandidates):
        source.translation.check_fit(target.config.get_text_config(decoder=True).vocab_size)
    elif isinstance(source, DraftModelCandidates):
        vocabulary = check_draft_model(source.model, target)
        if isinstance(vocabulary, Translation):
            raise ValueError(
                f"{source.name} drafts in its own tokens, and the target has another tokenizer. Pass the model itself, "
                "or `TranslatedDraftCandidates`."
            )
        source.serve(vocabulary)
    if isinstance(source, EarlyExitCandidates) and source.model is not target:
        raise ValueError(f"{source.name} drafts for the model that it was made with only: make one for this target.")
    if isinstance(heads := getattr(source, "heads", None), LearnedDrafter):
        heads.check_fit(target)


def _prepare_drafters(
    routed: RoutedCandidates, config: SmartSpecConfig, target: PreTrainedModel, drafters: Drafters
) -> None:
    """Turn each drafter into a source, with the options that are the same for all requests."""

    def make(item: Any) -> TreeCandidateGenerator:
        check_assistant(item)
        tokenizer = None if is_source(item) else config.tokenizer
        own = SmartSpecConfig(item, verification=config.verification, tokenizer=tokenizer)
        return _as_source(own, target, drafters)

    routed.prepare(target, config.verification == "rejection", make)


def _fused(config: SmartSpecConfig, target: PreTrainedModel, drafters: Drafters) -> TreeCandidateGenerator:
    """
    Return a list of assistants as one source: sources that do not run a forward per level are merged, draft models and
    sources that need hidden states become further stages, in their order.
    """
    items, discounts, options = expand(config.assistant, target)
    configs = [
        replace(config, assistant=item, references=(), tag=None, **(_NOT_OF_SOURCES if is_source(item) else {}))
        for item in items
    ]
    sources = [_as_source(item, target, drafters) for item in configs]
    stages = [(stage, discount) for source, discount in zip(sources, discounts) for stage in source.stages]
    _check_apart([stage for stage, _ in stages])
    cheap = [item for item in stages if not _is_costly(item[0])]
    line = [stage for stage, _ in cheap]
    threshold, is_calibrated = options.pop("threshold", None), options.pop("calibrated", True)
    vocab_size = target.config.get_text_config(decoder=True).vocab_size
    if len(cheap) > 1 or (options and cheap):
        calibrator = state_of(target).calibrator if is_calibrated else None
        line = [FusedCandidates(line, [item for _, item in cheap], calibrator, vocab_size=vocab_size, **options)]
    line += [stage for stage, _ in stages if _is_costly(stage)]
    replaces = isinstance(sources[0], SuffixTreeCandidates) and sources[0].is_published  # SuffixDecoding's hybrid
    return line[0] if len(line) == 1 else StagedCandidates(line, threshold, vocab_size, replaces)


def _check_apart(stages: Sequence[TreeCandidateGenerator]) -> None:
    """Raise `ValueError` if a drafter of a `RoutedCandidates` is in the list too, where it drafts for all requests."""
    for routed in stages:
        if isinstance(routed, RoutedCandidates):
            for name, source in zip(routed.drafters, routed.sources):
                if not set(source.stages).isdisjoint(stages):
                    raise ValueError(
                        f"The drafter {name!r} of {routed.name} stands in the list as well, where it drafts for every "
                        "request: leave it out of one of them."
                    )


def _is_costly(source: TreeCandidateGenerator) -> bool:
    # Acceptance is learnt for each routed drafter by itself: these are not merged with other sources.
    return source.is_autoregressive or bool(source.needs) or isinstance(source, RoutedCandidates)


def check_datastore(datastore: Datastore, target: PreTrainedModel) -> None:
    """Raise `ValueError` if the datastore's vocabulary is larger than the target's."""
    vocab_size = target.config.get_text_config(decoder=True).vocab_size
    if datastore.vocab_size > vocab_size:
        raise ValueError(
            f"The datastore has a vocabulary of {datastore.vocab_size} tokens and the target one of {vocab_size}: "
            "build one with the target's tokenizer."
        )
