"""Modules that a decoder calls as they are: whether their calls can be recorded, and on what a recording depends."""

from typing import Any

from torch import nn

_KNOWN = ("torch.", "transformers.")
_NUMBERS = (bool, int, float, str)


def state_of(module: nn.Module) -> tuple | None:
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
