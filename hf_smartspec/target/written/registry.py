"""Which models have a written-out decoder: recognised on first use, tried out against their own forward, watched."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from threading import RLock
from weakref import WeakKeyDictionary

from transformers import PreTrainedModel

from ...log import get_logger
from ..packed import PackedForward
from .decoder import WrittenDecoder
from .plan import UnknownStructureError, make_plan
from .trial import agrees
from .watch import Watch

logger = get_logger(__name__)

_SWITCH = "HF_SMARTSPEC_WRITTEN"

_known: WeakKeyDictionary[PreTrainedModel, tuple[WrittenDecoder, Watch] | tuple[None, tuple]] = WeakKeyDictionary()
_lock = RLock()
_is_on: ContextVar[bool] = ContextVar("smartspec_written", default=os.environ.get(_SWITCH, "1") != "0")


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
    return PackedForward(model, num_rows, capacity, prefill_chunk, partial(written_decoder, model))


def written_decoder(model: PreTrainedModel) -> WrittenDecoder | None:
    """
    The model's decoder, written out. None where the model's own forward must run: its structure is not known, the two
    differ, somebody has hooked or replaced a module, or `HF_SMARTSPEC_WRITTEN=0` is set in the environment.
    """
    if not _is_on.get():
        return None
    decoder, watch = _known.get(model, (None, None))
    if decoder is not None and isinstance(watch, Watch):
        if not watch.is_bypassable():
            return None
        if watch.is_unchanged():
            return decoder
    elif watch == _setting(model):
        return None
    with _lock:
        return _recognise(model)


def _recognise(model: PreTrainedModel) -> WrittenDecoder | None:
    try:
        plan, bypassed = make_plan(model)
        decoder, watch = WrittenDecoder(plan), Watch(model, bypassed, plan.has_dropout)
        if not watch.is_bypassable():
            return None  # now; it may be another time
        if agrees(model, decoder):
            _known[model] = decoder, watch
            return decoder
        reason = "its results differ"
    except Exception as error:  # whatever is unusual in a foreign model, its own forward knows
        reason = str(error) or type(error).__name__
        if not isinstance(error, UnknownStructureError):
            logger.debug(f"Writing out {type(model).__name__} failed.", exc_info=True)
    logger.debug(f"{type(model).__name__} is run by its own forward: {reason}.")
    _known[model] = None, _setting(model)
    return None


def _setting(model: PreTrainedModel) -> tuple:
    """What may make another attempt worth while."""
    return model.dtype, model.device, sum(1 for _ in model.modules())
