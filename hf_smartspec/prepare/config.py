"""What `assistant=` may be, and the options that go with it."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from threading import Lock
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from transformers import PreTrainedModel
from transformers.generation import CandidateGenerator

from ..candidates import (
    Datastore,
    DatastoreCandidates,
    DraftModelCandidates,
    FusedCandidates,
    PromptLookupCandidates,
    SuffixTreeCandidates,
    TreeCandidateGenerator,
    WrappedCandidates,
)
from ..candidates.base import NoCandidates
from ..candidates.fused.source import AcceptedLengths
from ..candidates.tuned import TunedSource, TunedSources
from ..decoding.verify import METHODS
from ..goodput.acceptance import Calibrator
from ..goodput.policy import FixedLength, LengthPolicy
from ..validate import is_integer

PRESETS = {"prompt_lookup": PromptLookupCandidates, "none": NoCandidates}
_DATASTORE = "datastore:"
_TUNED = "tuned:"

# The suffix trees of every model, which remember its outputs from one call to the next.
_suffix_trees: WeakKeyDictionary[PreTrainedModel, SuffixTreeCandidates] = WeakKeyDictionary()
# The same with tuned options, by file, and these options.
_tuned_trees: WeakKeyDictionary[PreTrainedModel, dict[str, tuple[dict[str, Any], SuffixTreeCandidates]]] = (
    WeakKeyDictionary()
)
_calibrators: WeakKeyDictionary[PreTrainedModel, Calibrator] = WeakKeyDictionary()  # of fused sources
# What fused sources know of their draft models, by target and draft model.
_accepted: WeakKeyDictionary[PreTrainedModel, WeakKeyDictionary[PreTrainedModel, AcceptedLengths]] = WeakKeyDictionary()
_lock = Lock()


@dataclass(frozen=True)
class SmartSpecConfig:
    """
    Options of speculative decoding, passed as `assistant=`.

    Args:
        assistant: A preset name ("auto", "suffix", "prompt_lookup", "datastore:PATH", "tuned:PATH", "none"), a draft
            model, a candidate source, or a list of these, which are fused. "tuned:PATH" is what `smartspec tune` found;
            its suffix trees are the model's own for this file.
        num_nodes (`int`, *optional*): Draft nodes per row at every step. Where not given, a `GoodputAuction` decides at
            every step how many of those that the source drafts by default are worth it.
        width (`int`, *optional*): For draft models: 1 drafts chains, more drafts trees. Where not given, chains, and
            where goodput decides, trees where these pay (see `DraftModelCandidates`).
        verification (`str`): "coupled" (the same tokens for the same seed, whatever is drafted) or "rejection" (the
            same distribution; draft models only).
        policy (`LengthPolicy`, *optional*): Decides how much to speculate, in place of both.
        namespace (`str`): For suffix trees: whose outputs are drafted from and joined. Tenants that must not see one
            another's text in drafts get different ones.
        reads (sequence of `str`): For suffix trees: up to two further namespaces that are drafted from.
        references (sequence of sequences of `int`): For suffix trees and prompt lookup: token ids of texts that the
            answers are likely to repeat (a file to be edited, a predicted output, retrieved passages). They feed this
            call only.
    """

    assistant: Any = "prompt_lookup"
    num_nodes: int | None = None
    width: int | None = None
    verification: str = "coupled"
    policy: LengthPolicy | None = None
    namespace: str = ""
    reads: Sequence[str] = ()
    references: Sequence[Any] = ()

    def __post_init__(self) -> None:
        if self.verification not in METHODS:
            raise ValueError(f"`verification` must be one of {sorted(METHODS)}, got {self.verification!r}.")
        if self.num_nodes is not None and (not is_integer(self.num_nodes) or self.num_nodes < 0):
            raise ValueError(f"`num_nodes` must be an integer of at least 0 or None, got {self.num_nodes!r}.")
        if self.width is not None and (not is_integer(self.width) or self.width < 1):
            raise ValueError(f"`width` must be a positive integer, got {self.width!r}.")
        if self.policy is not None and not isinstance(self.policy, LengthPolicy):
            raise TypeError(f"`policy` must be a LengthPolicy, got {type(self.policy).__name__}.")
        if self.num_nodes is not None and self.policy is not None:
            raise ValueError("`num_nodes` and `policy` both say how much to draft: pass one of them.")
        is_source = isinstance(self.assistant, str | CandidateGenerator)
        if (self.width or 1) > 1 and (is_source or self.verification == "rejection"):
            raise ValueError(
                f"`width={self.width}` has an effect on draft models verified by 'coupled' only. Leave it out, or give "
                "it to the source itself."
            )
        if not isinstance(self.namespace, str) or isinstance(self.reads, str) or len(self.reads) > 2:
            raise ValueError(
                f"`namespace` must be a string and `reads` a list of at most two, got {self.namespace!r} and "
                f"{self.reads!r}."
            )
        for text in self.references:
            if isinstance(text, str) or not all(is_integer(token) and token >= 0 for token in text):
                raise TypeError("`references` must be lists of token ids: pass `tokenizer(text).input_ids`.")
        if isinstance(self.assistant, SmartSpecConfig):
            raise TypeError("`assistant` of a SmartSpecConfig must not be a SmartSpecConfig itself.")

    def source_for(self, target: PreTrainedModel) -> TreeCandidateGenerator:
        """
        The candidate source that drafts for `target`.

        Raises:
            ValueError: for an unknown preset, or a draft model with another vocabulary.
            TypeError: for anything that cannot draft.
        """
        source = _as_source(self, target)
        if self.verification == "rejection" and not getattr(source, "samples", False):
            raise ValueError(
                "`verification='rejection'` needs the draft's distributions, which only draft models have: pass a "
                "draft model, or use the default `verification='coupled'`."
            )
        return source

    @property
    def assignment(self) -> dict[str, Any]:
        """Arguments of `TreeCandidateGenerator.assign`; empty where nothing was asked for."""
        if not (self.namespace or self.reads or self.references):
            return {}
        references = [np.array(text, np.int64) for text in self.references]
        return {"namespace": self.namespace, "reads": tuple(self.reads), "references": references}

    def max_nodes_for(self, source: TreeCandidateGenerator) -> int:
        """Draft nodes per row and step, at most."""
        if isinstance(self.policy, FixedLength):
            return self.policy.num_nodes
        if self.num_nodes is not None:
            return self.num_nodes
        policy = self.policy or self.policy_for(source)
        sets_prices = policy is None or type(policy).level_price is not LengthPolicy.level_price
        return source.most_nodes if sets_prices else source.default_num_nodes

    def policy_for(self, source: TreeCandidateGenerator) -> LengthPolicy | None:
        """The policy that was asked for, by itself or by a number of nodes; None where goodput is to decide."""
        if self.policy is not None:
            return self.policy
        if self.num_nodes is None and source.default_num_nodes > 0 and self.verification == "coupled":
            return None
        return self.fixed_policy_for(source)

    def fixed_policy_for(self, source: TreeCandidateGenerator) -> FixedLength:
        return FixedLength(source.default_num_nodes if self.num_nodes is None else self.num_nodes)


def _as_source(config: SmartSpecConfig, target: PreTrainedModel) -> TreeCandidateGenerator:
    assistant = config.assistant
    if _is_tuned(assistant):
        return _fused(replace(config, assistant=[assistant]), target)
    if isinstance(assistant, str):
        assistant = _preset(assistant, target)
    if isinstance(assistant, SuffixTreeCandidates):
        assistant.warm_up()  # not in the middle of decoding; compiles once per installation
    if isinstance(assistant, DatastoreCandidates):
        check_datastore(assistant.datastore, target)
    if hasattr(assistant, "get_base_model"):  # PEFT's wrapper of a draft: the adapter lies in the model inside
        assistant = assistant.get_base_model()
    if isinstance(assistant, PreTrainedModel):
        check_draft_model(assistant, target)
        samples = config.verification == "rejection"
        return DraftModelCandidates(assistant, width=1 if samples else config.width, samples=samples)
    if isinstance(assistant, TreeCandidateGenerator):
        if isinstance(assistant, DraftModelCandidates):
            check_draft_model(assistant.model, target)
        return assistant
    if isinstance(assistant, CandidateGenerator):
        return WrappedCandidates(assistant, target.device)
    if isinstance(assistant, list | tuple):
        return _fused(config, target)
    raise TypeError(
        f"`assistant` must be a preset name {sorted(PRESETS)}, a draft PreTrainedModel, a candidate generator or a "
        f"SmartSpecConfig, got {type(assistant).__name__}."
    )


def _fused(config: SmartSpecConfig, target: PreTrainedModel) -> TreeCandidateGenerator:
    """A list of assistants as one source; a draft model among them speaks where the others have little to say."""
    items, discounts, options = _expanded(config.assistant, target)
    if not items:
        raise ValueError("`assistant` must name at least one source, got an empty list.")
    widths = [None if isinstance(item, str | CandidateGenerator) else config.width for item in items]  # of draft models
    sources = [
        _as_source(replace(config, assistant=item, width=width, references=()), target)
        for item, width in zip(items, widths)
    ]
    if len(sources) == 1:
        return sources[0]
    drafters = [source for source in sources if isinstance(source, DraftModelCandidates)]
    if len(drafters) > 1:
        raise ValueError(f"A list of assistants may hold one draft model, got {len(drafters)}.")
    others = [index for index, source in enumerate(sources) if source not in drafters]
    if not drafters:
        options.pop("threshold", None)
    with _lock:
        calibrator = _calibrators.setdefault(target, Calibrator())
        known = _accepted.setdefault(target, WeakKeyDictionary())
        accepted = known.setdefault(drafters[0].model, AcceptedLengths()) if drafters else None
    return FusedCandidates(
        [sources[index] for index in others],
        [discounts[index] for index in others],
        drafter=drafters[0] if drafters else None,
        calibrator=calibrator if options.pop("calibrated", True) else None,
        vocab_size=target.config.get_text_config(decoder=True).vocab_size,
        accepted=accepted,
        **options,
    )


def _expanded(
    assistants: Sequence[Any], target: PreTrainedModel
) -> tuple[list[Any], list[float | Sequence[float]], dict[str, Any]]:
    """The list with the sources of tuned files in their place, the sources' discounts, and how to fuse them."""
    items: list[Any] = []
    discounts: list[float | Sequence[float]] = []
    options: dict[str, Any] = {}
    for item in assistants:
        if not _is_tuned(item):
            items.append(item)
            discounts.append(1.0)
            continue
        path = item.removeprefix(_TUNED)
        tuned = TunedSources.load(path)
        try:
            items += [_tuned_source(source, path, target) for source in tuned.sources]
        except (TypeError, ValueError) as error:
            raise ValueError(f"{path} does not fit: {error} Tune anew.") from error
        options = dict(tuned.fused)
        discounts += options.pop("discounts", [1.0] * len(tuned.sources))
    return items, discounts, options


