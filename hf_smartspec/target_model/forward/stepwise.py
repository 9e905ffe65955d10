"""Forward of models whose state cannot be rolled back (state spaces, recurrence, ...), as in transformers' own loop."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation import GenerationMode
from transformers.utils import ModelOutput

from ...sampling.top import Top, argmax
from ..compat import CACHE_NAMES
from ..layout.rows import CacheRow, RowInput
from .rowwise import ModelRow, extended


class StepwiseForward:
    """
    Forward of one text, run as by `generate`: its prompt in one piece, then one token at a time. Drafts cannot be
    verified.

    Args:
        model (`PreTrainedModel`): Any model that `generate` decodes.
        input_ids (`torch.LongTensor` of shape `[1, length]`): The (decoder) prompt.
        model_kwargs (`dict`): Arguments as `generate` prepared them.
        generation_config (`GenerationConfig`): The config as `generate` prepared it.
    """

    trees = False
    taps = None

    def __init__(
        self,
        model: PreTrainedModel,
        input_ids: torch.LongTensor,
        model_kwargs: dict[str, Any],
        generation_config: GenerationConfig,
    ):
        self.model, self.generation_config = model, generation_config
        self._inputs = input_ids
        self._kwargs = {key: value for key, value in model_kwargs.items() if key not in CACHE_NAMES}

    def set_encoder_outputs(self, outputs: ModelOutput) -> None:
        """Set the encoder outputs that the text attends to once it begins."""
        self._kwargs["encoder_outputs"] = outputs

    def add(self) -> ModelRow:
        return ModelRow(slot=0, in_one_piece=True)

    def cut(self, row: CacheRow, length: int) -> None:
        """Drop the row's state; the whole text is fed next."""
        assert isinstance(row, ModelRow) and not length, "the state can only be dropped as a whole"
        row.ids, row.length, row.kwargs = None, 0, {}

    def remove(self, row: CacheRow) -> None:
        assert isinstance(row, ModelRow)
        row.kwargs = {}

    def compact(self, rows: Sequence[CacheRow]) -> None:
        """Do nothing: there is one row."""

    def padded_context(self, rows: Sequence[CacheRow]) -> int:
        return sum(row.length for row in rows)

    def forward(self, inputs: Sequence[RowInput]) -> tuple[torch.Tensor, list[int]]:
        """Run as `PackedForward.forward` does, without drafts."""
        (item,) = inputs
        row = item.row
        assert isinstance(row, ModelRow) and not len(item.tree)
        if row.ids is None:
            output = self._begin(row, item.feed)
        else:
            for token in item.feed:
                output = self._step(row, token)
        row.length += len(item.feed)
        return output.logits[:, -1].clone(), [0]

    def _begin(self, row: ModelRow, text: np.ndarray) -> Any:
        """Run the whole text as a prompt: the prompt alone, or with the tokens generated before the row was cut."""
        model: Any = self.model
        new = text[self._inputs.shape[1] :]
        row.ids, row.kwargs = extended(self._inputs, new), dict(self._kwargs)
        if len(new):
            row.kwargs = self._updated(ModelOutput(), row.kwargs, len(new))
        length = self.generation_config.max_length - 1
        model._prepare_cache_for_generation(self.generation_config, row.kwargs, GenerationMode.GREEDY_SEARCH, 1, length)
        output = model._prefill(row.ids, self.generation_config, row.kwargs)
        row.kwargs = self._updated(output, row.kwargs)
        return output

    def _step(self, row: ModelRow, token: int) -> Any:
        model: Any = self.model
        assert row.ids is not None
        row.ids = extended(row.ids, np.array([token]))
        next_length = 1 if row.kwargs["use_cache"] else None
        inputs = model.prepare_inputs_for_generation(row.ids, next_sequence_length=next_length, **row.kwargs)
        output = model(**inputs, return_dict=True)
        row.kwargs = self._updated(output, row.kwargs)
        return output

    def _updated(self, output: ModelOutput, kwargs: dict[str, Any], num_new_tokens: int = 1) -> dict[str, Any]:
        """Return the arguments of the next forward, for `num_new_tokens` further tokens."""
        return self.model._update_model_kwargs_for_generation(  # type: ignore[operator]
            output, kwargs, self.model.config.is_encoder_decoder, num_new_tokens
        )

    def argmax(self, logits: torch.Tensor) -> list[int]:
        return argmax(logits)

    def top(self, logits: torch.Tensor, count: int, num_lines: int, with_argmax: bool) -> Top | None:
        """Return None: there are no drafts."""
        return None

    def commit(self, rows: Sequence[CacheRow], paths: Sequence[Sequence[int]]) -> None:
        """Do nothing: there are no drafts."""
