"""Texts decoded with sources that need more than tokens, for the tests of what these are shown."""

import numpy as np
import torch

import hf_smartspec
from hf_smartspec import TreeCandidateGenerator

from ..cases import left_padded
from ..sources import Empty, Oracle, Random, WithDecoys

PROMPTS = [[5, 9, 5, 9, 5], [11], [3, 4, 5, 6, 7, 3, 4, 40, 41, 42, 43]]
INPUTS = left_padded(PROMPTS)
LENGTH = 16


def plain(model, inputs=INPUTS, length=LENGTH, **arguments):
    return model.generate(**inputs, max_new_tokens=length, **arguments)


def texts_of(sequences, inputs=INPUTS) -> list[list[int]]:
    width = inputs["input_ids"].shape[1]
    masks = torch.nn.functional.pad(inputs["attention_mask"], (0, sequences.shape[1] - width), value=1).bool()
    return [row[mask].tolist() for row, mask in zip(sequences, masks)]


def drafter(name: str, sequences=None, inputs=INPUTS) -> TreeCandidateGenerator:
    known = Oracle([] if sequences is None else texts_of(sequences, inputs))
    return {
        "nothing": Empty(),
        "chains that come true": known,
        "trees around them": WithDecoys(known, seed=1),
        "random chains": Random(0, is_tree=False),
        "random trees": Random(0, is_tree=True),
    }[name]


def decoded(model, source, inputs=INPUTS, length=LENGTH, **arguments):
    with hf_smartspec.enabled(model):
        return model.generate(**inputs, max_new_tokens=length, assistant=source, **arguments)


class OnlyTokens(Random):
    def observe(self, request_id, tokens):
        assert type(tokens) is np.ndarray and len(tokens)
        super().observe(request_id, tokens)
