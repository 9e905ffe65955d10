"""Models whose linear maps run in int8 on the CPU."""

from .linear import Int8Linear
from .model import is_quantized, quantize, rounds_coarsely

__all__ = ["Int8Linear", "is_quantized", "quantize", "rounds_coarsely"]
