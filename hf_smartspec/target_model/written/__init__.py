"""Decoders written out: the forward of the common family of models in few calls, from the model's own weights."""

from .registry import forget, packed_forward, written_decoder, written_decoders

__all__ = ["forget", "packed_forward", "written_decoder", "written_decoders"]
