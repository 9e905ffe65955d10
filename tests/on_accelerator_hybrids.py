"""
Hybrids on an accelerator: the same logits as on the CPU, and no wait for what only the layout decides.
`test_accelerator.py` runs this file in a process of its own.
"""
# ruff: noqa: F401, F811  (fixtures)

import numpy as np
import pytest
import torch

from hf_smartspec.drafts.tree import DraftTree
from hf_smartspec.target_model.forward.packed import PackedForward
from hf_smartspec.target_model.layout.rows import RowInput

from .accelerator import DEVICE
from .generate.helpers import noisy_copy
from .models import RECURRENT, VOCAB_SIZE, new_model
from .on_accelerator import accelerator


@torch.no_grad()
@pytest.mark.skipif("qwen4_exp_text" not in RECURRENT, reason="this release has no such model")
def test_keys_are_chosen_without_a_wait(accelerator):
    """Rows have different lengths and a tree each; one has too few blocks to choose from."""
    model = new_model("qwen4_exp_text")
    model.set_experts_implementation("batched_mm")  # others wait for the counts of the experts' tokens
    rng = np.random.default_rng(0)
    texts = [rng.integers(3, VOCAB_SIZE, length) for length in (30, 3, 17)]
    tree = DraftTree(np.array([5, 6, 7, 8]), np.array([-1, -1, 1, 2]), None)
    found = []
    for place in (model, noisy_copy(model, 0.0).to(DEVICE)):
        forward = PackedForward(place)
        rows = [forward.add() for _ in texts]
        forward.forward([RowInput(row, text[:-1], DraftTree.chain([])) for row, text in zip(rows, texts)])
        forward.commit(rows, [()] * len(rows))
        with accelerator.counting() as counts:
            logits, _ = forward.forward([RowInput(row, text[-1:], tree) for row, text in zip(rows, texts)])
        found.append(logits.cpu())
    assert counts["waits"] == 0
    torch.testing.assert_close(*found)
