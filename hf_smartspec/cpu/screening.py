"""
The best token of a head without reading all of it: an int8 copy bounds every score, and those few that may be the best
are computed exactly. It is a quarter of the head in float32, and half in bfloat16, and the result is the same.
"""

from collections.abc import Callable
from functools import cache
from math import isfinite
from typing import NamedTuple

import numpy as np
import torch

from ..log import get_logger
from .few_tokens import few_token_linear, has_kernels
from .kernels.dots import GROUP, SIDE
from .kernels.program import BOUND, LEVELS, PICK, SCORE
from .kernels.screen import CHUNK, MOST
from .program import DTYPES, Program
from .quantized.levels import dequantized, in_blocks, to_levels
from .quantized.native import Rounded, blocks_of, num_groups
from .quantized.product import has_right_kernels
from .tensor_checks import has_sums_of_bits, is_plain, sums_of_bits, version_of
from .threads import share_of

logger = get_logger(__name__)

_LEAST = 2**20  # weights from which on reading fewer bytes saves more than comparing bounds takes
_ROWS = 256 * SIDE  # rows of a head that are rounded at a time
_MORE = 1.001  # of a length, for the rounding of its sum
_LEAST_LENGTH = 1e-16  # added to lengths: squares of smaller numbers vanish in float32


class Picks(NamedTuple):
    """
    The best tokens of a head, in place of all scores.

    Args:
        tokens (list of `int`): The best token of every line; ties go to the lowest token, as in `torch.argmax`.
        scores (`torch.Tensor` of shape `[M, vocab_size]`, float32): Scores by the int8 copy: `tokens` need not have the
            highest ones.
        bounds (`np.ndarray` of shape `[M, chunks]`, float32): Upper bounds on the scores of `CHUNK` neighbouring tokens
            each.
    """

    tokens: list[int]
    scores: torch.Tensor
    bounds: np.ndarray


