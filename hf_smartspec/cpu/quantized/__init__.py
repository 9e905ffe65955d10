"""Models whose linear layers run in int8 on the CPU."""

from .linear import Int8Linear
from .model import KINDS, is_quantized, quantize
from .product import unrounded_tokens

__all__ = ["KINDS", "Int8Linear", "is_quantized", "quantize", "unrounded_tokens"]
