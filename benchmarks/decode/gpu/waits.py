"""Waits of the host, launches and busy time of the device, per step."""

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

from hf_smartspec.commands.common.models import left_padded
from hf_smartspec.generate import enabled
from hf_smartspec.prepare.config import SmartSpecConfig
from hf_smartspec.target_model.graphs import RUNS_UNTIL_RECORDED

from ...kit.session import Case, Section
from ...kit.sources import sources_by_name
from ...kit.tables import Column, Row, Rows
from .arguments import WAITS
from .shapes import World

_SHORT, _LONG = 4, 12  # new tokens of the two calls that are compared: what a call costs by itself cancels out
_WAITING = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")
_LAUNCHING = ("cudaLaunchKernel", "cuLaunchKernel")  # and those that begin so
_SOURCES, _DRAFTED = ("none", "prompt_lookup:4", "suffix:8"), ("draft:4", "draft:9:3")
_WAYS: Sequence[tuple[str, dict[str, Any], Sequence[str]]] = (  # with the sources; none named: all of them
    ("greedy", {"do_sample": False}, ()),
    ("sampled", {"do_sample": True, "seed": 5, "top_k": 50}, ("none", "draft:4")),
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
    names = [*_SOURCES, *(_DRAFTED if "draft" in world.names else ())]

    def new_config(name: str) -> SmartSpecConfig:
        """Return a new source when it is measured: models are loaded then."""
        return sources_by_name([name], world.setup(world.target(shape), world.draft()))[name]()

    for batch_size in sorted({1, min(8, max(world.plan.batch_sizes))}):
        plain = partial(_plain, world, shape, batch_size)
        yield Case(f"batch {batch_size}, greedy, plain generate", partial(_measured, plain))
        for way, arguments, chosen in _WAYS:
            for name in (name for name in names if not chosen or name in chosen):
                call = partial(_own, world, shape, batch_size, partial(new_config, name), arguments)
                yield Case(f"batch {batch_size}, {way}, {name}", partial(_measured, call))


def _own(
    world: World,
    shape: str,
    batch_size: int,
    make: Callable[[], SmartSpecConfig],
    arguments: dict[str, Any],
    num_tokens: int,
) -> int:
    """Generate with a source and return the number of steps."""
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
    """Return figures of a step: the difference of a long and a short call, by the difference of their steps."""
    for _ in range(RUNS_UNTIL_RECORDED):
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
    """Count torch's warnings of operations that wait for the device, which do not cover all of them."""
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
    """Count calls of CUDA's runtime, and the seconds of kernels; without CUDA, operations of torch."""
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