def _is_tuned(assistant: Any) -> bool:
    return isinstance(assistant, str) and assistant.startswith(_TUNED)


def _tuned_source(source: TunedSource, path: str, target: PreTrainedModel) -> TreeCandidateGenerator:
    options = dict(source.options)
    if source.name == "datastore" and "datastore" in options:
        return _datastore(options.pop("datastore"), **options)
    if source.name != "suffix":
        return source.build()
    with _lock:
        known = _tuned_trees.setdefault(target, {})
        path = os.path.realpath(path)
        if path not in known or known[path][0] != options:
            known[path] = options, SuffixTreeCandidates(**options)
        return known[path][1]


def _preset(name: str, target: PreTrainedModel) -> TreeCandidateGenerator:
    if name in ("auto", "suffix"):
        return suffix_trees(target)
    if name.startswith(_DATASTORE):
        return _datastore(name.removeprefix(_DATASTORE))
    if name not in PRESETS:
        known = sorted([*PRESETS, "auto", "suffix", _DATASTORE + "PATH", _TUNED + "PATH"])
        raise ValueError(f"Unknown `assistant` preset {name!r}; known are {known}.")
    return PRESETS[name]()


def suffix_trees(model: PreTrainedModel) -> SuffixTreeCandidates:
    """
    The suffix trees behind `assistant="auto"` and `"suffix"`: one object per model, which keeps the outputs of all
    calls within its bound on memory. `suffix_trees(model).remove_namespace("")` forgets them.
    """
    with _lock:
        if model not in _suffix_trees:
            _suffix_trees[model] = SuffixTreeCandidates()
        return _suffix_trees[model]


