"""Which models have a written-out decoder: recognised on first use, tried out against their own forward, watched."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from threading import RLock

import torch
from torch import nn
from transformers import PreTrainedModel

from ...log import get_logger
from ..compat import is_checkpointing
from ..encoded import EncodedForward
from ..forward.packed import PackedForward
from ..forward.ranks import is_sharded
from .decoder import WrittenDecoder
from .plan import UnknownStructureError, make_plan
from .trial import check
from .watch import Watch

logger = get_logger(__name__)

_SWITCH = "HF_SMARTSPEC_WRITTEN"

_ENTRY = "_smartspec_written"  # of a model's attributes: what refers to a model may not outlive it
_lock = RLock()
_is_on: ContextVar[bool | None] = ContextVar("smartspec_written", default=None)  # None: as the environment says


class _Entry:
    """
    What is known of one model; its copies begin without.

    Args:
        model (`PreTrainedModel`): Is not kept.
        decoder (`WrittenDecoder`, *optional*): None where the model's own forward is to run, whatever happens to it.
        bypassed (sequence of `nn.Module`): The modules that the decoder bypasses.
        is_tried (`bool`): The decoder was found to agree. If not, it waits for an occasion to be tried out: nobody
            does anything in the model, and nothing is dropped or recomputed in training.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        decoder: WrittenDecoder | None = None,
        bypassed: Sequence[nn.Module] = (),
        is_tried: bool = False,
    ):
        self.decoder, self.is_tried = decoder, is_tried
        self.is_put_off = False  # the trial: to the next call of `generate`
        self.watch = None if decoder is None else Watch(model, bypassed)
        self.setting = _setting(model) if decoder is None else None

    def holds(self, model: PreTrainedModel, thoroughly: bool) -> bool:
        """Whether the model is still what was looked at."""
        if self.watch is not None:
            return self.watch.is_unchanged(thoroughly)
        return not thoroughly or self.setting == _setting(model)

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


def _is_switched_on() -> bool:
    is_on = _is_on.get()
    return os.environ.get(_SWITCH, "1") != "0" if is_on is None else is_on


def packed_forward(
    model: PreTrainedModel, num_rows: int = 1, capacity: int = 256, prefill_chunk: int = 512
) -> PackedForward:
    """
    A packed forward that computes with the model's written-out decoder wherever there is one; one that knows encoder
    outputs, for decoders that attend to such.
    """
    if model.config.is_encoder_decoder:
        return EncodedForward(model, num_rows, capacity, prefill_chunk)
    written_decoder(model, thoroughly=True)
    return PackedForward(model, num_rows, capacity, prefill_chunk, partial(written_decoder, model))


def written_decoder(model: PreTrainedModel, thoroughly: bool = False) -> WrittenDecoder | None:
    """
    The model's decoder, written out. None where the model's own forward must run: its structure is not known, the two
    differ, somebody has hooked or replaced a module, or `HF_SMARTSPEC_WRITTEN=0` is set in the environment.

    Args:
        thoroughly (`bool`): Looks for changes that hardly ever happen, too.
    """
    if not _is_switched_on() or is_sharded(model):  # parts of weights are multiplied as transformers has them
        return None
    entry = vars(model).get(_ENTRY)
    if entry is None or not entry.holds(model, thoroughly):
        with _lock:
            entry = vars(model).get(_ENTRY)  # another thread may have been faster
            if entry is None or not entry.holds(model, thoroughly):
                entry = vars(model)[_ENTRY] = _planned(model)
    if entry.watch is None:
        return None
    if entry.is_tried:
        return entry.decoder if entry.watch.is_bypassable(thoroughly) else None
    if model.training and is_checkpointing(model):
        return None  # its own forward would do without the cache
    if entry.is_put_off and not thoroughly:
        return None
    with _lock:  # a trial in another thread has hooks in the model until it ends
        known: _Entry | None = vars(model).get(_ENTRY)
        if known is not None and known is entry and entry.watch.is_bypassable(thoroughly):
            known = vars(model)[_ENTRY] = _tried(model, known)
    if known is None or known.watch is None or not known.is_tried:
        return None
    # Who waited for the trial may autocast, or somebody may have hooked the model meanwhile.
    return known.decoder if known.watch.is_bypassable(thoroughly) else None


def forget(model: PreTrainedModel) -> None:
    """Takes away what is remembered with a model. Weights that lie side by side stay so."""
    vars(model).pop(_ENTRY, None)


def _planned(model: PreTrainedModel) -> _Entry:
    try:
        plan, bypassed = make_plan(model)
        return _Entry(model, WrittenDecoder(plan), bypassed)
    except Exception as error:  # whatever is unusual in a foreign model, its own forward knows
        return _refused(model, error)


def _tried(model: PreTrainedModel, entry: _Entry) -> _Entry:
    """What is known after a trial. Only weights of decoders that are used are moved in memory."""
    decoder, watch = entry.decoder, entry.watch
    assert decoder is not None and watch is not None
    try:
        check(model, decoder)
        for maps in decoder.plan.fused:
            maps.lay_side_by_side()
        # Trials may have left something behind: what the watch compares with is how it is now.
        return _Entry(model, decoder, watch.bypassed(), is_tried=True)
    except (torch.OutOfMemoryError, MemoryError):
        logger.warning_once(
            f"{type(model).__name__} is run by its own, slower forward in this call: there is too little memory to try "
            "out the faster one, which takes as much as a layer in float32."
        )
        entry.is_put_off = True
        return entry
    except Exception as error:
        return _refused(model, error)


def _refused(model: PreTrainedModel, error: Exception) -> _Entry:
    if not isinstance(error, UnknownStructureError):
        logger.debug(f"Writing out {type(model).__name__} failed.", exc_info=error)
    logger.info(f"{type(model).__name__} is run by its own forward: {str(error) or type(error).__name__}.")
    return _Entry(model)


def _setting(model: PreTrainedModel) -> tuple:
    """What may make another attempt worth while."""
    return model.dtype, model.device, sum(1 for _ in model.modules())
