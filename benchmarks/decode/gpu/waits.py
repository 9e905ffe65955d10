"""What a step asks of the device: times that the host waits, launches, and how long the device is busy."""

import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile
from transformers import PreTrainedModel

from hf_smartspec.candidates import DraftModelCandidates
from hf_smartspec.commands.common.models import left_padded
from hf_smartspec.generate import enabled
from hf_smartspec.prepare.config import SmartSpecConfig

from ...kit.session import Case, Section
from ...kit.tables import Column, Row, Rows
from .arguments import WAITS
from .shapes import World

_SHORT, _LONG = 4, 12  # new tokens of the two calls that are compared: what a call costs by itself cancels out
_WAITING = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")
_LAUNCHING = ("cudaLaunchKernel", "cuLaunchKernel")  # and those that begin so
_WAYS: Sequence[tuple[str, dict[str, Any], Sequence[str]]] = (  # with the sources; none named: all of them
    ("greedy", {"do_sample": False}, ()),
    ("sampled", {"do_sample": True, "seed": 5, "top_k": 50}, ("none", "draft chain of 4")),
)
_KINDS = ("warned", "waits", "copies", "launches", "graphs", "operations", "device_seconds")


def section(world: World, shape: str, share: float) -> Section:
    counts = {name: name for name in ("waits", "warned", "copies", "launches", "graphs")} | {"torch": "operations"}
    columns = [Column("steps", "steps")]
    columns += [Column(title, partial(_per_step, name), "{:.1f}") for title, name in counts.items()]
    columns.append(Column("busy ms", partial(_per_step, "device_seconds"), "{:.2f}", 1e3))
    return Section(f"{WAITS} {shape}", lambda: _cases(world, shape), columns, share=share)


def _per_step(name: str, row: Row, _: Rows) -> float:
    value: float = row["per_step"][name]
    return value


def _cases(world: World, shape: str) -> Iterator[Case]:
    sources = {
        "none": lambda: SmartSpecConfig("none"),
        "prompt lookup of 4": lambda: SmartSpecConfig("prompt_lookup", num_nodes=4),
        "suffix of 8": lambda: SmartSpecConfig("suffix", num_nodes=8),
        "draft chain of 4": lambda: SmartSpecConfig(DraftModelCandidates(world.draft), num_nodes=4),
        "draft tree of 9": lambda: SmartSpecConfig(DraftModelCandidates(world.draft, width=3), num_nodes=9),
    }
    for batch_size in sorted({1, min(8, max(world.plan.batch_sizes))}):
        plain = partial(_plain, world, shape, batch_size)
        yield Case(f"batch {batch_size}, greedy, plain generate", partial(_measured, plain))
        for way, arguments, names in _WAYS:
            for name in names or sources:
                call = partial(_own, world, shape, batch_size, sources[name], arguments)
                yield Case(f"batch {batch_size}, {way}, {name}", partial(_measured, call))


def _own(
    world: World,
    shape: str,
    batch_size: int,
    make: Callable[[], SmartSpecConfig],
    arguments: dict[str, Any],
    num_tokens: int,
) -> int:
    """Steps of a call."""
    model = world.target(shape)
    with enabled(model):
        output: Any = model.generate(
            **_inputs(world, model, batch_size),
            **arguments,
            assistant=make(),
            max_new_tokens=num_tokens,
            return_dict_in_generate=True,
        )
    return output.statistics.forwards


def _plain(world: World, shape: str, batch_size: int, num_tokens: int) -> int:
    model = world.target(shape)
    model.generate(**_inputs(world, model, batch_size), do_sample=False, max_new_tokens=num_tokens)
    return num_tokens


def _inputs(world: World, model: PreTrainedModel, batch_size: int) -> dict[str, Any]:
    return left_padded(world.own_text(batch_size).prompts, 0, model.device)


def _measured(call: Callable[[int], int]) -> Row:
    """Of a step: what a long call has more than a short one, by the steps that it has more."""
    call(_LONG)  # warms up
    totals, steps = [], []
    for num_tokens in (_SHORT, _LONG):
        counts: Counter[str] = Counter()
        with _counting_warnings(counts), _profiling(counts):
            steps.append(call(num_tokens))
        totals.append(counts)
    short, long = totals
    num = max(steps[1] - steps[0], 1)
    return {"steps": num, "per_step": {name: (long[name] - short[name]) / num for name in _KINDS}}


@contextmanager
def _counting_warnings(counts: Counter[str]) -> Iterator[None]:
    """torch's own warnings of operations that wait for the device; it does not know all of them."""
    if not torch.cuda.is_available():
        yield
        return
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield
        counts["warned"] += sum("synchronizing" in str(item.message) for item in caught)
    finally:
        torch.cuda.set_sync_debug_mode(before)


@contextmanager
def _profiling(counts: Counter[str]) -> Iterator[None]:
    """Calls of CUDA's runtime and what the kernels take; without CUDA, operations of torch."""
    activity = ProfilerActivity.CUDA if torch.cuda.is_available() else ProfilerActivity.CPU
    with profile(activities=[activity]) as profiler:
        yield
    for event in profiler.profiler.kineto_results.events():  # as recorded: laying them out takes minutes
        name = event.name()
        if event.device_type() == DeviceType.CUDA:
            counts["device_seconds"] += event.duration_ns() / 1e9
        else:
            counts["waits"] += name in _WAITING
            counts["copies"] += name.startswith("cudaMemcpy")
            counts["launches"] += name.startswith(_LAUNCHING)
            counts["graphs"] += name.startswith("cudaGraphLaunch")
            counts["operations"] += name.startswith("aten::")
