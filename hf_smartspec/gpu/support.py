"""Checks of compiled code: whether there is some for a device, and whether its results are right."""

from collections.abc import Callable
from functools import cache

import torch

from ..log import get_logger

logger = get_logger(__name__)


@cache
def has_triton(device: torch.device) -> bool:
    """Return whether Triton is there, and compiles for the device: it needs a C compiler."""
    if device.type != "cuda":
        return False
    try:
        from . import kernels

        hidden = torch.ones(1, 2, dtype=torch.float16, device=device)
        with torch.cuda.device_of(hidden):
            kernels.gate[(1, 1)](hidden, torch.empty_like(hidden), 1, SIZE=16)
    except Exception:  # compilers raise errors of many types
        return False
    return True


def next_power(number: int) -> int:
    """Return the number, if it is a power of two, or the next one."""
    return 1 << (number - 1).bit_length()


def agrees(name: str, found: Callable[[], torch.Tensor], expected: torch.Tensor, tolerance: float) -> bool:
    """
    Return whether the result of compiled code is that of torch, up to `tolerance` of its largest value; say so once
    where it is not.
    """
    reason = "gives other results"
    try:
        if bool((found() - expected).abs().max() <= tolerance * expected.abs().max()):
            return True
    except Exception as error:  # compilers raise errors of many types
        reason = f"failed: {error!r}"
    logger.warning_once(f"Compiled code for the GPU is not used for {name}: it {reason}.")
    return False
