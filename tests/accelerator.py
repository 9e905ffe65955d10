"""
An emulated accelerator: a device whose tensors hold their data on the CPU, refuse to be mixed with the CPU's own, and
count what a real one would have to launch, to be sent, and to be waited for.

Registering it changes what torch says of the machine for the rest of the process: give it a process of its own.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode

from .recorder import Operations, changes_its_input

DEVICE = "emulated"
aten = torch.ops.aten
_NAMES_OF_VIEWS = {"detach", "alias", "lift_fresh", "_unsafe_view", "_reshape_alias"}

# Between the host and the device, or within one of them.
_COPIES = (aten._to_copy.default, aten.copy_.default)
_INDEXED = (aten.index.Tensor, aten.index_put_.default, aten._index_put_impl_.default)
# The host must know what these find before it can go on.
_WAITS = {
    aten._local_scalar_dense.default,
    aten.nonzero.default,
    aten.masked_select.default,
    aten.equal.default,
    aten.is_nonzero.default,
    aten._unique2.default,
    aten.unique_consecutive.default,
    aten.repeat_interleave.Tensor,
}

# "dispatched": operations that are no views. "uploads": copies from the host. "waits": times that the host stood still,
# for a value, for a number of elements, or for an upload that was not to return before it was done. "replays": of what
# was recorded.
counts: Counter[str] = Counter()
_recorded: Operations | None = None  # where something is recorded


class EmulatedTensor(torch.Tensor):
    """A tensor of the emulated device, around one of the CPU."""

    on_host: torch.Tensor

    @staticmethod
    def __new__(cls, data: torch.Tensor):
        tensor = torch.Tensor._make_wrapper_subclass(
            cls,
            data.shape,
            strides=data.stride(),
            storage_offset=data.storage_offset(),
            dtype=data.dtype,
            device=torch.device(DEVICE, 0),
            requires_grad=data.requires_grad,
        )
        tensor.on_host = data
        return tensor

    def data_ptr(self) -> int:
        return self.on_host.data_ptr()

    def tolist(self) -> list:  # torch has none for subclasses
        return self.cpu().tolist()

    def __repr__(self, **_: Any) -> str:
        return f"EmulatedTensor({self.on_host})"

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        return _run(function, args, kwargs or {})


class Accelerator(TorchDispatchMode):
    """The emulated device, which is there within the context."""

    def __init__(self) -> None:
        super().__init__()
        _register()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return _run(function, args, kwargs or {})

    @contextmanager
    def counting(self) -> Iterator[Counter[str]]:
        """What is counted within."""
        before, since = counts.copy(), Counter[str]()
        yield since
        since.update({name: number - before[name] for name, number in counts.items()})


@cache
def _register() -> torch.library.Library:
    """The device, and what `torch.tensor(..., device=...)` calls beneath all dispatch modes."""
    backend_registration._setup_privateuseone_for_python_backend(DEVICE)
    library = torch.library.Library("aten", "IMPL")
    library.impl("empty_strided", _empty_strided, "PrivateUse1")
    library.impl("_copy_from", _copy_from, "PrivateUse1")
    return library


def _empty_strided(size, stride, *, dtype=None, layout=None, device=None, pin_memory=None):
    return EmulatedTensor(torch.empty_strided(size, stride, dtype=dtype))


def _copy_from(source, target, non_blocking=False):
    return _run(aten.copy_.default, (target, source, non_blocking), {})


def _run(function: Callable, args: tuple, kwargs: dict) -> Any:
    """One operation: on the CPU's tensors as they are, on the device's with counts."""
    tensors: list[torch.Tensor] = []
    _mapped((args, tuple(kwargs.values())), torch.Tensor, tensors.append)
    device = kwargs.get("device")
    is_asked = device is not None and torch.device(device).type == DEVICE
    if not is_asked and not any(isinstance(item, EmulatedTensor) for item in tensors):
        return function(*args, **kwargs)
    if function in _COPIES:
        return _copy(function, args, kwargs, device, is_asked)
    _refuse_mixture(function, args, tensors)
    _count(function, args)
    if is_asked:
        kwargs = kwargs | {"device": torch.device("cpu")}
    kwargs = {name: _mapped(value, EmulatedTensor, _host) for name, value in kwargs.items()}
    result = _done(function, _mapped(args, EmulatedTensor, _host), kwargs)
    if not function._schema.returns:
        return None
    return args[0] if changes_its_input(function) else _mapped(result, torch.Tensor, EmulatedTensor)


def _done(function: Callable, args: tuple, kwargs: dict) -> Any:
    """An operation's result, on the CPU; what it does is recorded."""
    result = function(*args, **kwargs)
    if _recorded is not None:
        _recorded.note(function, args, kwargs, result)
    return result


