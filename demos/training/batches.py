"""Turning examples into micro-batches of rows of similar length, pass after pass, in a repeatable order."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from .tokenizer import Encoded

# Lengths and counts are rounded up, because the CPU's matrix kernels are compiled anew for each shape, which takes
# longer than the padding and fills gigabytes with kernels.
ROUND_LENGTH = 64
ROUND_POSITIONS = 256
IGNORED = -100


class Batch(NamedTuple):
    input_ids: torch.Tensor  # int64 (rows, length), padded on the right
    positions: torch.Tensor  # int64 (count,): indices into the flattened `input_ids` whose next token is predicted
    labels: torch.Tensor  # int64 (count,): these next tokens; IGNORED where `positions` is padded
    num_predicted: int  # labels that are not ignored


def collate(rows: Sequence[Encoded], pad_id: int, response_only: bool = False) -> Batch:
    """Pad rows on the right: under a causal mask nothing else sees the padding, so no attention mask is needed."""
    length = round_up(max(len(row.ids) for row in rows), ROUND_LENGTH)
    input_ids = torch.full((len(rows), length), pad_id, dtype=torch.long)
    positions, labels = [], []
    for i, row in enumerate(rows):
        ids = torch.from_numpy(row.ids.astype(np.int64))
        first = row.response_from if response_only else row.learn_from
        input_ids[i, : len(ids)] = ids
        positions.append(i * length + torch.arange(first - 1, len(ids) - 1))
        labels.append(ids[first:])
    num_predicted = sum(map(len, labels))
    padding = round_up(num_predicted, ROUND_POSITIONS) - num_predicted
    positions.append(torch.zeros(padding, dtype=torch.long))
    labels.append(torch.full((padding,), IGNORED))
    return Batch(input_ids, torch.cat(positions), torch.cat(labels), num_predicted)


def round_up(value: int, multiple: int) -> int:
    return value + -value % multiple


def group_by_length(lengths: np.ndarray, order: np.ndarray, batch_tokens: int) -> list[np.ndarray]:
    """Cut `order` into batches of rows of one rounded length, with at most `batch_tokens` tokens where more than one
    row is in it; all batches of a length but the last have the same number of rows."""
    rounded = lengths[order] + -lengths[order] % ROUND_LENGTH
    batches = []
    for length in np.unique(rounded):
        rows = order[rounded == length]
        size = max(batch_tokens // int(length), 1)
        batches += [rows[i : i + size] for i in range(0, len(rows), size)]
    return batches


class Mix:
    """An endless, repeatable stream of batches over weighted sources.

    Args:
        sources: pairs of (encoded rows, how often they come up in one pass).
        batch_tokens: most tokens in a batch, with padding.
        pad_id: id of the padding token.
        seed: the order is a function of the seed and the position alone, which makes resuming exact.
    """

    def __init__(
        self, sources: Sequence[tuple[Sequence[Encoded], float]], batch_tokens: int, pad_id: int, seed: int = 0
    ) -> None:
        self.rows = [row for rows, _ in sources for row in rows]
        self.sources = [(len(rows), repeat) for rows, repeat in sources]
        self.lengths = np.array([len(row.ids) for row in self.rows])
        self.batch_tokens, self.pad_id, self.seed = batch_tokens, pad_id, seed
        self.seek(0, 0)

    def seek(self, pass_index: int, batch_index: int) -> None:
        """Continue with batch `batch_index` of pass `pass_index`."""
        self.pass_index, self.batch_index = pass_index, batch_index
        rng = np.random.default_rng([self.seed, pass_index])
        picks, offset = [], 0
        for size, repeat in self.sources:
            whole, rest = divmod(repeat, 1)
            picks += [np.arange(offset, offset + size)] * int(whole)
            picks.append(offset + rng.choice(size, size=round(rest * size), replace=False))
            offset += size
        batches = group_by_length(self.lengths, rng.permutation(np.concatenate(picks)), self.batch_tokens)
        self.plan = [batches[i] for i in rng.permutation(len(batches))]

    def next_batch(self) -> Batch:
        if self.batch_index == len(self.plan):
            self.seek(self.pass_index + 1, 0)
        batch = collate([self.rows[i] for i in self.plan[self.batch_index]], self.pad_id)
        self.batch_index += 1
        return batch
