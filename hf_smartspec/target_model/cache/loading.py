"""Slot caches filled from transformers' own."""

from collections.abc import Sequence
from typing import Any

import torch
from transformers.cache_utils import DynamicCache, DynamicLayer

from ..layout.rows import CacheRow
from .slot_cache import SlotCache


def load(source: DynamicCache, cache: SlotCache, rows: Sequence[CacheRow], columns: Sequence[torch.Tensor]) -> None:
    """
    Fill empty rows of a slot cache: row i takes the columns of `source` that the bool mask `columns[i]`
    (`[cached_length]`) selects. Sliding-window layers hold only the end of the text, which is all that they attend to.
    States of recurrent layers are taken over where `RecurrentLayers.may_be_loaded`.
    """
    cache.reserve(rows, [int(mask.sum()) for mask in columns])
    own: Any
    for index, own in enumerate(source.layers):
        if hasattr(own, "recurrent_states"):
            cache.load_states(index, own.conv_states, own.recurrent_states, rows)
            continue
        assert isinstance(own, DynamicLayer) and own.keys is not None and own.values is not None
        layer = cache.layer(index)
        if not layer.is_initialized:
            layer.lazy_initialization(own.keys, own.values)
        for number, (row, mask) in enumerate(zip(rows, columns)):
            missing = len(mask) - own.keys.shape[2]
            positions = mask.cumsum(0)[missing:][mask[missing:]] - 1
            for memory, states in ((layer.keys, own.keys), (layer.values, own.values)):
                memory[row.line + positions] = states[number][:, mask[missing:]].transpose(0, 1)
    for row, mask in zip(rows, columns):
        row.length = int(mask.sum())
