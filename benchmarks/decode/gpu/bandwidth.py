"""The device's memory: its bandwidth, the bytes that a step must read at least, and the most that was in use."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from transformers import PreTrainedModel

from ...kit.session import Case, Section
from ...kit.tables import Column, Row
from ...kit.timing import side_by_side
from .arguments import BANDWIDTH
from .shapes import World

_IN_A_ROW = 5  # calls per timing, so that launching them is hidden
_WIDTH = 8192  # of a matrix that is read


def section(world: World) -> Section:
    return Section(BANDWIDTH, lambda: _cases(world), [Column("GB/s", "gigabytes_per_second", "{:.0f}")])


def _cases(world: World) -> list[Case]:
    kinds = {"copy": _copy, "sum": _sum, "matrix times vector": _product}
    return [Case(name, partial(_measured, world, make)) for name, make in kinds.items()]


def _measured(world: World, make: Callable[[torch.Tensor], tuple[Callable[[], object], int]]) -> Row:
    dtype = getattr(torch, world.plan.dtype)
    data = torch.ones(world.plan.copied // dtype.itemsize, dtype=dtype, device=world.device)
    with torch.inference_mode():
        function, num_bytes = make(data)

        def in_a_row() -> None:
            for _ in range(_IN_A_ROW):
                function()

        seconds = side_by_side({"": in_a_row}, world.plan.repeats, world.device)[""] / _IN_A_ROW
    return {"gigabytes_per_second": num_bytes / seconds / 1e9, "bytes": num_bytes, "seconds": seconds}


def _copy(data: torch.Tensor) -> tuple[Callable[[], object], int]:
    """Return a copy, which reads and writes."""
    target = torch.empty_like(data)
    return lambda: target.copy_(data), 2 * data.nbytes


def _sum(data: torch.Tensor) -> tuple[Callable[[], object], int]:
    return data.sum, data.nbytes


def _product(data: torch.Tensor) -> tuple[Callable[[], object], int]:
    """Return a product of a matrix and a vector, which reads as a model's weights are read for one token."""
    width = min(_WIDTH, data.numel())
    matrix = data[: data.numel() // width * width].view(-1, width)
    vector = data[:width][None]
    return lambda: torch.nn.functional.linear(vector, matrix), matrix.nbytes


def best_rate(rows: dict[str, Row]) -> float:
    """Return the bytes per second of the fastest way; NaN if none was measured."""
    return max((row["bytes"] / row["seconds"] for row in rows.values()), default=float("nan"))


def weight_bytes(model: PreTrainedModel) -> int:
    """
    Return the bytes of the weights that every forward reads: all but embeddings that are not the output layer too.
    """
    embeddings = model.get_input_embeddings().weight
    read = {id(item): item for item in model.parameters()}
    if model.get_output_embeddings().weight is not embeddings:
        read.pop(id(embeddings), None)
    return sum(item.nbytes for item in read.values())


def cache_bytes(model: PreTrainedModel) -> int:
    """Return the bytes of a token's keys and values."""
    config = model.config
    width: int = 2 * config.num_key_value_heads * config.head_dim * config.num_hidden_layers
    return width * model.dtype.itemsize


PEAK = Column("peak GB", "peak_bytes", "{:.1f}", 1e-9)


@dataclass
class Peak:
    """Bytes that torch had allocated at most, weights included; 0 on devices without such a count."""

    value: int = 0


@contextmanager
def peak_bytes(device: torch.device) -> Iterator[Peak]:
    """Yield an object whose `value` is the block's peak memory, once the block has ended."""
    peak = Peak()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    yield peak
    if device.type == "cuda":
        peak.value = torch.cuda.max_memory_allocated(device)
