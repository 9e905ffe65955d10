"""What a device does when it records operations and does them again, on the memory that they had."""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


@cache
def changes_its_input(function: Callable) -> bool:
    first = function._schema.arguments[:1]
    return bool(first and first[0].alias_info and first[0].alias_info.is_write)


class Operations:
    """Operations in the order in which they were run."""

    def __init__(self) -> None:
        self._calls: list[tuple[Callable, tuple, dict, Any]] = []

    def note(self, function: Callable, args: tuple, kwargs: dict, result: Any) -> None:
        self._calls.append((function, args, kwargs, result))

    @torch.inference_mode()
    def do_again(self) -> None:
        for function, args, kwargs, result in self._calls:
            new = function(*args, **kwargs)
            if not changes_its_input(function):
                pairs = zip(result, new) if isinstance(result, tuple | list) else [(result, new)]
                for old, item in pairs:
                    if old.data_ptr() != item.data_ptr():  # views are where they were
                        old.copy_(item)


class OperationRecorder(TorchDispatchMode):
    """
    A recorder for the CPU.

    Args:
        fault (`Callable`, *optional*): Changes the logits of every replay, or raises when something is recorded.
    """

    def __init__(self, fault: Callable[[torch.Tensor], None] | None = None):
        super().__init__()
        self.fault, self.is_full = fault, False
        self.num_recorded = self.num_replays = 0
        self._operations = Operations()

    def has_room(self) -> bool:
        return not self.is_full

    def forget(self) -> None:
        pass

    def record(self, function: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
        self.num_recorded += 1
        self._operations = operations = Operations()
        with self:
            result = function()
        if self.fault is not None:
            self.fault(result)

        def replay() -> None:
            self.num_replays += 1
            operations.do_again()
            if self.fault is not None:
                self.fault(result)

        return replay, result

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        self._operations.note(function, args, kwargs or {}, result)
        return result
