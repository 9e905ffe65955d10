"""Trials: whether a written-out decoder computes what the model's own forward does."""

from collections.abc import Callable

import numpy as np
import torch
from transformers import PreTrainedModel

from ...drafts.tree import DraftTree
from ..packed import PackedForward
from ..quantized import rounds_coarsely
from ..rotary import forget_lengths
from ..rows import RowInput
from ..twin import TWIN_REACH, borders, small_twin
from .decoder import WrittenDecoder
from .plan import make_plan

_TOLERANCE = 1e-5  # of the largest logit, in float32
_HALF_TOLERANCE = 0.1  # of the logits' spread, where it rounds coarsely, behind a trial of its architecture in float32


def agrees(model: PreTrainedModel, decoder: WrittenDecoder) -> bool:
    """
    Compares logits of ragged rows with trees, in a model that drops nothing. Models with sliding windows and the
    like, and those in half precision or int8, are tried in a small float32 twin too, over every length at which they
    change their ways.
    """
    if borders(model.config.get_text_config(decoder=True)) or rounds_coarsely(model):
        twin = small_twin(model)
        if not _compare(twin, WrittenDecoder(make_plan(twin)[0]), TWIN_REACH):
            return False
    return _compare(model, decoder, 4)


@torch.no_grad()
def _compare(model: PreTrainedModel, decoder: WrittenDecoder, num_tokens: int) -> bool:
    try:
        own, written = (_logits(model, choice, num_tokens) for choice in (lambda: None, lambda: decoder))
    finally:
        forget_lengths(model)
    error = float((own - written).abs().max())
    if not rounds_coarsely(model):
        is_same = torch.equal(own.argmax(-1), written.argmax(-1)) or error == 0
        return is_same and error <= _TOLERANCE * max(float(own.abs().max()), 1.0)
    return error <= _HALF_TOLERANCE * float(own.std())


def _logits(model: PreTrainedModel, choose: Callable[[], WrittenDecoder | None], num_tokens: int) -> torch.Tensor:
    """Logits of prompts, and of a tree behind each, `[M, vocab_size]` float32."""
    forget_lengths(model)
    size = model.config.get_text_config(decoder=True).vocab_size
    rng = np.random.default_rng(0)
    forward = PackedForward(model, 2, 2 * num_tokens + 16, prefill_chunk=num_tokens, choose=choose)
    lengths = num_tokens + 3, num_tokens
    texts = [rng.integers(3, size, length) for length in lengths]
    rows = [forward.add() for _ in texts]
    for row in rows:
        row.ahead, row.least_length = max(lengths) - len(texts[row.slot]), max(lengths)
    tree = DraftTree(rng.integers(3, size, 4), np.array([-1, 0, 0, 2]), np.ones(4, np.float32))
    chain = DraftTree.chain(rng.integers(3, size, 2))
    logits = []
    for drafts in ((DraftTree.empty(), tree), (chain, chain)):
        inputs = [RowInput(row, text[row.length :], draft) for row, text, draft in zip(rows, texts, drafts)]
        logits.append(forward.forward(inputs)[0].float().clone())
        forward.commit(rows, [[]] * 2)
        texts = [np.append(text, 5) for text in texts]
    return torch.cat(logits)
