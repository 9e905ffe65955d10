"""Which forwards are recorded, and when their recordings serve."""

import os
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import torch

from ...log import get_logger
from ..layout import StepLayout
from ..slot_cache import SlotCache
from ..varlen import all_are_right
from .callees import state_of
from .recorder import Recorder, can_record, recorder_of

if TYPE_CHECKING:
    from ..written.decoder import WrittenDecoder

logger = get_logger(__name__)

_SWITCH = "HF_SMARTSPEC_GRAPHS"
_SIGHTINGS = 2  # of a shape, before it is recorded
RUNS_UNTIL_RECORDED = _SIGHTINGS + 1  # one more, with which the recording is compared
_MOST, _MOST_SHAPES = 64, 2**12  # recordings, and shapes that are counted
_TOLERANCE, _HALF_TOLERANCE = 1e-5, 2e-2  # of the largest logit


def records(device: torch.device) -> bool:
    """Whether forwards are recorded there: not if `HF_SMARTSPEC_GRAPHS=0` is set in the environment."""
    return can_record(device) and os.environ.get(_SWITCH, "1") != "0"


def recordings_for(device: torch.device) -> "ForwardRecordings | None":
    """None where forwards are not recorded."""
    return ForwardRecordings(recorder_of(device)) if records(device) else None


@dataclass(eq=False)
class _Recording:
    """
    One forward.

    Args:
        replay (`Callable`): Runs it anew.
        inputs (list of `torch.Tensor`): What it reads of a layout (`_inputs`), at its own addresses.
        logits (`torch.Tensor` of shape `[M, vocab_size]`), states (dict of `torch.Tensor` of shape `[N, hidden_size]`):
            Where its results lie, until any recording is run.
        is_trusted (`bool`): Has given what the decoder gives.
    """

    replay: Callable[[], None]
    inputs: list[torch.Tensor]
    logits: torch.Tensor
    states: Mapping[int, torch.Tensor]
    is_trusted: bool = False

    def run(self, layout: StepLayout) -> None:
        torch._foreach_copy_(self.inputs, _inputs(layout))
        self.replay()

    @torch.inference_mode()
    def spoil(self) -> None:
        """What lies where the results come is no result."""
        for tensor in (self.logits, *self.states.values()):
            tensor.fill_(torch.nan)


class ForwardRecordings:
    """
    Runs a written-out decoder, from recordings where shapes come again: of the weights and of the memory that it had
    then, at the same addresses. A recording is compared with the decoder once before it serves; where one is wrong, or
    cannot be made, there are none.

    Args:
        recorder (`Recorder`): Of the device.

    Attributes:
        may_serve (`bool`): Whether layouts are to be padded: not behind a forward that could not be recorded whatever
            its shape.
    """

    def __init__(self, recorder: Recorder):
        self.may_serve = True
        self._recorder = recorder
        self._recordings: OrderedDict[tuple, _Recording] = OrderedDict()
        self._sightings: Counter[tuple] = Counter()
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
        """Arguments and logits as those of the decoder, but for `layers`: those whose hidden states are kept."""
        shape = self._shape(decoder, layout, cache, layers)
        recording = None if shape is None else self._recordings.get(shape)
        if shape is not None and recording is not None and recording.is_trusted:
            self._recordings.move_to_end(shape)
            recording.run(layout)
            for layer, states in recording.states.items():
                assert keep is not None, "somebody asked for them"
                keep(layer, states.clone())
            return recording.logits.clone()
        if recording is not None:
            return self._compared(recording, decoder, layout, cache, keep)
        logits = decoder(layout, cache, keep)
        if shape is not None and self._is_due(shape):
            self._record(shape, decoder, layout, cache, layers)
        return logits

    def _shape(
        self, decoder: "WrittenDecoder", layout: StepLayout, cache: SlotCache, layers: Collection[int]
    ) -> tuple | None:
        """What two forwards have in common that can be run by one recording; None for one that cannot be recorded."""
        called = [state_of(item.module) for item in (decoder.plan.embedding, decoder.plan.rotary)]
        memory = cache.places()
        if memory:  # there is none before the first forward
            self._forget_others(decoder, [*called, *memory])
        self.may_serve = not (self._is_off or decoder.plan.calls_modules or None in called)
        if not memory or not self.may_serve or not layout.is_padded or not _has_few_shapes(layout):
            return None
        return _shape_of(layout), frozenset(layers)

    def _forget_others(self, decoder: "WrittenDecoder", places: list[Any]) -> None:
        """What was recorded with other weights, or other memory, is of no use."""
        if decoder is self._decoder and places == self._places:
            return
        self._is_off = self._is_off and decoder is self._decoder
        self._decoder, self._places = decoder, places
        self._forget()

    def _forget(self) -> None:
        self._recordings.clear()
        self._sightings.clear()
        self._recorder.forget()

    def _is_due(self, shape: tuple) -> bool:
        if len(self._sightings) > _MOST_SHAPES:
            self._sightings.clear()
        self._sightings[shape] += 1
        return self._sightings[shape] >= _SIGHTINGS and self._recorder.has_room()

    def _record(
        self,
        shape: tuple,
        decoder: "WrittenDecoder",
        layout: StepLayout,
        cache: SlotCache,
        layers: Collection[int],
    ) -> None:
        own, states = _copied(layout), dict[int, torch.Tensor]()

        def keep(layer: int, x: torch.Tensor) -> None:
            if layer in layers:
                states[layer] = x

        cache.layout = own
        try:
            replay, logits = self._recorder.record(lambda: decoder(own, cache, keep if layers else None))
        except Exception as error:  # whatever a device cannot record, it can run
            return self._give_up(f"cannot be recorded: {error!r}")
        finally:
            cache.layout = layout
        self._recordings[shape] = _Recording(replay, _inputs(own), logits, states)
        if len(self._recordings) > _MOST:
            evicted, _ = self._recordings.popitem(last=False)
            del self._sightings[evicted]
        return None

    def _compared(
        self,
        recording: _Recording,
        decoder: "WrittenDecoder",
        layout: StepLayout,
        cache: SlotCache,
        keep: Callable[[int, torch.Tensor], None] | None,
    ) -> torch.Tensor:
        """The decoder's own logits; the recording is trusted if it gives the same."""
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


