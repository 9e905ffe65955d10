"""Rotary embeddings of a written-out layer."""

import inspect
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch

from ...cpu.kernels.rotate import TO_HALVES
from ..forward_code import ROTATIONS, mentions, rotation_function

Tables = tuple[torch.Tensor, torch.Tensor]
_DIM = 8  # size of heads with which functions are tried out


class Rotation:
    """
    Rotary embeddings, `x * cos + swapped(x) * sin`, in place: products and sum rounded as those of transformers.

    Args:
        is_interleaved (`bool`): Whether neighbouring numbers are rotated together; else those of a head's halves are.
        repeats_first (`bool`): Whether each angle of the first half of embeddings is that of two neighbours.
        rounds_once (`bool`): Whether numbers in half precision are rotated in float32.
        is_half (`bool`): Whether embeddings have every angle once (GPT-OSS), not twice.
        to_halves (`bool`): Whether neighbours are written to a head's halves (DeepSeek V3).
        is_backward (`bool`): Whether heads are rotated the other way round (nanochat).
    """

    def __init__(
        self,
        is_interleaved: bool = False,
        repeats_first: bool = False,
        rounds_once: bool = False,
        is_half: bool = False,
        to_halves: bool = False,
        is_backward: bool = False,
    ):
        self.is_interleaved, self.repeats_first, self.rounds_once = is_interleaved, repeats_first, rounds_once
        self.is_half, self.to_halves, self.is_backward = is_half, to_halves, is_backward

    @property
    def code(self) -> int:
        """Return which numbers are rotated together, as compiled code takes it."""
        return TO_HALVES if self.to_halves else int(self.is_interleaved)

    def tables(self, cos: torch.Tensor, sin: torch.Tensor) -> Tables:
        """
        Return the factors of heads, `[N, 1, dim]` each, from embeddings `[1, N, dim]`, or of half as many numbers: in
        float32 where products are not to be rounded.
        """
        if self.is_half:
            cos, sin = (torch.cat([item, item], dim=-1) for item in (cos, sin))
        if self.repeats_first:
            cos, sin = (item.chunk(2, dim=-1)[0].repeat_interleave(2, dim=-1) for item in (cos, sin))
        if self.rounds_once:
            cos, sin = cos.float(), sin.float()
        if self.is_backward:
            sin = -sin
        if self.is_interleaved:
            first, second = sin[..., ::2], sin[..., 1::2]
            sin = torch.stack([-first, second], dim=-1).flatten(-2)
        else:
            first, second = sin.chunk(2, dim=-1)
            sin = torch.cat([-first, second], dim=-1)
        return cos.transpose(0, 1), sin.transpose(0, 1)

    def rotate(self, x: torch.Tensor, num_heads: int, tables: Tables) -> None:
        """Rotate queries and keys `[N, heads + kv_heads, dim]` in place."""
        half = x.shape[-1] // 2
        swapped = x.unflatten(-1, (half, 2)).flip(-1).flatten(-2) if self.is_interleaved else x.roll(half, -1)
        if tables[0].dtype is x.dtype:
            x.mul_(tables[0]).add_(swapped.mul_(tables[1]))
        else:
            x.copy_(x * tables[0] + swapped * tables[1])
        if self.to_halves:
            x.copy_(x.unflatten(-1, (half, 2)).transpose(-1, -2).flatten(-2))


class OwnRotation:
    """
    Rotary embeddings by the function of a model's own file, which takes queries and keys, or one of these (Gemma 4),
    before cosines and sines.
    """

    def __init__(self, function: Callable):
        self.function = function
        parameters = inspect.signature(function).parameters.values()
        self.takes_one = sum(item.default is inspect.Parameter.empty for item in parameters) == 3

    @staticmethod
    def tables(cos: torch.Tensor, sin: torch.Tensor) -> Tables:
        return cos, sin

    def rotate(self, x: torch.Tensor, num_heads: int, tables: Tables) -> None:
        heads = x.transpose(0, 1)[None]
        if self.takes_one:
            x.copy_(self.function(heads, *tables)[0].transpose(0, 1))
            return
        query, key = self.function(heads[:, :num_heads], heads[:, num_heads:], *tables)
        x.copy_(torch.cat([query, key], dim=1)[0].transpose(0, 1))


def written_rotation(attention: Any) -> Rotation | OwnRotation | None:
    """Return the rotary embeddings of an attention module; None if its file has no function for them."""
    kind, (usual, neighbours, complex_numbers) = type(attention), ROTATIONS
    names = mentions(kind)
    if complex_numbers in names:
        return _rotation_of(_of_complex(rotation_function(kind, complex_numbers)), is_complex=True)
    is_chosen = "rope_interleave" not in names or attention.config.rope_interleave
    own = rotation_function(kind, neighbours if neighbours in names and is_chosen else usual)
    return None if own is None else _rotation_of(own)


@lru_cache(maxsize=64)
def _of_complex(function: Callable) -> Callable:
    """Return a function that takes cosines and sines in place of complex numbers."""

    def rotated(query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Any:
        return function(query, key, torch.complex(cos.float(), sin.float()))

    return rotated


@lru_cache(maxsize=64)
@torch.no_grad()
def _rotation_of(function: Callable, is_complex: bool = False) -> Rotation | OwnRotation:
    """
    Return what does the same as a function, found by trying it; the function itself if nothing does. Products of
    complex numbers, in float32, are rounded otherwise in their last bit.
    """
    own = OwnRotation(function)
    dtypes = torch.float32, torch.bfloat16
    try:
        expected = [_tried(own, dtype) for dtype in dtypes]
        forms = [(False, False, False, False, False), (True, False, False, False, False)]
        forms += [(True, True, False, False, False), (True, True, False, True, False)]
        forms.append((False, False, False, False, True))
    except RuntimeError:  # sizes that do not fit
        expected = [_tried(own, dtype, is_half=True) for dtype in dtypes]
        forms = [(False, False, True, False, False), (True, True, True, False, False)]
    for rounds_once in (True,) if is_complex else (False, True):
        for is_interleaved, repeats_first, is_half, to_halves, is_backward in forms:
            rotation = Rotation(is_interleaved, repeats_first, rounds_once, is_half, to_halves, is_backward)
            found = [_tried(rotation, item.dtype, is_half) for item in expected]
            if all(_are_equal(*pair, is_complex) for pair in zip(found, expected)):
                return rotation
    return own


def _are_equal(found: torch.Tensor, expected: torch.Tensor, is_complex: bool) -> bool:
    bound = 2 * torch.finfo(expected.dtype).eps if is_complex else 0.0
    return torch.allclose(found, expected, rtol=bound, atol=bound)


def _tried(rotation: Rotation | OwnRotation, dtype: torch.dtype, is_half: bool = False) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    angles = torch.rand(1, 3, _DIM // 2, generator=generator)
    angles = angles if is_half else angles.repeat(1, 1, 2)  # most embeddings have every angle twice
    x = torch.randn(3, 5, _DIM, generator=generator).to(dtype)
    rotation.rotate(x, 3, rotation.tables(angles.cos().to(dtype), angles.sin().to(dtype)))
    return x
