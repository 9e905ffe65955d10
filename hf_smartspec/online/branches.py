"""Forwards of draft models over texts with branches of rejected drafts."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from .drafted import Drafted, Layout

_AS_PLAIN = 0.2  # allowed error, as a share of the error that ignoring the layout makes


def logits_with_branches(model: Any, ids: torch.Tensor, layout: Layout, first: int = 0) -> torch.Tensor:
    """
    Return a decoder's logits `[rows, length - first, vocab_size]` after each token from column `first` on.

    Args:
        ids (`torch.Tensor` of shape `[rows, length]`): Texts, followed by their rejected drafts.
        layout (`Layout`): Places of the rejected drafts.
    """
    mask = layout.attends[:, None]  # [rows, 1, length, length], for all heads
    if model.config._attn_implementation == "eager":  # eager attention adds the mask to scores
        dtype = next(model.parameters()).dtype
        mask = torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, torch.finfo(dtype).min)
    arguments = {"logits_to_keep": ids.shape[1] - first} if model._supports_logits_to_keep() else {}
    output = model(input_ids=ids, attention_mask=mask, position_ids=layout.positions, use_cache=False, **arguments)
    logits: torch.Tensor = output.logits
    return logits[:, first - ids.shape[1] :]


@torch.no_grad()
def reads_branches(model: nn.Module, max_length: int) -> bool:
    """
    Return whether a decoder's attention follows the mask of texts with branches, of up to `max_length` tokens, by a
    test with a small text.
    """
    decoder: Any = model
    window = getattr(decoder.config.get_text_config(), "sliding_window", None)
    if window is not None and window < max_length:  # the masks here have no windows
        return False
    device = next(model.parameters()).device
    text, first, second = [3, 4, 5, 6, 7], [8, 9], [10]  # branches after the second and the third token
    drafted = _probe([*first, *second], parents=[-1, 0, -1], roots=[1, 1, 2])
    ids = torch.tensor([[*text, *first, *second]], device=device)
    try:
        found = logits_with_branches(model, ids, Layout.of([1], [5], [drafted], 8).to(device))[0, 5:]
        paths = [[*text[:2], 8], [*text[:2], 8, 9], [*text[:3], 10]]
        plain = [torch.tensor([path], device=device) for path in paths]
        wanted = torch.cat([decoder(input_ids=path, use_cache=False).logits[:, -1] for path in plain])
        ignored = decoder(input_ids=ids, use_cache=False).logits[0, 5:]
    except Exception:  # models may raise anything for masks of another kind than theirs
        return False
    return bool((found - wanted).abs().max() <= _AS_PLAIN * (ignored - wanted).abs().max())


def _probe(tokens: Sequence[int], parents: Sequence[int], roots: Sequence[int]) -> Drafted:
    nothing = torch.zeros(len(tokens), 1)
    return Drafted(
        np.ones(4, bool), np.array(tokens), np.array(parents), np.array(roots), nothing.int(), nothing.half()
    )
