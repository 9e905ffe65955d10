"""How much to speculate: plain arithmetic on numpy arrays, no torch and no model."""

from .selector import FixedLength, LengthPolicy, NoSpeculation

__all__ = ["FixedLength", "LengthPolicy", "NoSpeculation"]
