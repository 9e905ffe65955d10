"""Forwards of published heads of EAGLE over texts and drafts, compared with the published arithmetic."""

import copy
from dataclasses import replace

import numpy as np
import torch

from hf_smartspec.drafts.tree import DraftTree
from hf_smartspec.target_model.drafters.features import FeatureForward
from hf_smartspec.target_model.layout.rows import RowInput

from .published_eagle import Published, text_logits

# Three levels: of the first two nodes, the second has the more children.
TREE = [5, 9, 7, 6, 8, 9], [-1, -1, 0, 1, 1, 4]
LEVELS = (2, 5, 6)  # nodes down to each of them


def sizes(target) -> tuple[int, int]:
    return target.config.hidden_size, target.config.vocab_size


def texts(published: Published, target, lengths) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Texts, with random hidden states of all their tokens but the last."""
    generator = torch.Generator().manual_seed(1)
    hidden, vocab = sizes(target)
    return [
        (
            torch.randint(vocab, (length,), generator=generator),
            torch.randn(length - 1, len(published.layers) * hidden, generator=generator),
        )
        for length in lengths
    ]


def run(forward: FeatureForward, rows, items, cuts=()) -> list[torch.Tensor]:
    """
    Logits behind texts, whose first `cuts` tokens the rows hold already, and along a draft of three levels, whose nodes
    take what their parents have left.
    """
    feeds = [text[1:].numpy() for text, _ in items]
    cuts = cuts or [0] * len(rows)
    tokens, parents = map(np.array, TREE)
    inputs = [
        RowInput(row, feed[cut:], features=states[cut:])
        for row, feed, cut, (_, states) in zip(rows, feeds, cuts, items)
    ]
    lines, left, first = [[] for _ in rows], [torch.empty(0, dtype=forward.model.dtype) for _ in rows], 0
    for end in (0, *LEVELS):
        if end:
            tree = DraftTree(tokens[:end], parents[:end], np.ones(end, np.float32))
            above = parents[first:end] + 1  # the text's own is the first that was left
            inputs = [RowInput(row, feeds[0][:0], tree, first, hidden[above]) for row, hidden in zip(rows, left)]
        logits, offsets = forward.forward(inputs)
        num = end - first or 1
        for place, offset in enumerate(offsets):
            lines[place].append(logits[offset : offset + num])
            left[place] = torch.cat([left[place], forward.hidden[offset : offset + num]])
        first = end
    return [torch.cat(own) for own in lines]


def check(found, published: Published, target, items) -> None:
    """Compare logits with those of the published arithmetic in float64, up to the rounding of float32."""
    doubled = {name: item.double() if item.is_floating_point() else item for name, item in published.tensors.items()}
    published, target = replace(published, tensors=doubled), copy.deepcopy(target).double()
    for logits, (text, states) in zip(found, items):
        torch.set_default_dtype(torch.float64)
        try:
            expected = text_logits(published, target, text, states.double(), TREE)[len(text) - 2 :]
        finally:
            torch.set_default_dtype(torch.float32)
        # Sums in float32 are rounded by the size of what they add up, as large for a small logit as for the largest.
        atol = 16 * torch.finfo(torch.float32).eps * expected.abs().max().item()
        torch.testing.assert_close(logits, expected.float(), rtol=0, atol=atol)
        assert logits.std() > 0.5, "of a size at which differences are seen"