def _agree(found: torch.Tensor, expected: torch.Tensor) -> bool:
    tolerance = _TOLERANCE if expected.dtype == torch.float32 else _HALF_TOLERANCE
    most = expected.abs().nan_to_num(0.0, 0.0, 0.0).max()
    differs = (found - expected).abs() > tolerance * most
    differs |= found.isfinite() != expected.isfinite()
    return not bool(differs.any())


def _has_few_shapes(layout: StepLayout) -> bool:
    """One rectangle, or none at all."""
    return len(layout.parts) == 1 or _needs_no_parts(layout)


def _needs_no_parts(layout: StepLayout) -> bool:
    spans = layout.spans
    return spans is not None and not spans.has_trees and all_are_right(layout.tokens.device)


_OF_PARTS = {"bases", "extents"}  # of spans
# Of no account to the device, or looked at by themselves.
_NO_SHAPE = {"firsts", "columns", "parts", "spans", "_masks", "seen", "seen_nodes"}


def _owners(layout: StepLayout) -> list[tuple[Any, set[str]]]:
    """What has tensors that a recording reads, with the names of those that it does not."""
    if layout.spans is None:
        return [(item, set()) for item in (layout, *layout.parts)]
    if _needs_no_parts(layout):
        return [(layout, set()), (layout.spans, _OF_PARTS)]
    return [(item, set()) for item in (layout, layout.spans, *layout.parts)]


def _inputs(layout: StepLayout) -> list[torch.Tensor]:
    tensors = [getattr(owner, name) for owner, ignored in _owners(layout) for name in owner.sent if name not in ignored]
    return [tensor for tensor in tensors if tensor is not None]


def _shape_of(layout: StepLayout) -> tuple:
    """All but the numbers in tensors."""
    values = [
        getattr(owner, field.name)
        for owner, ignored in _owners(layout)
        for field in fields(owner)
        if field.name not in _NO_SHAPE and field.name not in ignored
    ]
    return tuple(map(_value, values))


def _value(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return tuple(value.shape)
    if isinstance(value, slice):
        return value.start, value.stop
    return tuple(value) if isinstance(value, list) else value


def _copied(layout: StepLayout) -> StepLayout:
    """The layout with tensors of its own, and nothing that a recording must not read."""

    @torch.inference_mode(False)  # others write to them outside
    def copied(owner: Any, ignored: set[str]) -> Any:
        tensors = {name: getattr(owner, name) for name in owner.sent}
        own = {name: item.clone() for name, item in tensors.items() if item is not None and name not in ignored}
        return replace(owner, **dict.fromkeys(tensors) | own)

    owners = {id(owner): copied(owner, ignored) for owner, ignored in _owners(layout)}
    result: StepLayout = owners[id(layout)]
    result.spans = owners.get(id(layout.spans))
    result.parts = [owners[id(part)] for part in layout.parts if id(part) in owners]
    result.seen = {}
    for part in result.parts:
        part._masks = {}
    return result
