"""Programs of compiled operators, which torch's threads run in one call."""

import ctypes
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch

from .kernels import program as codes
from .kernels.arrange import ARRANGE_FIELDS
from .kernels.attend import ATTEND_FIELDS
from .kernels.experts import COMBINE_FIELDS, EXPERTS_FIELDS, GROUP_FIELDS, ROUTE_FIELDS
from .kernels.gates import CLAMPED_GATE_FIELDS, GATE_FIELDS, TIMES_FIELDS
from .kernels.int8 import INT8_FIELDS, LEVELS_FIELDS
from .kernels.multiply import MULTIPLY_FIELDS
from .kernels.norms import ADD_FIELDS, GATED_NORM_FIELDS, NORM_FIELDS, STATE_NORM_FIELDS
from .kernels.program import HEADER, PLACE, SIZE, run_bfloat16, run_float32, run_widened
from .kernels.recur import CONVOLVE_FIELDS, RECUR_FIELDS
from .kernels.rotate import MERGE_FIELDS, ROTATE_FIELDS
from .kernels.screen import SCREEN_FIELDS
from .kernels.vectors import num_lanes
from .threads import give_way, run

_FIELDS = {
    codes.MULTIPLY: MULTIPLY_FIELDS,
    codes.NARROW: MULTIPLY_FIELDS,
    codes.NORM: NORM_FIELDS,
    codes.ADD: ADD_FIELDS,
    codes.GATE: GATE_FIELDS,
    codes.ROTATE: ROTATE_FIELDS,
    codes.ATTEND: ATTEND_FIELDS,
    codes.LEVELS: LEVELS_FIELDS,
    codes.INT8: INT8_FIELDS,
    codes.INT4: INT8_FIELDS,
    codes.CONVOLVE: CONVOLVE_FIELDS,
    codes.RECUR: RECUR_FIELDS,
    codes.GATED_NORM: GATED_NORM_FIELDS,
    codes.TIMES: TIMES_FIELDS,
    codes.ROUTE: ROUTE_FIELDS,
    codes.GROUP: GROUP_FIELDS,
    codes.EXPERTS: EXPERTS_FIELDS,
    codes.COMBINE: COMBINE_FIELDS,
    codes.SCORE: INT8_FIELDS,
    codes.BOUND: SCREEN_FIELDS,
    codes.PICK: SCREEN_FIELDS,
    codes.CLAMPED_GATE: CLAMPED_GATE_FIELDS,
    codes.WIDE_MULTIPLY: MULTIPLY_FIELDS,
    codes.WIDE_ROUTE: ROUTE_FIELDS,
    codes.MERGE: MERGE_FIELDS,
    codes.ARRANGE: ARRANGE_FIELDS,
    codes.STATE_NORM: STATE_NORM_FIELDS,
}
_FLOATS = ("eps", "factor", "scale", "cap", "least")  # float64, in every operator; all other fields are int64
assert all(fields[:2] == ("next", "threads") for fields in _FIELDS.values()), "counters, which `Program.run` clears"
assert all(PLACE + len(fields) <= SIZE for fields in _FIELDS.values())

DTYPES = torch.float32, torch.bfloat16
ON_TOKENS = [code for code, fields in _FIELDS.items() if fields[2] == "num_tokens"]  # operators that are told how many


@cache
def address_of(dtype: torch.dtype) -> int:
    """Return the address of the code that runs programs of numbers in `dtype`; it is compiled at the first call."""
    if dtype is torch.float32:
        return run_float32.address
    return (run_widened if num_lanes() == 8 else run_bfloat16).address


@cache
def operator(code: int) -> Any:
    """Return the class of a program of one operator; its first two fields, counters, are 0 unless given."""
    kinds = [(name, ctypes.c_double if name in _FLOATS else ctypes.c_int64) for name in _FIELDS[code]]
    header = [(name, ctypes.c_int64) for name in ("num_operators", "give_way", "code", "state")]
    return type("Operator", (ctypes.Structure,), {"_fields_": header + kinds})


def run_operator(dtype: torch.dtype, code: int, num_threads: int, *fields: float) -> Any:
    """Run one operator with its fields, counters aside; return its program, an `operator(code)`."""
    arguments = operator(code)(1, give_way(), code, 0, 0, 0, *fields)
    run(address_of(dtype), ctypes.addressof(arguments), num_threads)
    return arguments


def column(code: int, name: str) -> int:
    """Return the place of a field in `Program.rows`, for operators of this code."""
    return PLACE + _FIELDS[code].index(name)


class Program:
    """
    Operators that are run one after the other, each by the threads that are there in time.

    Args:
        dtype (`torch.dtype`): Dtype of all numbers, float32 or bfloat16.
        operators (sequence of pairs): The code of each operator, and its fields by name; fields that are not given are
            0 until they are set.
    """

    def __init__(self, dtype: torch.dtype, operators: Sequence[tuple[int, Mapping[str, float]]]):
        self.dtype = dtype
        self._tape = np.zeros(HEADER + len(operators) * SIZE, np.int64)
        self._tape[:HEADER] = len(operators), give_way()
        self._address = self._tape.ctypes.data
        self._rows = self._tape[HEADER:].reshape(-1, SIZE)
        self._numbers = self._rows.view(np.float64)
        self._codes = [code for code, _ in operators]
        for number, (code, fields) in enumerate(operators):
            self._rows[number, 0] = code
            for name, value in fields.items():
                self.set(number, name, value)

    def set(self, number: int, name: str, value: float) -> None:
        """Set a field of operator `number`."""
        rows = self._numbers if name in _FLOATS else self._rows
        rows[number, column(self._codes[number], name)] = value

    @property
    def rows(self) -> np.ndarray:
        """Codes, states and integer fields of all operators, `[operators, SIZE]` int64."""
        return self._rows

    def run(self, num_threads: int) -> None:
        self._rows[:, 1 : PLACE + 2] = 0  # states and counters
        run(address_of(self.dtype), self._address, num_threads)
