"""Blocks of all rows in one forward: the hidden states of each row by itself, whatever its context went through."""

import pytest
import torch

from hf_smartspec.candidates.heads.blocks.drafter import BlockDrafter
from hf_smartspec.target_model.drafters.blocks import BlockForward
from hf_smartspec.target_model.layout.rows import RowInput

from ....covering import part_of
from ....models import shared_model
from . import test_backbone as files
from .forwards import run_block
from .published import random_drafter, z_lab

KINDS = {
    "both ways": {"head_dim": 8},
    "causal": {"head_dim": 8, "causal": True},
    "windows": {"head_dim": 8, "windows": (4, None), "causal": (True, False)},
    "window both ways": {"head_dim": 8, "windows": (4, 4), "causal": False},
    "sinks": {"head_dim": 8, "has_sinks": True, "windows": (4, None), "causal": (True, False), "turned": 4},
    "both ways, compiled attention": {"head_dim": 16},
    "causal, compiled attention": {"head_dim": 16, "causal": True},
    "windows, compiled attention": {"head_dim": 16, "windows": (4, None), "causal": (True, False)},
    "window both ways, compiled attention": {"head_dim": 16, "windows": (4, 9), "causal": False},
}


@pytest.fixture(scope="module")
def target():
    return shared_model("llama")


def loaded(target, kind, folder) -> BlockDrafter:
    vocab = target.config.vocab_size
    z_lab(random_drafter(target.config.hidden_size, vocab, **KINDS[kind]), vocab, folder)
    return BlockDrafter.from_pretrained(folder, target)


def states_of(drafter, lengths) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(sum(lengths))
    return [torch.randn(length, drafter.fc.in_features, generator=generator) for length in lengths]


def append(forward, rows, states, lengths) -> None:
    """Feed every text as far as it lacks tokens up to these lengths."""
    inputs = [
        RowInput(row, torch.zeros(length - row.length).long().numpy(), features=own[row.length : length])
        for row, own, length in zip(rows, states, lengths)
        if length > row.length
    ]
    forward.forward(inputs)


def check(drafter, forward, rows, states, num_slots) -> None:
    anchors = [(7 * number + 3) % 90 for number in range(len(rows))]
    hidden = forward.blocks(rows, anchors, num_slots)
    assert hidden.shape == (len(rows), num_slots, drafter.config.hidden_size)
    for own, row, anchor, found in zip(states, rows, anchors, hidden):
        embeds = drafter.embed(torch.tensor([anchor]), num_slots)[0]
        torch.testing.assert_close(found, run_block(drafter, own[: row.length], embeds), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("lengths", [(7,), (9, 2, 12, 5, 9), tuple(range(2, 18))], ids=len)
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_rows_of_different_lengths_are_those_one_by_one(target, tmp_path, kind, lengths):
    drafter = loaded(target, kind, tmp_path)
    states, forward = states_of(drafter, lengths), BlockForward(drafter)
    rows = [forward.add(4) for _ in lengths]
    append(forward, rows, states, lengths)
    for num_slots in (drafter.block_size, 3):
        check(drafter, forward, rows, states, num_slots)
        assert [row.length for row in rows] == list(lengths) and not any(row.num_nodes for row in rows)
    some = slice(None, None, 2)  # rows between them are left out
    check(drafter, forward, rows[some], states[some], drafter.block_size)


@pytest.mark.parametrize("kind", ["both ways", "windows, compiled attention"])
@torch.no_grad()
def test_context_in_pieces_after_cuts_and_from_other_rows(target, tmp_path, kind):
    drafter = loaded(target, kind, tmp_path)
    lengths = (40, 5, 23)
    states, forward = states_of(drafter, lengths), BlockForward(drafter)
    forward.prefill_chunk = 7
    rows = [forward.add() for _ in lengths]
    for size in (1, 4, 38, 40):
        append(forward, rows, states, [min(size, length) for length in lengths])
        check(drafter, forward, rows, states, drafter.block_size)
    for row, length in zip(rows, (11, 3, 1)):
        forward.cut(row, length)
    check(drafter, forward, rows, states, drafter.block_size)
    append(forward, rows, states, lengths)
    other = [forward.add() for _ in lengths]
    for row, earlier in zip(other, rows):
        forward.reuse(row, earlier, 3)
    check(drafter, forward, other, states, drafter.block_size)
    append(forward, other, states, lengths)
    check(drafter, forward, [*other, *rows], [*states, *states], drafter.block_size)
    for row in rows + other:
        forward.remove(row)
    assert not forward.cache.rows


@pytest.mark.parametrize(
    "kind", part_of(files.KINDS, "z-lab, windows", "DFlash2", "Gemma 4, keys as values", "Laguna, gate of heads")
)
@pytest.mark.usefixtures("any_number_of_tokens")  # torch's products add up in an order that depends on their number
@torch.no_grad()
def test_sixteen_rows_of_every_layout_read_their_context_at_once_and_in_pieces(target, tmp_path, kind):
    files.write(kind, target, tmp_path)
    drafter, lengths, found = BlockDrafter.from_pretrained(tmp_path, target), range(1, 17), []
    states = states_of(drafter, lengths)
    for size in (16, 1, 3):
        forward = BlockForward(drafter)
        rows = [forward.add() for _ in lengths]
        for end in range(size, 16 + size, size):
            append(forward, rows, states, [min(end, length) for length in lengths])
        check(drafter, forward, rows, states, drafter.block_size)
        found.append(forward.blocks(rows, [5] * 16, drafter.block_size))
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=0, atol=1e-6)
