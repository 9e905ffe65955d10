"""Forwards over the same tokens, to be timed: transformers' own, and the packed one of this library."""

from collections.abc import Callable

import numpy as np
import torch
from transformers import DynamicCache, PreTrainedModel

from hf_smartspec.drafts.tree import DraftTree
from hf_smartspec.target_model.compat import cache_name
from hf_smartspec.target_model.forward.packed import PackedForward
from hf_smartspec.target_model.layout.rows import RowInput
from hf_smartspec.target_model.written import packed_forward

Forward = Callable[[], object]


def plain_forward(model: PreTrainedModel, tokens: np.ndarray, context: int, picks: bool = False) -> Forward:
    """
    Return a forward of the model's own over all tokens (`[rows, length]`) after a cached context of `context` tokens.

    Args:
        picks (`bool`): Whether the arg max of the logits is read by the host, as in decoding.
    """
    ids = torch.from_numpy(tokens).to(model.device)
    cache = DynamicCache(config=model.config)
    given = {cache_name(model.forward): cache}
    model(input_ids=ids[:, :context], **given, logits_to_keep=1)

    def forward() -> None:
        output = model(input_ids=ids[:, context:], **given)
        if picks:
            output.logits.argmax(dim=-1).tolist()
        cache.crop(context - ids.shape[1])

    return forward


def packed(
    model: PreTrainedModel, tokens: np.ndarray, context: int, picks: bool = False
) -> tuple[Forward, PackedForward]:
    """Return the packed forward over the same tokens, all but the first as a draft, and the object that computes it."""
    made = packed_forward(model, *tokens.shape)
    rows = [made.add() for _ in tokens]
    made.forward([RowInput(row, line[:context]) for row, line in zip(rows, tokens)])
    trees = [DraftTree.chain(line[context + 1 :]) for line in tokens]
    feeds = [line[context : context + 1] for line in tokens]

    def forward() -> None:
        logits, _ = made.forward([RowInput(row, feed, tree) for row, feed, tree in zip(rows, feeds, trees)])
        if picks:
            made.argmax(logits)
        for row in rows:
            made.cut(row, context)

    return forward, made
