"""What tests of draft models share."""

import numpy as np
import torch
from transformers import LogitsProcessorList

from hf_smartspec import DraftModelCandidates
from hf_smartspec.candidates.models import growing
from hf_smartspec.candidates.request import SourceRequest
from hf_smartspec.target_model.forward.packed import PackedForward

from ...models import VOCAB_SIZE, new_model
from ...strategies import path_to

PROMPTS = {"a": [5, 9, 5, 9, 5], "b": [11], "c": [3, 4, 5, 6, 7, 8, 9, 10]}


def look_at_the_end(monkeypatch):
    """Has drafts grow as where every look would have to wait for a device."""
    monkeypatch.setattr(growing, "waits_are_free", lambda device: False)


def start(source: DraftModelCandidates, seed: int | None = None, processors=()) -> dict[str, list[int]]:
    for name, prompt in PROMPTS.items():
        source.begin(SourceRequest(name, np.array(prompt), processors=LogitsProcessorList(processors), seed=seed))
    return {name: list(prompt) for name, prompt in PROMPTS.items()}


def next_scores(model, text: list[int]) -> torch.Tensor:
    return model(input_ids=torch.tensor([text])).logits[0, -1]


def sharp_model():
    """Whose probabilities are far from equal."""
    model = new_model("llama", seed=5)
    model.lm_head.weight.data *= 12
    return model


def check_tree(model, tree, text: list[int], width: int, limit: int) -> None:
    """Every node is among the best of its parent's continuations and carries its probability."""
    tree.check_integrity(VOCAB_SIZE)
    assert 0 < len(tree) <= limit
    best: dict[int, list[int]] = {}
    for node in range(-1, len(tree)):
        children = np.flatnonzero(tree.parents == node)
        if not len(children):
            continue
        scores = next_scores(model, text + tree.tokens[path_to(tree, node)].tolist())
        best[node] = scores.topk(width).indices.tolist()
        for child in children:
            assert int(tree.tokens[child]) in best[node], "not one of the draft's best tokens"
            np.testing.assert_allclose(tree.probs[child], scores.softmax(0)[tree.tokens[child]], rtol=1e-3)
    assert int(tree.tokens[0]) == best[-1][0], "the best token of all comes first"


def count_forwards(monkeypatch) -> list[int]:
    """How many levels every draft of the test takes, from now on."""
    counts: list[int] = []
    propose, run = DraftModelCandidates.propose, PackedForward.run

    def counting(*args):
        if counts:  # a model's trial may come before the first draft
            counts[-1] += 1
        return run(*args)

    def beginning(*args):
        counts.append(0)
        return propose(*args)

    monkeypatch.setattr(PackedForward, "run", counting)
    monkeypatch.setattr(DraftModelCandidates, "propose", beginning)
    return counts
