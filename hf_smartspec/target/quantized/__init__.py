"""Models whose linear maps run in int8 on the CPU."""

from .linear import Int8Linear
from .model import KINDS, is_quantized, quantize, rounds_coarsely

__all__ = ["KINDS", "Int8Linear", "is_quantized", "quantize", "rounds_coarsely"]
