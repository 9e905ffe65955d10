"""Recordings of forwards: which are made, and when they are used."""

import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from ...device import fetch_together
from ...log import get_logger
from ..cache.slot_cache import SlotCache
from ..forward.ragged import ForwardSeries, PlannedForward
from ..layout.step_layout import StepLayout
from .recorder import Recorder, can_record, recorder_of
from .recording_cache import SIGHTINGS, RecordingCache
from .series import SeriesRecordings
from .shapes import copied, has_few_shapes, inputs_of, shape_of

if TYPE_CHECKING:
    from ..written.decoder import WrittenDecoder

logger = get_logger(__name__)

_SWITCH = "HF_SMARTSPEC_GRAPHS"
RUNS_UNTIL_RECORDED = SIGHTINGS + 1  # one more run, with which the recording is compared
_TOLERANCE, _HALF_TOLERANCE = 1e-5, 2e-2  # relative to the largest logit
_KNOWN = ("torch.", "transformers.")
_NUMBERS = (bool, int, float, str)


def records(device: torch.device) -> bool:
    """Return whether forwards are recorded on a device: not if `HF_SMARTSPEC_GRAPHS=0` is set in the environment."""
    return can_record(device) and os.environ.get(_SWITCH, "1") != "0"


def recordings_for(device: torch.device) -> "ForwardRecordings | None":
    """Return recordings for a device; None where forwards are not recorded."""
    return ForwardRecordings(recorder_of(device)) if records(device) else None


@dataclass(eq=False)
class _Recording:
    """
    A recording of one forward.

    Args:
        replay (`Callable`): Runs the forward again.
        inputs (list of `torch.Tensor`): The tensors of a layout that it reads (`inputs_of`), at its own addresses.
        logits (`torch.Tensor` of shape `[M, vocab_size]`), states (dict of `torch.Tensor` of shape `[N, hidden_size]`):
            Its results, valid until any recording is run.
        is_trusted (`bool`): Whether its results have agreed with the decoder's.
    """

    replay: Callable[[], None]
    inputs: list[torch.Tensor]
    logits: torch.Tensor
    states: Mapping[int, torch.Tensor]
    is_trusted: bool = False

    def run(self, layout: StepLayout) -> None:
        torch._foreach_copy_(self.inputs, inputs_of(layout))
        self.replay()

    @torch.inference_mode()
    def spoil(self) -> None:
        """Overwrite the results, so that earlier ones are not taken for new ones."""
        for tensor in (self.logits, *self.states.values()):
            tensor.fill_(torch.nan)


