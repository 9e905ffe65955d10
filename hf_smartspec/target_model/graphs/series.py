"""A series of forwards, with the work on the device in between, as one recording: one launch for all of them."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from ...device import bits_of, fetch_together, values_in
from ...log import get_logger
from ..cache.slot_cache import SlotCache
from ..forward.ragged import ForwardSeries, PlannedForward
from .recorder import Recorder
from .recording_cache import RecordingCache
from .shapes import copied, inputs_of, shape_of

if TYPE_CHECKING:
    from ..written.decoder import WrittenDecoder

logger = get_logger(__name__)

Run = Callable[[PlannedForward], torch.Tensor]
_TOLERANCE, _HALF_TOLERANCE = 1e-5, 2e-2  # relative to the largest number


@dataclass(eq=False)
class _Recording:
    """
    A recording of one series.

    Args:
        replay (`Callable`): Runs the series again.
        inputs (list of `torch.Tensor`): The tensors of a series that it reads (`_inputs`), at its own addresses.
        bits (`torch.Tensor` of shape `[n]`, int32): Its results (`bits_of`), valid until any recording is run.
        like (list of `torch.Tensor`): Tensors without data, with the shapes and dtypes of the results.
        is_trusted (`bool`): Whether its results have agreed with those of the series launched call by call.
    """

    replay: Callable[[], None]
    inputs: list[torch.Tensor]
    bits: torch.Tensor
    like: list[torch.Tensor]
    is_trusted: bool = False

    def run(self, series: ForwardSeries) -> list[np.ndarray]:
        torch._foreach_copy_(self.inputs, _inputs(series))
        self.replay()
        return values_in(self.bits.cpu(), self.like)

    @torch.inference_mode()
    def spoil(self) -> None:
        """Overwrite the results with NaN, and invalid tokens."""
        self.bits.fill_(-1)


class SeriesRecordings:
    """
    Runner of series of a written-out decoder's forwards, by recordings where series recur. A recording is compared once
    with the series launched call by call; a series whose recording gives other results is not recorded again.

    Args:
        recorder (`Recorder`): Recorder of the device.
    """

    def __init__(self, recorder: Recorder):
        self._recorder = recorder
        self._recordings = RecordingCache[_Recording]()
        self._refused: set[Hashable] = set()

    def forget(self) -> None:
        """Forget all recordings, after weights or memory have moved."""
        self._recordings.clear()
        self._refused.clear()

    def __call__(
        self, what: Hashable, decoder: "WrittenDecoder", series: ForwardSeries, cache: SlotCache, run: Run
    ) -> list[np.ndarray]:
        """
        Return the results of a series.

        Args:
            what (`Hashable`): `series.what`.
            run (`Callable`): Runs one of its forwards by itself.
        """
        shape = what, *[(shape_of(item.layout), item.num_lines) for item in series.planned]
        shape = *shape, *[tuple(tensor.shape) for tensor in series.tensors]
        recording = self._recordings.get(shape)
        if recording is None:
            may_be_recorded = self._refused.isdisjoint((what, shape)) and self._recordings.is_due(shape)
            # Copied before it is run, since a series changes its layouts.
            own = _copied(series) if may_be_recorded and self._recorder.has_room() else None
            found = fetch_together(series.run(run))
            if own is not None:
                self._record(shape, what, decoder, own, cache)
            return found
        if recording.is_trusted:
            return recording.run(series)
        recording.spoil()
        found = recording.run(series)
        expected = fetch_together(series.run(run))
        recording.is_trusted = all([_agree(*pair, cache) for pair in zip(found, expected)])
        if not recording.is_trusted:
            self._refused.add(shape)
            self._recordings.drop(shape)
        return expected

    def _record(
        self, shape: Hashable, what: Hashable, decoder: "WrittenDecoder", own: ForwardSeries, cache: SlotCache
    ) -> None:
        """Record a series whose tensors are its own."""
        inputs, found = _inputs(own), list[torch.Tensor]()

        def run(item: PlannedForward) -> torch.Tensor:
            cache.layout = item.layout
            return decoder(item.layout, cache)[: item.num_lines]

        def run_all() -> torch.Tensor:
            found[:] = own.run(run)
            return bits_of(found)

        before = cache.layout
        try:
            replay, bits = self._recorder.record(run_all)
        except Exception as error:  # a series that cannot be recorded can still be run
            self._refused.add(what)
            return logger.warning_once(
                f"Levels of drafts are launched one by one: they cannot be recorded together: {error!r}"
            )
        finally:
            cache.layout = before
        like = [torch.empty(item.shape, dtype=item.dtype, device="meta") for item in found]
        return self._recordings.add(shape, _Recording(replay, inputs, bits, like))


def _inputs(series: ForwardSeries) -> list[torch.Tensor]:
    """Return all tensors that a series reads, as long as it has not been run."""
    return [*[tensor for item in series.planned for tensor in inputs_of(item.layout)], *series.tensors]


@torch.inference_mode(False)  # inference tensors could not be written to outside inference mode
def _copied(series: ForwardSeries) -> ForwardSeries:
    """Return the series with tensors of its own."""
    planned = [replace(item, layout=copied(item.layout)) for item in series.planned]
    return replace(series, planned=planned, tensors=[tensor.clone() for tensor in series.tensors])


def _agree(found: np.ndarray, expected: np.ndarray, cache: SlotCache) -> bool:
    """Return whether tokens are equal, and other numbers close."""
    if found.dtype.kind != "f":
        return np.array_equal(found, expected)
    is_half = any(memory.dtype != torch.float32 for layer in cache.layers for memory in layer.memories)
    most = np.abs(np.nan_to_num(expected, posinf=0.0, neginf=0.0)).max(initial=0.0)
    return bool((np.abs(found - expected) <= (_HALF_TOLERANCE if is_half else _TOLERANCE) * most).all())
