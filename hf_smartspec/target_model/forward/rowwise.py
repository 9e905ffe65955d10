"""
Forward of models that the packed forward cannot serve: row by row, with chains, on transformers' own inputs and caches.
"""

import copy
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.nn.functional import pad
from transformers import Cache, DynamicCache, EncoderDecoderCache, GenerationConfig, PreTrainedModel, StaticCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer
from transformers.generation import GenerationMode
from transformers.utils import ModelOutput

from ...sampling.top import Top, argmax, best_of
from ..compat import CACHE, prepare_attention_mask, prepare_position_ids, prepare_token_type_ids
from ..layout.rows import CacheRow, RowInput
from .hidden_states import HiddenStateTaps
from .rotary import LengthwiseRotary


@dataclass(eq=False)
class ModelRow(CacheRow):
    """A row that runs on its own, with its sequence so far (left padding included) and its keyword arguments."""

    index: int = 0
    ids: torch.Tensor | None = None  # [1, t]; None before the first forward
    kwargs: dict[str, Any] = field(default_factory=dict)
    drafted: np.ndarray | None = None  # tokens of the latest forward's chain


class RowwiseForward:
    """
    Forward of a model that does not follow the attention interface (bloom, falcon, T5, ...). Every row has a cache of
    transformers' own, and is fed and cropped exactly as by transformers' assisted decoding.

    Args:
        model (`PreTrainedModel`): Any model with a cache that can be cropped.
        input_ids (`torch.LongTensor` of shape `[batch, length]`): The padded (decoder) prompts.
        model_kwargs (`dict`): Arguments as `generate` prepared them for the whole batch.
        generation_config (`GenerationConfig`): The config as `generate` prepared it.
    """

    trees = False

    def __init__(
        self,
        model: PreTrainedModel,
        input_ids: torch.LongTensor,
        model_kwargs: dict[str, Any],
        generation_config: GenerationConfig,
    ):
        self.model, self.generation_config = model, generation_config
        self.taps = HiddenStateTaps(model)
        self._inputs = input_ids
        self._kwargs = {key: value for key, value in model_kwargs.items() if key != CACHE}
        self.rows: list[ModelRow] = []
        self._rotary = LengthwiseRotary(model)

    def add(self) -> ModelRow:
        """Add the next row of the batch."""
        row = ModelRow(slot=len(self.rows), index=len(self.rows))
        self._begin(row)
        self.rows.append(row)
        return row

    def _begin(self, row: ModelRow) -> None:
        """Give the row its keyword arguments and an empty cache."""
        index, batch_size = row.index, len(self._inputs)
        kwargs = {key: _row_of(value, index, batch_size) for key, value in self._kwargs.items()}
        positions = self._kwargs.get("position_ids")
        if positions is not None and positions.dim() == 3:  # [planes, batch, length]: images have width and height, too
            kwargs["position_ids"] = positions[:, index : index + 1] if positions.shape[1] == batch_size else positions
        config = copy.copy(self.generation_config)
        config.cache_implementation = None  # a static cache cannot be cropped
        # By transformers' own method, which chooses the cache that the model needs.
        self.model._prepare_cache_for_generation(  # type: ignore[operator]
            config, kwargs, GenerationMode.GREEDY_SEARCH, 1, self._inputs.shape[1]
        )
        kwargs[CACHE].activate_past_recording()
        row.ids, row.length, row.kwargs = None, 0, kwargs

    def set_encoder_outputs(self, outputs: ModelOutput) -> None:
        """Set the encoder outputs that rows which begin from now on attend to."""
        self._kwargs["encoder_outputs"] = outputs

    def remove(self, row: CacheRow) -> None:
        assert isinstance(row, ModelRow)
        row.kwargs.clear()

    def compact(self, rows: Sequence[CacheRow]) -> None:
        """Do nothing: every row has memory of its own."""

    def padded_context(self, rows: Sequence[CacheRow]) -> int:
        """Return the columns that attention reads in a step of one token per row, without padding."""
        return sum(row.length for row in rows)

    def cut(self, row: CacheRow, length: int) -> None:
        """
        Cut a row to its first `length` tokens by running these again: sliding windows have dropped keys that are
        needed.
        """
        assert isinstance(row, ModelRow)
        if not length:  # the whole text is fed next
            return self._begin(row)
        assert row.ids is not None
        generated = row.ids[0, self._inputs.shape[1] :].cpu().numpy()
        prompt_length = row.length - len(generated)
        self._begin(row)
        for feed in (np.zeros(prompt_length, np.int64), generated[: length - prompt_length]):
            if len(feed):  # of the prompt, only the length is used: `_inputs` has its tokens
                self._forward_row(RowInput(row, feed))
                self.commit([row], [[]])
        return None

    def forward(self, inputs: Sequence[RowInput]) -> tuple[torch.Tensor, list[int]]:
        """Run as `PackedForward.forward` does, for chains."""
        logits: list[torch.Tensor] = []
        offsets: list[int] = []
        for item in inputs:
            offsets.append(sum(map(len, logits)))
            logits += map(self._forward_row, self._parts(item))
        return torch.cat(logits), offsets

    def _parts(self, item: RowInput) -> list[RowInput]:
        """
        Split off the draft of a padded prompt whose cache will be returned: masked columns hold an average over all
        columns of their forward, and drafts must not be among these.
        """
        row = item.row
        assert isinstance(row, ModelRow)
        mask = row.kwargs.get("attention_mask")
        is_alone = row.ids is not None or not len(item.tree) or mask is None or bool(mask.all())
        if is_alone or not self.generation_config.return_dict_in_generate:
            return [item]
        return [RowInput(row, item.feed), RowInput(row, item.feed[:0], item.tree)]

    def _forward_row(self, item: RowInput) -> torch.Tensor:
        row, num_nodes = item.row, len(item.tree)
        assert isinstance(row, ModelRow)
        is_first = row.ids is None
        row.ids = ids = self._first_ids(item) if row.ids is None else extended(row.ids, item.feed)
        candidates = extended(ids, item.tree.tokens)
        length = candidates.shape[1]
        is_encoder_decoder = self.model.config.is_encoder_decoder
        kwargs = prepare_attention_mask(dict(row.kwargs), length, is_encoder_decoder)
        kwargs = prepare_token_type_ids(kwargs, length)
        if kwargs.get("position_ids") is not None and kwargs["position_ids"].shape[-1] != length:
            kwargs = prepare_position_ids(kwargs, length, is_encoder_decoder)
        model_inputs = self.model.prepare_inputs_for_generation(  # type: ignore[operator]
            candidates,
            next_sequence_length=None if is_first else len(item.feed) + num_nodes,
            is_first_iteration=is_first,
            **kwargs,
        )
        if "logits_to_keep" in model_inputs:
            model_inputs["logits_to_keep"] = num_nodes + 1
        with self._lengths_step(row, model_inputs), self.taps.installed():
            output = self.model(**model_inputs, return_dict=True)
        row.kwargs[CACHE] = output[CACHE]
        self.taps.note([item], self._first_lines(row, length) if is_first else None)
        row.length += len(item.feed)
        row.drafted = item.tree.tokens
        return output.logits[0, -num_nodes - 1 :]

    def _lengths_step(self, row: ModelRow, model_inputs: dict[str, Any]) -> AbstractContextManager[None]:
        positions = model_inputs.get("position_ids")
        if not self._rotary or positions is None:
            return nullcontext()
        lengths = positions[0].cpu().numpy() + 1 + row.ahead
        return self._rotary.step(np.maximum(lengths, row.least_length))

    def _first_ids(self, item: RowInput) -> torch.Tensor:
        """Return the first ids of a row, `[1, t]`: its prompt or a piece of it, or all of a text that is run again."""
        row = item.row
        assert isinstance(row, ModelRow)
        prompt = self._inputs[row.index : row.index + 1]
        mask = self._mask(row)
        num_tokens = prompt.shape[1] if mask is None else int(mask.sum())
        missing = num_tokens - len(item.feed)
        return prompt[:, : prompt.shape[1] - missing] if missing > 0 else extended(prompt, item.feed[num_tokens:])

    def _mask(self, row: ModelRow) -> torch.Tensor | None:
        """
        Return the attention mask of the row's prompt, `[length]`; None where there is none, or it is an encoder's.
        """
        mask = row.kwargs.get("attention_mask")
        return None if mask is None or self.model.config.is_encoder_decoder else mask[0, : self._inputs.shape[1]]

    def _first_lines(self, row: ModelRow, num_lines: int) -> np.ndarray:
        """Return the lines of the row's tokens in its first forward, which includes the padding."""
        mask, length = self._mask(row), self._inputs.shape[1]
        if mask is None:
            return np.arange(num_lines)
        return np.concatenate([mask.cpu().numpy().nonzero()[0], np.arange(length, num_lines)])

    def argmax(self, logits: torch.Tensor) -> list[int]:
        return argmax(logits)

    def top(self, logits: torch.Tensor, count: int, num_lines: int, with_argmax: bool) -> Top | None:
        return best_of(logits, count, num_lines, with_argmax)

    def commit(self, rows: Sequence[CacheRow], paths: Sequence[Sequence[int]]) -> None:
        """Crop every row's cache to its accepted path, which is the head of its chain."""
        for row, path in zip(rows, paths):
            assert isinstance(row, ModelRow) and row.ids is not None and row.drafted is not None
            row.kwargs[CACHE].crop(len(path) - len(row.drafted))
            row.length += len(path)
            accepted = row.drafted[: len(path)]
            row.ids = extended(row.ids, accepted)

    def export(self, rows: Sequence[CacheRow], prepared: Cache | None) -> Cache | None:
        """
        Return all rows' caches, which must be of one length, as one of the kind that `generate` has prepared; None if
        they hold more than keys and values.
        """
        caches = [row.kwargs[CACHE] for row in rows if isinstance(row, ModelRow)]
        if not all(isinstance(cache, EncoderDecoderCache) for cache in caches):
            return _as_prepared(_stack(caches), prepared)
        own = _stack([cache.self_attention_cache for cache in caches])
        cross = _stack([cache.cross_attention_cache for cache in caches])
        if own is None or cross is None:
            return None
        into = prepared.self_attention_cache if isinstance(prepared, EncoderDecoderCache) else None
        return EncoderDecoderCache(_as_prepared(own, into), cross)


