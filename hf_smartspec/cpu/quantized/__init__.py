"""Models whose linear layers run in int8 or int4 on the CPU."""

from .linear import Int4Linear, Int8Linear, QuantizedLinear
from .model import KINDS, is_quantized, quantize
from .product import unrounded_tokens

__all__ = ["KINDS", "Int4Linear", "Int8Linear", "QuantizedLinear", "is_quantized", "quantize", "unrounded_tokens"]