class Recorder:
    """As `target.graphs.recorder` has it for CUDA: what the host looks at, or sends, cannot be recorded."""

    def __init__(self, device: torch.device):
        self.num_recorded = self.num_replays = 0

    def has_room(self) -> bool:
        return True

    def forget(self) -> None:
        pass

    def record(self, function: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
        global _recorded
        before, _recorded = counts.copy(), Operations()
        try:
            result, operations = function(), _recorded
        finally:
            _recorded = None
        if any(counts[name] > before[name] for name in ("waits", "uploads")):
            raise RuntimeError("The host has waited for what is recorded.")
        counts.clear()
        counts.update(before)
        self.num_recorded += 1

        def replay() -> None:
            counts["dispatched"] += 1
            counts["replays"] += 1
            self.num_replays += 1
            operations.do_again()

        return replay, result


def _copy(function: Callable, args: tuple, kwargs: dict, device: Any, is_asked: bool) -> torch.Tensor:
    """`copy_(target, source, non_blocking)` or `_to_copy(source, ...)`: up, down, or neither."""
    is_in_place = function is aten.copy_.default
    source = args[1] if is_in_place else args[0]
    stays = isinstance(args[0], EmulatedTensor) if is_in_place else is_asked or device is None
    waits = not (args[2] if is_in_place and len(args) > 2 else kwargs.get("non_blocking", False))
    counts["dispatched"] += 1
    if not isinstance(source, EmulatedTensor):
        counts["uploads"] += 1
        counts["waits"] += waits
    elif not stays:
        counts["waits"] += 1  # what reads the copy must wait for it
    if is_asked:
        kwargs = kwargs | {"device": torch.device("cpu")}
    result = _done(function, _mapped(args, EmulatedTensor, _host), kwargs)
    if is_in_place:
        return args[0]
    return EmulatedTensor(result) if stays else result


def _refuse_mixture(function: Callable, args: tuple, tensors: list[torch.Tensor]) -> None:
    """As CUDA does: numbers without dimensions may come from the CPU, and so may indices."""
    others = [item for item in tensors if not isinstance(item, EmulatedTensor) and item.dim() > 0]
    if function in _INDEXED and isinstance(args[0], EmulatedTensor):
        indices = {id(item) for item in args[1]}
        others = [item for item in others if id(item) not in indices]
    if others:
        raise RuntimeError(f"{function}: tensors of the CPU, of shapes {[tuple(item.shape) for item in others]}.")


def _count(function: Callable, args: tuple) -> None:
    counts["dispatched"] += not _is_view(function)
    counts["waits"] += function in _WAITS
    if function in _INDEXED:
        indices = [item for item in args[1] if item is not None]
        num_sent = sum(not isinstance(item, EmulatedTensor) for item in indices)
        counts["uploads"] += num_sent
        counts["waits"] += num_sent + (function is aten.index.Tensor and any(i.dtype == torch.bool for i in indices))


@cache
def _is_view(function: Callable) -> bool:
    return function.is_view or function._schema.name.removeprefix("aten::") in _NAMES_OF_VIEWS


def _host(tensor: EmulatedTensor) -> torch.Tensor:
    return tensor.on_host


def _mapped(values: Any, kind: type, function: Callable) -> Any:
    """The values, tuples and lists of values included, with the function's in place of those of a kind."""
    if isinstance(values, kind):
        return function(values)
    if isinstance(values, tuple | list):
        return type(values)([_mapped(value, kind, function) for value in values])
    return values