def extended(ids: torch.Tensor, tokens: np.ndarray) -> torch.Tensor:
    """Return `[1, t]` with further tokens appended."""
    return torch.cat([ids, torch.from_numpy(tokens).to(ids)[None]], dim=1) if len(tokens) else ids


def _stack(caches: Sequence[DynamicCache]) -> DynamicCache | None:
    """Join caches of single rows into one batch, in the first of them; None if they hold more than keys and values."""
    known = (DynamicLayer, DynamicSlidingWindowLayer)
    if len(caches) > 1 and not all(type(layer) in known for cache in caches for layer in cache.layers):
        return None
    for layers in zip(*(cache.layers for cache in caches)):
        if hasattr(layers[0], "record_past"):
            layers[0].record_past = False  # later users of the cache need not crop it
        if len(layers) > 1:
            layers[0].keys = torch.cat([layer.keys for layer in layers])
            layers[0].values = torch.cat([layer.values for layer in layers])
    return caches[0]


def _as_prepared(cache: DynamicCache | None, prepared: Cache | None) -> Cache | None:
    """
    Return the same keys and values in the static cache that was prepared, if any, with zeros for those that windows
    dropped.
    """
    if cache is None or not isinstance(prepared, StaticCache):
        return cache
    layers: Any = cache.layers
    for index, layer in enumerate(layers):
        num_left = layer.get_seq_length() - layer.keys.shape[2]
        keys, values = (pad(states, (0, 0, num_left, 0)) for states in (layer.keys, layer.values))
        prepared.update(keys, values, index)
    return prepared


def _row_of(value: Any, index: int, batch_size: int) -> Any:
    """Return one row's share of a batched keyword argument."""
    if isinstance(value, ModelOutput):
        return type(value)(**{key: _row_of(item, index, batch_size) for key, item in value.items()})
    if isinstance(value, torch.Tensor) and value.dim() > 0 and value.shape[0] == batch_size:
        return value[index : index + 1]
    return value
