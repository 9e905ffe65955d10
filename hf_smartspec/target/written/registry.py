"""Which models have a written-out decoder: recognised on first use, tried out against their own forward, watched."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from threading import RLock

from transformers import PreTrainedModel

from ...log import get_logger
from ..packed import PackedForward
from .decoder import WrittenDecoder
from .plan import UnknownStructureError, make_plan
from .trial import agrees
from .watch import Watch

logger = get_logger(__name__)

_SWITCH = "HF_SMARTSPEC_WRITTEN"

_ENTRY = "_smartspec_written"  # of a model's attributes: what refers to a model may not outlive it
_lock = RLock()
_is_on: ContextVar[bool] = ContextVar("smartspec_written", default=os.environ.get(_SWITCH, "1") != "0")


class _Entry:
    """What is known of one model; its copies begin without."""

    def __init__(self, decoder: WrittenDecoder | None, watch: Watch | None, setting: tuple):
        self.decoder, self.watch, self.setting = decoder, watch, setting

    def __deepcopy__(self, memo: dict) -> None:
        return None

    def __reduce__(self) -> tuple:
        return type(None), ()


@contextmanager
def written_decoders(is_on: bool) -> Iterator[None]:
    """Within the context, this thread's forwards use written-out decoders, or the models' own forwards."""
    token = _is_on.set(is_on)
    try:
        yield
    finally:
        _is_on.reset(token)


def packed_forward(
    model: PreTrainedModel, num_rows: int = 1, capacity: int = 256, prefill_chunk: int = 512
) -> PackedForward:
    """A packed forward that computes with the model's written-out decoder wherever there is one."""
    written_decoder(model, thoroughly=True)
    return PackedForward(model, num_rows, capacity, prefill_chunk, partial(written_decoder, model))


def written_decoder(model: PreTrainedModel, thoroughly: bool = False) -> WrittenDecoder | None:
    """
    The model's decoder, written out. None where the model's own forward must run: its structure is not known, the two
    differ, somebody has hooked or replaced a module, or `HF_SMARTSPEC_WRITTEN=0` is set in the environment.

    Args:
        thoroughly (`bool`): Looks for changes that hardly ever happen, too.
    """
    if not _is_on.get():
        return None
    entry = model.__dict__.get(_ENTRY)
    if entry is not None and entry.watch is not None:
        if not entry.watch.is_bypassable():
            return None
        if entry.watch.is_unchanged(thoroughly):
            return entry.decoder
    elif entry is not None and entry.setting == _setting(model):
        return None
    with _lock:
        return _recognise(model)


def _recognise(model: PreTrainedModel) -> WrittenDecoder | None:
    model.__dict__.pop(_ENTRY, None)
    if any(module.training for module in model.modules()):
        return None  # trials would interfere; another time
    if any(parameter.is_inference() for parameter in model.parameters()):
        return None  # weights made in inference mode cannot be laid side by side
    try:
        plan, bypassed = make_plan(model)
        decoder, watch = WrittenDecoder(plan), Watch(model, bypassed)
        if not watch.is_bypassable():
            return None  # now; it may be another time
        if agrees(model, decoder):
            # Trials may have left something behind: what the watch compares with is how it is now.
            model.__dict__[_ENTRY] = _Entry(decoder, Watch(model, bypassed), _setting(model))
            return decoder
        reason = "its results differ"
    except Exception as error:  # whatever is unusual in a foreign model, its own forward knows
        reason = str(error) or type(error).__name__
        if not isinstance(error, UnknownStructureError):
            logger.debug(f"Writing out {type(model).__name__} failed.", exc_info=True)
    logger.debug(f"{type(model).__name__} is run by its own forward: {reason}.")
    model.__dict__[_ENTRY] = _Entry(None, None, _setting(model))
    return None


def _setting(model: PreTrainedModel) -> tuple:
    """What may make another attempt worth while."""
    return model.dtype, model.device, sum(1 for _ in model.modules())
