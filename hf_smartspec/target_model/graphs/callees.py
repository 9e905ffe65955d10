"""Modules that a decoder calls as they are: whether their calls can be recorded, and what a recording depends on."""

from typing import Any

from torch import nn

_KNOWN = ("torch.", "transformers.")
_NUMBERS = (bool, int, float, str)


def state_of(module: nn.Module) -> tuple | None:
    """
    Where a module's tensors lie, and its numbers: a recording of its calls serves as long as these stay. None where it
    may do more than its tensors and numbers say: it has hooks, another forward than its class, children, or a class
    that is neither torch's nor transformers'.
    """
    own: dict[str, Any] = vars(module)
    is_known = type(module).__module__.startswith(_KNOWN) and "forward" not in own
    has_more = own["_forward_hooks"] or own["_forward_pre_hooks"] or own["_modules"]
    if not is_known or has_more or own.get("_compiled_call_impl") is not None:
        return None
    tensors = [item for item in (*own["_parameters"].values(), *own["_buffers"].values()) if item is not None]
    numbers = tuple(value for value in own.values() if type(value) in _NUMBERS)
    return id(module), *((item.data_ptr(), item.shape, item.dtype) for item in tensors), *numbers
