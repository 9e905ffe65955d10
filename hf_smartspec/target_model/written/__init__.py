"""Decoders written out: the forward of the common family of models in few calls, from the model's own weights."""

from .registry import packed_forward, written_decoder, written_decoders

__all__ = ["packed_forward", "written_decoder", "written_decoders"]
