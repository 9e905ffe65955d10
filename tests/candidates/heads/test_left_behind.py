"""Rows that no draft is asked for are not shown hidden states, and drafted for later as if they had been."""

import numpy as np
import pytest
import torch

from hf_smartspec import BlockDrafter, EagleHeads, FixedLength, MedusaHeads, MtpLayers, SmartSpecConfig
from hf_smartspec.candidates.heads.kinds import source_of
from hf_smartspec.decoding import call, committed
from hf_smartspec.decoding.call import Request
from hf_smartspec.decoding.drafting import Drafting
from hf_smartspec.goodput import Calibrator
from hf_smartspec.target_model.forward.hidden_states import select

from ...cases import left_padded
from ...decoding.shown import decoded, plain
from ...models import VOCAB_SIZE, shared_model
from . import published
from .blocks.published import random_drafter, z_lab
from .mtp_targets import load_target, write_target
from .published_eagle import LAYOUTS, random_heads

INPUTS = left_padded([[5, 9, 5, 9, 5], [11, 12], [3, 4, 5, 6, 7, 3, 4, 40, 41, 42, 43]])
LENGTH = 40


def eagle(target, folder, **options):
    heads = random_heads(32, VOCAB_SIZE, third=True, layers=(1, 2, 0), own_vocab=60, **options)
    heads.tensors["embed_tokens.weight"] = torch.randn(VOCAB_SIZE, 32, generator=torch.Generator().manual_seed(5))
    LAYOUTS["speculators"](heads, VOCAB_SIZE, folder)
    return EagleHeads.from_pretrained(folder, target)


def parallel(target, folder):
    return eagle(target, folder, mask_token=96, head_dim=16, inner=64, has_input_norm=True)


def blocks(target, folder):
    z_lab(random_drafter(32, VOCAB_SIZE, outputs=(-1, 0)), VOCAB_SIZE, folder)
    return BlockDrafter.from_pretrained(folder, target)


def medusa(target, folder):
    published.LAYOUTS["pickled"](published.random_heads(32, VOCAB_SIZE), folder)
    return MedusaHeads.from_pretrained(folder, target)


KINDS = {"eagle": eagle, "p-eagle": parallel, "blocks": blocks, "medusa": medusa, "mtp": None}


class OneByOne(FixedLength):
    """Asks for a draft of one row in every third step, of each in turn, and of all rows now and then."""

    def __init__(self):
        super().__init__(4)
        self.num_steps = 0

    def max_nodes(self, rows, stage, trees):
        self.num_steps += 1
        number, is_due = divmod(self.num_steps, 3)[0], self.num_steps % 3 == 0
        asked = (np.arange(len(rows)) == number % 4) | (number % 4 == 3)
        return super().max_nodes(rows, stage, trees) * (asked & is_due)


def drafts_of(model, heads) -> tuple[list, list]:
    """The drafts of each call, and the numbers of tokens in the steps that the source is shown."""
    source, drafts, shown = source_of(heads, Calibrator(), 2), [], []
    propose, observe = source.propose, source.observe

    def noting(request_ids, *arguments, **options):
        trees = propose(request_ids, *arguments, **options)
        drafts.append([(tree.tokens.tolist(), tree.parents.tolist()) for tree in trees])
        return trees

    source.propose = noting
    source.observe = lambda name, step: shown.append(len(step.tokens)) or observe(name, step)
    output = decoded(model, SmartSpecConfig(source, policy=OneByOne()), INPUTS, LENGTH)
    assert torch.equal(output, plain(model, INPUTS, LENGTH))
    return drafts, shown


@pytest.mark.parametrize("kind", KINDS)
def test_drafts_are_those_of_rows_that_are_shown_every_step(kind, tmp_path, monkeypatch):
    if kind == "mtp":
        write_target("glm4_moe", tmp_path)
        model = load_target(tmp_path, monkeypatch)
        heads = MtpLayers.from_pretrained("mtp", model)
    else:
        model = shared_model("llama")
        heads = KINDS[kind](model, tmp_path)
    drafts, shown = drafts_of(model, heads)
    assert sum(len(tokens) for call in drafts for tokens, _ in call) > 20, "there are drafts"
    monkeypatch.setattr(Drafting, "has_asked_with_needs", lambda self, request: True)
    monkeypatch.setattr(Request, "must_be_shown", True)
    always, shown_always = drafts_of(model, heads)
    assert drafts == always
    assert len(shown) < len(shown_always) / 2 and sum(shown) == sum(shown_always)


class NeverAsking(FixedLength):
    """Ask no source, in steps that all count as decided."""

    def __init__(self):
        super().__init__(4)

    def max_nodes(self, rows, stage, trees):
        return np.zeros(len(rows), np.int64)


def test_rows_that_have_missed_many_tokens_get_their_states_in_the_same_step(tmp_path, monkeypatch):
    """Join states of many steps once for all of them, not for each row when it has missed too many by itself."""
    monkeypatch.setattr(call, "_MOST_UNSHOWN", 20)
    model, calls = shared_model("llama"), []
    source = source_of(eagle(model, tmp_path), Calibrator(), 2)
    monkeypatch.setattr(committed, "select", lambda rows: calls.append(len(rows)) or select(rows))
    decoded(model, SmartSpecConfig(source, policy=NeverAsking()), INPUTS, LENGTH)
    while_decoding = [num for num in calls if num][:-1]  # the last one is when the rows have ended
    assert while_decoding and set(while_decoding) == {3}
