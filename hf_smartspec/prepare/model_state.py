"""State of a model that is kept from one call to the next."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Lock
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSpeechSeq2Seq,
    PreTrainedModel,
)

from ..candidates import SuffixTreeCandidates
from ..candidates.heads.files import FLOATS, check_finite
from ..candidates.heads.kinds import load
from ..candidates.heads.learned import LearnedDrafter
from ..decoding.alarm import AcceptanceAlarm
from ..decoding.statistics import GenerationStatistics
from ..decoding.trace import TracedRequest
from ..goodput import Calibrator, CostModel, GoodputAuction
from ..log import get_logger

logger = get_logger(__name__)

Drafter = PreTrainedModel | LearnedDrafter
Found = TypeVar("Found")


class ModelState:
    """
    State shared by all calls on one model: suffix trees, calibrated acceptance of sources, loaded drafters, and the
    policies that decide how much to draft. Calls may come from several threads.
    """

    def __init__(self) -> None:
        self.calibrator = Calibrator()  # of fused sources
        self.alarm = AcceptanceAlarm()
        self.lock = Lock()
        self._loading = Lock()  # held while files are read, which takes long: calls without files do not wait for it
        self._trees: dict[str, tuple[dict[str, Any], SuffixTreeCandidates]] = {}  # with their options; "": the presets'
        self._warnings: set[str] = set()  # already logged
        self._drafters: dict[str, Drafter] = {}  # by folder or hub id
        self._idle: dict[str, list[GoodputAuction]] = {}  # policies that no call uses at present, by source
        self._vocabularies: WeakKeyDictionary[PreTrainedModel, tuple[tuple, Any]] = WeakKeyDictionary()

    def is_new(self, message: str) -> bool:
        """Return whether this is the first call with this message."""
        with self.lock:
            is_new = message not in self._warnings
            self._warnings.add(message)
            return is_new

    def suffix_trees(self, path: str = "", **options: Any) -> SuffixTreeCandidates:
        """Return the suffix trees of a tuned file, new ones if its options have changed; of the presets by default."""
        with self.lock:
            if path not in self._trees or self._trees[path][0] != options:
                self._trees[path] = options, SuffixTreeCandidates(**options)
            return self._trees[path][1]

    def drafter(self, name: str, target: PreTrainedModel) -> Drafter:
        """
        Return a draft model, or a learned drafter of the target, by its folder or hub id. It is loaded once, and again
        if the target's dtype or device changes.

        Raises:
            ValueError: if it cannot be loaded.
        """
        with self._loading:
            found = self._drafters.get(name)
            if found is None or (found.dtype, found.device) != (target.dtype, _device_of(found, target)):
                self._drafters[name] = found = _load(name, target)
            return found

    def vocabulary_of(self, draft: PreTrainedModel, key: tuple, find: Callable[[], Found]) -> Found:
        """Return the result of `find` for the draft model's vocabulary, found once per key (sizes and tokenizers)."""
        with self._loading:
            known = self._vocabularies.get(draft)
            if known is None or known[0] != key:
                self._vocabularies[draft] = known = key, find()
            return known[1]

    @contextmanager
    def policy(self, source: str, cost: CostModel) -> Iterator[GoodputAuction]:
        """
        Yield a policy for the source of this name, with its estimates from earlier calls. No other call uses it
        meanwhile, since a policy serves one loop at a time.
        """
        with self.lock:
            idle = self._idle.setdefault(source, [])
            idle[:] = (policy for policy in idle if policy.cost is cost)  # the model may have been moved or cast
            policy = idle.pop() if idle else GoodputAuction(cost)
        try:
            yield policy
        finally:
            with self.lock:
                idle.append(policy)


def _device_of(drafter: Drafter, target: PreTrainedModel) -> torch.device:
    """Return the drafter's device: of the target's head, which may differ from its first layers', if it is learned."""
    output: Any = target.get_output_embeddings() if isinstance(drafter, LearnedDrafter) else None
    return target.device if output is None else output.weight.device


def _load(name: str, target: PreTrainedModel) -> Drafter:
    if (learned := load(name, target)) is not None:
        return learned
    try:
        draft: Any = load_whole(_class_of(name, target), name, dtype=target.dtype)
    except Exception as error:  # many kinds: no such repository, no network, no weights, unreadable ones
        found = "is a folder, but holds" if os.path.isdir(name) else "is neither a preset nor a folder that exists, and"
        raise ValueError(f"`assistant={name!r}` {found} no draft model that can be loaded: {error}") from error
    return draft.to(target.device).eval()


def load_whole(kind: Any, name: str, **options: Any) -> PreTrainedModel:
    """
    Return `kind.from_pretrained(name, **options)`, a draft model, after a check of its weights. transformers
    initializes missing weights at random and loads NaN: hardly any draft of such a model is accepted.

    Raises:
        ValueError: if weights are missing that are not tied to others, or if one is NaN or infinite. Quantized weights
            and weights on the meta device are not checked.
    """
    draft, info = kind.from_pretrained(name, output_loading_info=True, **options)
    missing = sorted(info["missing_keys"])
    if missing:
        more = f" and {len(missing) - 3} others" if len(missing) > 3 else ""
        raise ValueError(
            f"its files lack weights of {type(draft).__name__}, which would be random: {', '.join(missing[:3])}{more}"
        )
    model: PreTrainedModel = draft
    for key, parameter in model.named_parameters():
        if type(parameter) is nn.Parameter and parameter.dtype in FLOATS and not parameter.is_meta:
            check_finite(key, parameter.detach())
    return model


def _class_of(name: str, target: PreTrainedModel) -> Any:
    """Return the auto class that loads a draft model, with an encoder if both the draft and the target have one."""
    if not target.config.is_encoder_decoder or not AutoConfig.from_pretrained(name).is_encoder_decoder:
        return AutoModelForCausalLM
    return AutoModelForSeq2SeqLM if target.main_input_name == "input_ids" else AutoModelForSpeechSeq2Seq


@dataclass
class ModelStatistics:
    """
    Statistics of speculation on a model: of the last call (`last`), and of all `num_calls` since it was enabled
    (`total`). `last_traces` has a `TracedRequest` for each row of the last call, if that drafted and was traced
    (`SmartSpecConfig(trace=True)`).
    """

    last: GenerationStatistics = field(default_factory=GenerationStatistics)
    total: GenerationStatistics = field(default_factory=GenerationStatistics)
    num_calls: int = 0
    last_traces: list[TracedRequest] | None = None


def record(model: PreTrainedModel, statistics: GenerationStatistics, traces: list[TracedRequest] | None = None) -> None:
    """Add a call to `model.smartspec_statistics`."""
    with state_of(model).lock:
        known = vars(model).setdefault("smartspec_statistics", ModelStatistics())
        known.last, known.total = statistics, known.total + statistics
        known.num_calls, known.last_traces = known.num_calls + 1, traces


def warn_once(model: PreTrainedModel, message: str) -> None:
    """Log a warning, once per model and message."""
    if state_of(model).is_new(message):
        logger.warning(message)


_states: WeakKeyDictionary[PreTrainedModel, ModelState] = WeakKeyDictionary()
_lock = Lock()


def state_of(model: PreTrainedModel) -> ModelState:
    """Return the model's state, which is freed with the model; copies of the model start with a new state."""
    with _lock:
        return _states.setdefault(model, ModelState())
