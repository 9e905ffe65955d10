"""Parts of the operators of layers with states in the program of a decoder's forward."""

from collections.abc import Mapping
from functools import cache
from typing import Any, Protocol

import numpy as np
import torch

from ...cpu.kernels import program as codes
from ...cpu.program import column
from .convolution import Convolution

LAYOUT = "num_rows", "tail", "rows", "parents"
WIDE = 4  # bytes of float32, in which memory of layers is counted


class Writer(Protocol):
    """Attributes of a `ForwardWriter` that are used here."""

    attended: torch.Tensor
    recurred: torch.Tensor
    states: torch.Tensor

    def add(self, code: int, /, **fields: float) -> int: ...

    def multiply(self, item: Any, x: torch.Tensor, outputs: torch.Tensor) -> int: ...


def add_convolution(own: Writer, convolution: Convolution, channels: int, in_stride: int, **fields: float) -> int:
    """Write a convolution, whose inputs are set later; return its number."""
    weight, bias = convolution.weight(), convolution.bias()
    return own.add(
        codes.CONVOLVE,
        channels=channels,
        width=weight.shape[1],
        in_stride=in_stride,
        out_stride=channels,
        weight=weight.data_ptr(),
        bias=0 if bias is None else bias.data_ptr(),
        **fields,
    )


def as_wide(numbers: Any, itemsize: int) -> Any:
    """Return the float32 numbers whose memory so many numbers of `itemsize` bytes take."""
    return -(-numbers * itemsize // WIDE)


def set_fields(rows: np.ndarray, code: int, operators: np.ndarray, fields: Mapping[str, Any]) -> None:
    """Set fields of operators of one code."""
    values = np.empty((len(operators), len(fields)), np.int64)
    for place, value in enumerate(fields.values()):
        values[:, place] = value
    rows[operators[:, None], _columns(code, tuple(fields))] = values


@cache
def _columns(code: int, names: tuple[str, ...]) -> list[int]:
    return [column(code, name) for name in names]
