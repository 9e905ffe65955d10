"""
An emulated accelerator: a device whose tensors hold their data on the CPU, refuse to be mixed with the CPU's own, and
count what a real one would have to launch, to be sent, and to wait for.

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
from torch.utils._pytree import tree_flatten, tree_map_only

DEVICE = "emulated"

aten = torch.ops.aten
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
_VIEWS = {"detach", "alias", "lift_fresh", "_unsafe_view", "_reshape_alias"}


class EmulatedTensor(torch.Tensor):
    """A tensor of the emulated device, around one of the CPU."""

    data_on_host: torch.Tensor

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
        tensor.data_on_host = data
        return tensor

    def tolist(self) -> list:  # torch has none for subclasses
        return self.cpu().tolist()

    def __repr__(self, **_: Any) -> str:
        return f"EmulatedTensor({self.data_on_host})"

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        return run(function, args, kwargs or {})


class Accelerator(TorchDispatchMode):
    """
    Runs every operation on the emulated device, within the context.

    Attributes:
        counts (`Counter`): "dispatched": operations that are no views. "uploads": copies from the host. "waits": times
            that the host stood still, for a value, for a number of elements, or for an upload that was not to return
            before it was done. `where` has the place in this library for each of the latter.
    """

    def __init__(self) -> None:
        super().__init__()
        register()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return run(function, args, kwargs or {})

    @contextmanager
    def counting(self) -> Iterator[Counter[str]]:
        """What is counted within."""
        before, since = counts.copy(), Counter[str]()
        yield since
        since.update({name: number - before[name] for name, number in counts.items()})


counts: Counter[str] = Counter()


@cache
def register() -> torch.library.Library:
    """The device, and what `torch.tensor(..., device=...)` calls beneath all dispatch modes."""
    backend_registration._setup_privateuseone_for_python_backend(DEVICE)
    library = torch.library.Library("aten", "IMPL")
    library.impl("empty_strided", _empty_strided, "PrivateUse1")
    library.impl("_copy_from", _copy_from, "PrivateUse1")
    return library


def _empty_strided(size, stride, *, dtype=None, layout=None, device=None, pin_memory=None):
    return EmulatedTensor(torch.empty_strided(size, stride, dtype=dtype))


def _copy_from(source, target, non_blocking=False):
    return run(aten.copy_.default, (target, source, non_blocking), {})


def run(function: Callable, args: tuple, kwargs: dict) -> Any:
    """One operation: on the CPU's tensors as they are, on the device's with counts."""
    tensors = [item for item in tree_flatten((args, kwargs))[0] if isinstance(item, torch.Tensor)]
    is_asked = kwargs.get("device") is not None and torch.device(kwargs["device"]).type == DEVICE
    if not is_asked and not any(isinstance(item, EmulatedTensor) for item in tensors):
        return function(*args, **kwargs)
    is_copy = function in _COPIES
    _refuse_mixture(function, tensors, args, is_copy)
    _count(function, args, kwargs, is_asked)
    if is_asked:
        kwargs = {**kwargs, "device": torch.device("cpu")}
    leaves_device = is_copy and not is_asked and _goes_to_host(function, args, kwargs)
    result = function(*_on_host(args), **_on_host(kwargs))
    if leaves_device:
        # A copy in the memory of the host, also where the CPU would have handed out the same tensor.
        return args[0] if function is aten.copy_.default else result
    if _changes_its_input(function):
        return args[0]
    return tree_map_only(torch.Tensor, EmulatedTensor, result)


def _on_host(values: Any) -> Any:
    return tree_map_only(EmulatedTensor, lambda tensor: tensor.data_on_host, values)


def _changes_its_input(function: Callable) -> bool:
    first = function._schema.arguments[:1]
    return bool(first and first[0].alias_info and first[0].alias_info.is_write)


def _goes_to_host(function: Callable, args: tuple, kwargs: dict) -> bool:
    if function is aten.copy_.default:
        return not isinstance(args[0], EmulatedTensor)
    return kwargs.get("device") is not None


def _refuse_mixture(function: Callable, tensors: list[torch.Tensor], args: tuple, is_copy: bool) -> None:
    """As CUDA does: numbers without dimensions may come from the CPU, and so may indices."""
    if is_copy:
        return
    others = [item for item in tensors if not isinstance(item, EmulatedTensor) and item.dim() > 0]
    if function in _INDEXED and isinstance(args[0], EmulatedTensor):
        indices = {id(item) for item in args[1]}
        others = [item for item in others if id(item) not in indices]
    if others:
        raise RuntimeError(f"{function}: tensors of the CPU, of shapes {[tuple(item.shape) for item in others]}.")


def _count(function: Callable, args: tuple, kwargs: dict, is_asked: bool) -> None:
    name = function._schema.name.removeprefix("aten::")
    if not function.is_view and name not in _VIEWS:
        counts["dispatched"] += 1
    if function in _COPIES:
        source, waits = args[1] if name == "copy_" else args[0], not kwargs.get("non_blocking", False)
        if name == "copy_" and len(args) > 2:
            waits = not args[2]
        if not isinstance(source, EmulatedTensor):
            counts["uploads"] += 1
            counts["waits"] += waits
        elif not is_asked and _goes_to_host(function, args, kwargs):
            counts["waits"] += 1
    elif function in _INDEXED:
        from_host = [item for item in args[1] if item is not None and not isinstance(item, EmulatedTensor)]
        masks = [item for item in args[1] if item is not None and item.dtype in (torch.bool, torch.uint8)]
        counts["uploads"] += len(from_host)
        counts["waits"] += len(from_host) + (function is aten.index.Tensor) * bool(masks)
    elif function in _WAITS:
        counts["waits"] += 1
