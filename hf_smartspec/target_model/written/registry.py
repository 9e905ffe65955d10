"""Models with a written-out decoder: recognised at first use, compared with their own forward, and watched."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from threading import RLock

import torch
from torch import nn
from transformers import PreTrainedModel

from ...log import get_logger
from ..compat import is_checkpointing, modules_of
from ..encoded import EncodedForward
from ..forward.packed import PackedForward
from ..forward.ranks import is_sharded
from ..model_state import state_of
from .decoder import WrittenDecoder
from .parts import lay_out
from .plan import UnknownStructureError
from .recognition import make_plan
from .trial import check
from .watch import Watch

logger = get_logger(__name__)

_SWITCH = "HF_SMARTSPEC_WRITTEN"

_lock = RLock()
_is_on: ContextVar[bool | None] = ContextVar("smartspec_written", default=None)  # None: as set in the environment


class _Entry:
    """
    State of one model's written-out decoder.

    Args:
        model (`PreTrainedModel`): The model; no reference to it is kept.
        decoder (`WrittenDecoder`, *optional*): None where the model's own forward is to run.
        bypassed (sequence of `nn.Module`): The modules that the decoder bypasses.
        is_tried (`bool`): Whether the decoder was found to agree. If not, its trial waits until the model has no hooks
            or replaced forwards, and does not drop or recompute values in training.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        decoder: WrittenDecoder | None = None,
        bypassed: Sequence[nn.Module] = (),
        is_tried: bool = False,
    ):
        self.decoder, self.is_tried = decoder, is_tried
        self.is_put_off = False  # whether the trial waits for the next call of `generate`
        self.watch = None if decoder is None else Watch(model, bypassed)
        self.setting = _setting(model) if decoder is None else None

    def holds(self, model: PreTrainedModel, thoroughly: bool, may_wait: bool) -> bool:
        """Return whether the model is unchanged since the entry was made."""
        if self.watch is None:
            return not thoroughly or self.setting == _setting(model)
        if may_wait and not thoroughly and self.watch.has_just_looked():
            return True
        if not self.watch.is_unchanged(thoroughly):
            return False
        if self.decoder is not None:
            self.decoder.look_at_copies(thoroughly)  # last: copies are of weights that are where they were
        return True


@contextmanager
def written_decoders(is_on: bool) -> Iterator[None]:
    """Within the context, let this thread's forwards use written-out decoders, or the models' own forwards."""
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
    Return a packed forward that computes with the model's written-out decoder wherever there is one; for decoders with
    cross attention, an `EncodedForward`.
    """
    if model.config.is_encoder_decoder:
        return EncodedForward(model, num_rows, capacity, prefill_chunk)
    written_decoder(model, thoroughly=True)
    return PackedForward(
        model, num_rows, capacity, prefill_chunk, lambda may_wait: written_decoder(model, may_wait=may_wait)
    )


def written_decoder(
    model: PreTrainedModel, *, thoroughly: bool = False, may_wait: bool = False
) -> WrittenDecoder | None:
    """
    Return the model's written-out decoder. None where the model's own forward must run: its structure is unknown, the
    two differ, a module was hooked or replaced, or `HF_SMARTSPEC_WRITTEN=0` is set in the environment.

    Args:
        thoroughly (`bool`): Whether to look for rare changes, too.
        may_wait (`bool`): Whether replaced modules, and weights that have moved or changed, need not be noticed for
            50 ms, as between steps of the same rows.
    """
    if not _is_switched_on() or is_sharded(model):  # transformers' own layers multiply split weights
        return None
    state = state_of(model)
    entry: _Entry | None = state.written
    if entry is None or not entry.holds(model, thoroughly, may_wait):
        with _lock:
            entry = state.written  # another thread may have been faster
            if entry is None or not entry.holds(model, thoroughly, may_wait):
                entry = state.written = _planned(model)
    if entry.watch is None:
        return None
    if entry.is_tried:
        return entry.decoder if entry.watch.is_bypassable(thoroughly, may_wait) else None
    if model.training and is_checkpointing(model):
        return None  # the model's own forward would not use the cache
    if entry.is_put_off and not thoroughly:
        return None
    with _lock:  # a trial in another thread has hooks in the model until it ends
        known: _Entry | None = state.written
        if known is not None and known is entry and entry.watch.is_bypassable(thoroughly):
            known = state.written = _tried(model, known)
    if known is None or known.watch is None or not known.is_tried:
        return None
    # This thread, which waited for the trial, may autocast, or the model may have been hooked meanwhile.
    return known.decoder if known.watch.is_bypassable(thoroughly) else None


def _planned(model: PreTrainedModel) -> _Entry:
    try:
        plan, bypassed = make_plan(model)
        return _Entry(model, WrittenDecoder(plan), bypassed)
    except Exception as error:  # a model that fails here in any way is run by its own forward
        return _refused(model, error)


def _tried(model: PreTrainedModel, entry: _Entry) -> _Entry:
    """Return the model's entry after a trial. Only weights of decoders that are used are moved in memory."""
    decoder, watch = entry.decoder, entry.watch
    assert decoder is not None and watch is not None
    try:
        check(model, decoder)
        lay_out(decoder.plan.laid_out)
        # With a new watch, since trials may have changed what it compares with.
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
    """Return the properties of a model whose change makes another attempt worthwhile."""
    return model.dtype, model.device, len(modules_of(model))
