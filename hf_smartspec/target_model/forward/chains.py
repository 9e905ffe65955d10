"""Forward that grows chains row by row, for draft models that the packed forward cannot serve."""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation import GenerationMode

from ..compat import CACHE
from ..layout.rows import CacheRow, RowInput


@dataclass(eq=False)
class ChainRow(CacheRow):
    """A row with a cache of its own, and the tokens in it, nodes included."""

    tokens: list[int] = field(default_factory=list)
    cache: Any = None


class ChainForward:
    """
    Forward of a draft model's rows one after the other, each with a cache of transformers' own. Chains may grow by
    several forwards before they are committed, as in a `PackedForward`.

    Args:
        model (`PreTrainedModel`): A decoder that runs row by row (`support.rowwise_obstacle`).
    """

    trees = False
    hidden = None  # tokens have no features beside their ids

    def __init__(self, model: PreTrainedModel):
        self.model = model
        self._parameters = inspect.signature(model.forward).parameters

    def add(self) -> ChainRow:
        row = ChainRow(slot=0)
        self._begin(row)
        return row

    def _begin(self, row: ChainRow) -> None:
        kwargs: dict[str, Any] = {}
        self.model._prepare_cache_for_generation(  # type: ignore[operator]
            GenerationConfig(), kwargs, GenerationMode.GREEDY_SEARCH, 1, 0
        )
        row.cache, row.tokens, row.length, row.num_nodes = kwargs[CACHE], [], 0, 0
        row.cache.activate_past_recording()

    def remove(self, row: CacheRow) -> None:
        assert isinstance(row, ChainRow)
        row.cache = None

    def cut(self, row: CacheRow, length: int) -> None:
        """
        Cut a row to at most `length` tokens: to none if it has more, since sliding windows have dropped earlier keys.
        """
        assert isinstance(row, ChainRow)
        if len(row.tokens) > length:
            self._begin(row)

    def forward(self, inputs: Sequence[RowInput]) -> tuple[torch.Tensor, list[int]]:
        """
        Run as `PackedForward.forward` does: a line of logits for the last fed token, if any, and one per new node.
        """
        logits: list[torch.Tensor] = []
        offsets: list[int] = []
        for item in inputs:
            offsets.append(sum(map(len, logits)))
            logits.append(self._run(item))
        return torch.cat(logits), offsets

    def _run(self, item: RowInput) -> torch.Tensor:
        row, num_lines = item.row, item.num_nodes + bool(len(item.feed))
        assert isinstance(row, ChainRow)
        is_first = not row.tokens
        row.tokens += [*item.feed.tolist(), *item.tree.tokens[item.first_node :].tolist()]
        ids = torch.tensor([row.tokens], device=self.model.device)
        kwargs: dict[str, Any] = {CACHE: row.cache, "attention_mask": torch.ones_like(ids)}
        if "position_ids" in self._parameters:
            kwargs["position_ids"] = torch.arange(ids.shape[1], device=ids.device)[None]
        if "logits_to_keep" in self._parameters:
            kwargs["logits_to_keep"] = num_lines
        model_inputs = self.model.prepare_inputs_for_generation(  # type: ignore[operator]
            ids, next_sequence_length=item.num_tokens, is_first_iteration=is_first, use_cache=True, **kwargs
        )
        output = self.model(**model_inputs, return_dict=True)
        row.cache = output[CACHE]
        row.length, row.num_nodes = row.length + len(item.feed), len(item.tree)
        return output.logits[0, -num_lines:]

    def commit(self, rows: Sequence[CacheRow], paths: Sequence[Sequence[int]]) -> None:
        """Crop every row's cache to its accepted path, which is the head of its chain."""
        for row, path in zip(rows, paths):
            assert isinstance(row, ChainRow)
            row.cache.crop(len(path) - row.num_nodes)
            row.length, row.num_nodes = row.length + len(path), 0
            del row.tokens[row.length :]
