"""Packed decoders that also attend to an encoder's outputs: T5, BART, Whisper and their relatives."""

from .forward import EncodedForward, encoder_size, masks_encoder
from .step import OwnCache

__all__ = ["EncodedForward", "OwnCache", "encoder_size", "masks_encoder"]