class ForwardRecordings:
    """
    Runner of a written-out decoder, by recordings where shapes recur. A recording is valid for the decoder's weights
    and memory, at the same addresses. It is compared with the decoder once before it is used; where one is wrong, or
    cannot be made, no forwards are recorded.

    Args:
        recorder (`Recorder`): Recorder of the device.

    Attributes:
        may_serve (`bool`): Whether layouts are to be padded: False after a forward that could not be recorded in any
            shape.
    """

    def __init__(self, recorder: Recorder):
        self.may_serve = True
        self._recorder = recorder
        self._recordings = RecordingCache[_Recording]()
        self._series = SeriesRecordings(recorder)
        self._decoder: WrittenDecoder | None = None
        self._places: list[Any] = []
        self._is_off = False

    def __call__(
        self,
        decoder: "WrittenDecoder",
        layout: StepLayout,
        cache: SlotCache,
        layers: Collection[int] = (),
        keep: Callable[[int, torch.Tensor], None] | None = None,
    ) -> torch.Tensor:
        """Run the decoder, with its arguments and logits, except `layers`: those whose hidden states are kept."""
        shape = self._shape(decoder, layout, cache, layers)
        recording = None if shape is None else self._recordings.get(shape)
        if recording is not None and recording.is_trusted:
            recording.run(layout)
            for layer, states in recording.states.items():
                assert keep is not None, "`layers` come with `keep`"
                keep(layer, states.clone())
            return recording.logits.clone()
        if recording is not None:
            return self._compared(recording, decoder, layout, cache, keep)
        logits = decoder(layout, cache, keep)
        if shape is not None and self._recordings.is_due(shape) and self._recorder.has_room():
            self._record(shape, decoder, layout, cache, layers)
        return logits

    def run_series(
        self,
        decoder: "WrittenDecoder",
        series: ForwardSeries,
        cache: SlotCache,
        run: Callable[[PlannedForward], torch.Tensor],
    ) -> list[np.ndarray]:
        """Return the results of a series of the decoder's forwards; `run` runs one forward by itself."""
        may_be_recorded = self._look(decoder, cache) and all([_is_one_of_few(item.layout) for item in series.planned])
        what = series.what() if may_be_recorded else None
        if what is None:
            return fetch_together(series.run(run))
        return self._series(what, decoder, series, cache, run)

    def _shape(
        self, decoder: "WrittenDecoder", layout: StepLayout, cache: SlotCache, layers: Collection[int]
    ) -> tuple | None:
        """Return the key by which forwards share a recording; None for a forward that cannot be recorded."""
        if not self._look(decoder, cache) or not _is_one_of_few(layout):
            return None
        return shape_of(layout), frozenset(layers)

    def _look(self, decoder: "WrittenDecoder", cache: SlotCache) -> bool:
        """Return whether recordings can be used now. Those of other weights or memory are forgotten."""
        plan = decoder.plan
        further = None if plan.layer_inputs is None else plan.layer_inputs.embedding
        parts: tuple[Any, ...] = plan.embedding, plan.rotary, further  # modules, in plans of models
        called = [_state_of(item.module) for item in parts if item is not None]
        memory = cache.places()
        if memory:  # there is none before the first forward
            self._forget_others(decoder, [*called, *memory])
        self.may_serve = not (self._is_off or plan.calls_modules or None in called)
        return bool(memory) and self.may_serve

    def _forget_others(self, decoder: "WrittenDecoder", places: list[Any]) -> None:
        """Forget recordings if weights or memory have changed."""
        if decoder is self._decoder and places == self._places:
            return
        self._is_off = self._is_off and decoder is self._decoder
        self._decoder, self._places = decoder, places
        self._forget()

    def _forget(self) -> None:
        self._recordings.clear()
        self._series.forget()
        self._recorder.forget()

    def _record(
        self,
        shape: tuple,
        decoder: "WrittenDecoder",
        layout: StepLayout,
        cache: SlotCache,
        layers: Collection[int],
    ) -> None:
        own, states = copied(layout), dict[int, torch.Tensor]()

        def keep(layer: int, x: torch.Tensor) -> None:
            if layer in layers:
                states[layer] = x

        cache.layout = own
        try:
            replay, logits = self._recorder.record(lambda: decoder(own, cache, keep if layers else None))
        except Exception as error:  # a forward that cannot be recorded can still be run
            return self._give_up(f"cannot be recorded: {error!r}")
        finally:
            cache.layout = layout
        return self._recordings.add(shape, _Recording(replay, inputs_of(own), logits, states))

    def _compared(
        self,
        recording: _Recording,
        decoder: "WrittenDecoder",
        layout: StepLayout,
        cache: SlotCache,
        keep: Callable[[int, torch.Tensor], None] | None,
    ) -> torch.Tensor:
        """Return the decoder's own logits; trust the recording if it gives the same."""
        recording.spoil()
        recording.run(layout)
        found = [recording.logits.clone(), *(states.clone() for states in recording.states.values())]
        own: dict[int, torch.Tensor] = {}

        def keep_both(layer: int, x: torch.Tensor) -> None:
            own[layer] = x
            if keep is not None:
                keep(layer, x)

        logits = decoder(layout, cache, keep_both)
        expected = [logits, *(own[layer] for layer in recording.states)]
        recording.is_trusted = all([_agree(*pair) for pair in zip(found, expected)])
        if not recording.is_trusted:
            self._give_up("gives other results when recorded")
        return logits

    def _give_up(self, reason: str) -> None:
        self._is_off, self.may_serve = True, False
        self._forget()
        logger.warning_once(f"Forwards are launched call by call: the decoder {reason}.")


def _is_one_of_few(layout: StepLayout) -> bool:
    return layout.is_padded and has_few_shapes(layout)


def _agree(found: torch.Tensor, expected: torch.Tensor) -> bool:
    tolerance = _TOLERANCE if expected.dtype == torch.float32 else _HALF_TOLERANCE
    most = expected.abs().nan_to_num(0.0, 0.0, 0.0).max()
    differs = (found - expected).abs() > tolerance * most
    differs |= found.isfinite() != expected.isfinite()
    return not bool(differs.any())


def _state_of(module: nn.Module) -> tuple | None:
    """
    Return the addresses of a module's tensors, and its numbers: a recording of its calls is valid as long as these stay
    the same. Return None where the module may depend on more: it has hooks, a forward other than its class's, children,
    or a class that is neither torch's nor transformers'.
    """
    own: dict[str, Any] = vars(module)
    is_known = type(module).__module__.startswith(_KNOWN) and "forward" not in own
    has_more = own["_forward_hooks"] or own["_forward_pre_hooks"] or own["_modules"]
    if not is_known or has_more or own.get("_compiled_call_impl") is not None:
        return None
    tensors = [item for item in (*own["_parameters"].values(), *own["_buffers"].values()) if item is not None]
    numbers = tuple(value for value in own.values() if type(value) in _NUMBERS)
    return id(module), *((item.data_ptr(), item.shape, item.dtype) for item in tensors), *numbers
