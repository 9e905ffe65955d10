"""Side-by-side timing: alternate, warm up, take medians."""

import platform
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median

import torch
import transformers


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def side_by_side(
    functions: dict[str, Callable[[], object]], repeats: int, device: torch.device, warmup: int = 2
) -> dict[str, float]:
    """Median seconds of each function. They take turns, so that a change in the machine's load meets all of them."""
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for turn in range(warmup + repeats):
        for name, function in functions.items():
            synchronize(device)
            start = time.perf_counter()
            function()
            synchronize(device)
            if turn >= warmup:
                seconds[name].append(time.perf_counter() - start)
    return {name: median(values) for name, values in seconds.items()}


class Stopwatch:
    """Seconds spent inside a model's forward while attached to it."""

    def __init__(self) -> None:
        self.seconds = 0.0

    @contextmanager
    def attached_to(self, model: torch.nn.Module) -> Iterator["Stopwatch"]:
        device = next(model.parameters()).device
        start = 0.0

        def before(*_):
            nonlocal start
            synchronize(device)
            start = time.perf_counter()

        def after(*_):
            synchronize(device)
            self.seconds += time.perf_counter() - start

        hooks = [model.register_forward_pre_hook(before), model.register_forward_hook(after)]
        try:
            yield self
        finally:
            for hook in hooks:
                hook.remove()


def environment(device: torch.device, dtype: torch.dtype) -> dict[str, str | int]:
    """What a figure depends on, to be printed beside it."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else _cpu_name()
    return {
        "device": name,
        "threads": torch.get_num_threads(),
        "dtype": str(dtype).removeprefix("torch."),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            names = [line.split(":", 1)[1].strip() for line in file if line.startswith("model name")]
        return names[0]
    except (OSError, IndexError):
        return platform.processor() or platform.machine()