def _datastore(path: str, **options: Any) -> DatastoreCandidates:
    modified = os.stat(path).st_mtime_ns if os.path.exists(path) else 0
    return DatastoreCandidates(_opened_datastore(path, modified), **options)


@lru_cache(maxsize=4)
def _opened_datastore(path: str, modified: int) -> Datastore:
    """The file, opened and checked once as long as it stays as it is."""
    return Datastore.open(path)


def check_datastore(datastore: Datastore, target: PreTrainedModel) -> None:
    """Raises `ValueError` if the datastore holds tokens that the target does not know."""
    vocab_size = target.config.get_text_config(decoder=True).vocab_size
    if datastore.vocab_size > vocab_size:
        raise ValueError(
            f"The datastore has a vocabulary of {datastore.vocab_size} tokens and the target one of {vocab_size}: "
            "build one with the target's tokenizer."
        )


def check_draft_model(draft: PreTrainedModel, target: PreTrainedModel) -> None:
    """Raises `ValueError` unless the draft model can draft for the target."""
    from ..target.support import can_pack

    sizes = [model.config.get_text_config(decoder=True).vocab_size for model in (draft, target)]
    if sizes[0] != sizes[1]:
        raise ValueError(
            f"The draft model has a vocabulary of {sizes[0]} tokens and the target one of {sizes[1]}: draft and "
            "target must have one tokenizer, and embeddings of one size. Use another draft, or "
            "`assistant='prompt_lookup'`, which needs none."
        )
    if draft.config.is_encoder_decoder or not can_pack(draft):
        raise ValueError(
            f"{type(draft).__name__} cannot draft for batches: it does not follow transformers' attention interface. "
            "Use a draft of another architecture, or `assistant='prompt_lookup'`."
        )