class Screen:
    """
    An int8 copy of a head's weight, with the bounds on what it changes.

    Args:
        weight (`torch.Tensor` of shape `[vocab_size, hidden_size]`): A weight that passes `can_screen`.

    Attributes:
        levels, scales (`torch.Tensor`): The copy, as `Int8Linear` has it.
        errors (`torch.Tensor` of shape `[vocab_size]`, float32): For each row w and its copy w', at least |w - w'|, and
            the rounding of sums.
        norms (`torch.Tensor` of shape `[vocab_size]`, float32): At least |w'|.
        is_finite (`bool`): Whether the bounds hold: not where a weight is infinite, NaN or huge.
    """

    def __init__(self, weight: torch.Tensor):
        self.shape = num_outputs, num_inputs = weight.shape
        blocks, groups = -(-num_outputs // SIDE), num_groups(num_inputs)
        self._version, self._sums = version_of(weight), sums_of_bits(weight)
        self.levels = torch.empty(blocks, groups, GROUP // 4, SIDE, 4, dtype=torch.int8, device="cpu")
        self.scales = torch.empty(blocks, groups, SIDE, dtype=torch.float32, device="cpu")
        self.errors, self.norms = (torch.empty(num_outputs, dtype=torch.float32, device="cpu") for _ in range(2))
        # Sums in float32 err by less than 2 ** -24 of all products' absolute values for each number that is added.
        rounding = num_inputs * 2.0**-22
        for begin in range(0, num_outputs, _ROWS):
            rows = weight.detach()[begin : begin + _ROWS].float()
            levels, scales = in_blocks(to_levels(rows))
            first, end = begin // SIDE, begin + len(rows)
            self.levels[first : first + len(levels)], self.scales[first : first + len(levels)] = levels, scales
            copied = dequantized(levels, scales)[: len(rows), :num_inputs]
            lost = (rows - copied).norm(dim=1)
            self.errors[begin:end] = (lost + rounding * rows.norm(dim=1)) * _MORE + _LEAST_LENGTH
            self.norms[begin:end] = copied.norm(dim=1) * _MORE + _LEAST_LENGTH
        self.is_finite = bool((self.errors < MOST).all() and (self.norms < MOST).all())

    def is_of(self, weight: torch.Tensor, thoroughly: bool = False) -> bool:
        """
        Return whether the weight is as it was copied, by torch's count of changes, or thoroughly by its bits, too, as
        `weight.data` is not counted.
        """
        return self._version == version_of(weight) and not (
            thoroughly and not torch.equal(self._sums, sums_of_bits(weight))
        )


def can_screen(weight: torch.Tensor) -> bool:
    """Return whether a head's best tokens are found faster by a screen, and compiled code reads its weight as it is."""
    num_inputs = weight.shape[1]
    return (
        is_plain(weight.detach())
        and weight.dtype in DTYPES
        and weight.is_contiguous()
        and not num_inputs % 16
        and has_sums_of_bits(weight)
        and weight.numel() >= _LEAST
        and has_screening(weight.dtype)
    )


@cache
def has_screening(dtype: torch.dtype) -> bool:
    """Return whether there is compiled code for this CPU that is faster, and its results are right."""
    if not has_kernels(dtype) or not has_right_kernels(dtype):  # both log why
        return False
    generator = torch.Generator().manual_seed(0)
    weight, x = (torch.randn(shape, generator=generator, device="cpu").to(dtype) for shape in ((600, 80), (5, 80)))
    try:
        found = best_tokens(x, weight, Screen(weight))
        return found is not None and found.tokens == few_token_linear(x, weight).argmax(dim=1).tolist()
    except Exception as error:  # compilers raise errors of many types
        logger.warning(f"Heads are read whole, since no faster code can be compiled ({error!r}).")
        return False


def best_tokens(x: torch.Tensor, weight: torch.Tensor, screen: Screen) -> Picks | None:
    """
    Return the best tokens of a head by its screen.

    Args:
        x (`torch.Tensor` of shape `[M, hidden_size]`): Contiguous inputs of the head, in its dtype.
        weight (`torch.Tensor` of shape `[vocab_size, hidden_size]`): The weight of which the screen is.

    Returns:
        `Picks`; None where the inputs are infinite, NaN or huge.
    """
    operators: list[tuple[int, dict[str, float]]] = []

    def add(code: int, **fields: float) -> int:
        operators.append((code, {"num_tokens": len(x), **fields}))
        return len(operators) - 1

    own = ScreenOperators(screen, weight, x, Rounded(len(x), num_groups(x.shape[1])), add)
    program, scores = Program(x.dtype, operators), x.new_empty(len(x), len(weight), dtype=torch.float32)
    own.set_scores(program, scores)
    program.run(torch.get_num_threads())
    tokens = own.tokens(len(x))
    return None if tokens is None else Picks(tokens, scores, own.bounds[: len(x)].copy())


class ScreenOperators:
    """
    Operators of a program for the best tokens of a head, and their memory.

    Args:
        screen (`Screen`): The head's screen.
        weight, x (`torch.Tensor`): The head's weight, and its inputs `[room, hidden_size]`, of one dtype.
        rounded (`Rounded`): Memory for as many rounded inputs.
        add (`Callable`): Appends an operator to the program, by its code and fields, and returns its number.
    """

    def __init__(
        self, screen: Screen, weight: torch.Tensor, x: torch.Tensor, rounded: Rounded, add: Callable[..., int]
    ):
        (num_outputs, num_inputs), room = screen.shape, len(x)
        self._held = screen, rounded  # only addresses are known to the program
        chunks = -(-num_outputs // CHUNK)
        self._memory = [torch.empty(room, size, dtype=torch.float32, device="cpu") for size in (2, chunks, chunks)]
        self.bounds = self._memory[2].numpy()
        self._products = torch.empty(room, chunks, dtype=x.dtype, device="cpu")
        self.best, self.places = np.empty((room, chunks), np.float32), np.empty((room, chunks), np.int64)
        places = rounded.read_by(SCORE)
        add(LEVELS, size=num_inputs, tokens=x.data_ptr(), **rounded.written())
        self.scoring = add(
            SCORE,
            num_groups=num_groups(num_inputs),
            num_outputs=num_outputs,
            share=blocks_of(num_outputs, num_inputs),
            weight=screen.levels.data_ptr(),
            scales=screen.scales.data_ptr(),
            **places,
        )
        names = "sizes", "lowest", "highest", "products", "best", "places"
        memory = [item.data_ptr() for item in (*self._memory, self._products)]
        memory += [item.ctypes.data for item in (self.best, self.places)]
        fields = {
            "size": num_inputs,
            "num_outputs": num_outputs,
            "num_chunks": chunks,
            "share": share_of(num_outputs, 1, CHUNK) // CHUNK,
            "weight": weight.data_ptr(),
            "tokens": x.data_ptr(),
            "levels": places["levels"],
            "steps": places["steps"],
            "errors": screen.errors.data_ptr(),
            "norms": screen.norms.data_ptr(),
            "eps": 0.0 if x.dtype is torch.float32 else torch.finfo(x.dtype).eps,
            **dict(zip(names, memory)),
        }
        self.bounding, self.picking = add(BOUND, **fields), add(PICK, **fields)

    def set_scores(self, program: Program, scores: torch.Tensor) -> None:
        """Set where scores `[M, vocab_size]` are written, float32."""
        program.set(self.scoring, "outputs", scores.data_ptr())
        for number in (self.bounding, self.picking):
            program.set(number, "scores", scores.data_ptr())

    def tokens(self, num_tokens: int) -> list[int] | None:
        """Return the best tokens after a run; None where numbers were infinite, NaN or huge."""
        chunks = self.best[:num_tokens].argmax(axis=1).tolist()
        if not all([isfinite(self.best.item(place)) for place in enumerate(chunks)]):
            return None
        return [self.places.item(place) for place in enumerate(chunks)]
