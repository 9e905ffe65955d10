"""The plan of recurrent layers for one packed forward: every token's ancestors, and the pieces that scans run."""

from collections.abc import Sequence
from functools import cached_property
from itertools import chain
from typing import Any

import numpy as np
import torch

from ...device import send_together, to_device
from ..layout.kernels.trees import ancestor_bits
from ..layout.rows import CacheRow, RowInput
from .diagonal import Levels, Trail, levels_of
from .scan import Scanned

_NO_TOKEN = -2
Key = tuple[Any, int]  # layer, by its number where transformers' cache has its states, and number of the state in it


class RecurrentStep:
    """
    The tokens of R rows, N in all. A row's whole pieces of `chunk` fed tokens are run first, round by round, and change
    its state at once; the rest of its feed is run with its draft as one tree, the *tail*. The state after the accepted
    path is computed once that is known, from what the tails have left. A draft may grow by several forwards: its tail
    then begins with that of the step before, which is not run again.

    Args:
        rows (sequence of `RowInput`): The rows, in the order of their tokens.
        entries (sequence of `int`): The rows' entries in the memory of states.
        chunk (`int`): Tokens of a piece, C.
        device (`torch.device`): Device of the layers.
        before (`RecurrentStep`, *optional*): The step that has run the first nodes of all rows' drafts.

    Attributes:
        at (`slice` or `torch.Tensor` of shape `[R]`): The entries.
        rounds (list of pairs of `torch.Tensor`): For each round, the entries of the rows that run a piece, `[P]`, and
            the pieces' tokens, `[P, C]`.
        tail (`torch.Tensor` of shape `[R, W]`): The tails' tokens in this step, padded; None where these are all tokens
            in order.
        unpadded (`torch.Tensor` of shape `[tokens]`): Where tokens lie in `tail`; None where that has no padding.
        tokens (`torch.Tensor` of shape `[tokens]`): The tails' tokens.
        sees (`torch.Tensor` of shape `[R, 1, T, T]`, bool): A tail's ancestors of every token, itself included; T is W
            and the tails' length in the steps before.
        windows (dict): The last inputs of a convolution after every token of the tails, `[R, T, width - 1, channels]`.
        scanned (dict): What the tails' scans have left.
    """

    def __init__(
        self,
        rows: Sequence[RowInput],
        entries: Sequence[int],
        chunk: int,
        device: torch.device,
        before: "RecurrentStep | None" = None,
    ):
        self.rows = {item.row: number for number, item in enumerate(rows)}
        self.device, self.before = device, before
        counts, num_fed = np.array([item.num_tokens for item in rows]), np.array([len(item.feed) for item in rows])
        starts = np.cumsum(counts) - counts
        heads = np.maximum(num_fed - 1, 0) // chunk * chunk  # tokens of whole pieces
        sizes, begins = counts - heads, starts + heads
        width, num_before = int(sizes.max()), 0 if before is None else before.parents.shape[1]
        self.entries, self.fed_in_tail = np.array(entries), num_fed - heads
        own = np.zeros(len(rows), int) if before is None else np.array([before.rows[row] for row in self.rows])
        self._lay_out_tails(rows, sizes, width, own)
        self._parents = self._packed_parents(starts, heads, num_before)

        within = np.arange(width)
        padded = begins[:, None] + np.minimum(within, sizes[:, None] - 1)
        is_token = within < sizes[:, None]
        bits = np.zeros((*self.parents.shape, -(-self.parents.shape[1] // 64)), np.int64)
        ancestor_bits(self.parents, bits)
        rounds = []
        for piece in range(int(heads.max()) // chunk):
            running = np.flatnonzero(heads > piece * chunk)
            pieces = np.arange(piece * chunk, (piece + 1) * chunk)
            rounds += [self.entries[running], starts[running][:, None] + pieces]
        tensors = [self.entries, own, padded, np.flatnonzero(is_token.reshape(-1)), bits, *rounds]
        sent = send_together([torch.from_numpy(item) for item in tensors], device)
        at, self.own, tail, unpadded, words, *rest = sent
        first, is_dense = int(self.entries[0]), bool(is_token.all())
        is_range = bool((self.entries == np.arange(first, first + len(rows))).all())
        self.at = slice(first, first + len(rows)) if is_range else at
        self.tail = None if is_dense and not heads.any() else tail
        self.unpadded = None if is_dense else unpadded
        self.tokens = tail.reshape(-1) if is_dense else tail.reshape(-1)[unpadded]
        self.shape = len(rows), width
        self.rounds = list(zip(rest[::2], rest[1::2]))
        seen = (words[..., None] >> torch.arange(64, device=device)) & 1
        self.sees = seen.flatten(2)[:, None, :, : self.parents.shape[1]].bool()
        self.causal = torch.ones(chunk, chunk, dtype=torch.bool, device=device).tril()[None, None]
        self._starts = starts
        # A row's prompt is as long as the batch's longest, less what that one is ahead.
        ends = [item.row.least_length - item.row.ahead - item.row.length for item in rows]
        self._num_prompt = np.clip(ends, 0, num_fed)
        self._sources: dict[int, torch.Tensor] = {}
        self.windows: dict[Key, torch.Tensor] = {}
        self.scanned: dict[Key, Scanned | Trail] = {}
        self._levels_of_pieces: dict[int, Levels] = {}

    @property
    def num_bytes(self) -> int:
        """Bytes of what the tails have left."""
        left = [*self.windows.values(), *chain.from_iterable(self.scanned.values())]
        return sum(item.nbytes for item in left if item is not None and len(item) == len(self.rows))

    def _lay_out_tails(self, rows: Sequence[RowInput], sizes: np.ndarray, width: int, own: np.ndarray) -> None:
        """
        Set `parents`, those of all tokens within their tails, `[R, T]`: -1 for the first ones, -2 for padding; and
        `nodes`, the positions of the rows' draft nodes in their tails.
        """
        self.parents = np.full((len(rows), width), _NO_TOKEN)
        self.nodes = [np.arange(fed, fed + item.num_nodes) for fed, item in zip(self.fed_in_tail, rows)]
        start = 0
        if self.before is not None:
            self.parents = np.concatenate([self.before.parents[own], self.parents], axis=1)
            start = self.before.parents.shape[1]
            known = [self.before.nodes[number] for number in own]
            self.nodes = [np.append(first, start + last) for first, last in zip(known, self.nodes)]
            self.fed_in_tail = self.before.fed_in_tail[own]
        for number, (item, size) in enumerate(zip(rows, sizes)):
            num_nodes = item.num_nodes
            self.parents[number, start : start + size - num_nodes] = np.arange(-1, size - num_nodes - 1)
            if num_nodes:
                parents, positions = np.asarray(item.tree.parents)[item.first_node :], self.nodes[number]
                last = self.fed_in_tail[number] - 1
                new = positions[item.first_node :]
                self.parents[number, new] = np.where(parents < 0, last, positions[np.maximum(parents, 0)])

    def _packed_parents(self, starts: np.ndarray, heads: np.ndarray, num_before: int) -> np.ndarray:
        """
        Return the parent of every token among the step's tokens, `[N]`; -1 - b for those without, whose convolutions
        read the window b: of the rows, R in all, or after the tokens of the tails before, `[R, T before]`.
        """
        parts = []
        for number, (start, head) in enumerate(zip(starts.tolist(), heads.tolist())):
            own = self.parents[number, num_before:]
            own = own[own != _NO_TOKEN]
            window = np.where(own < 0, number, len(starts) + number * num_before + own)
            parents = np.where(own >= num_before, own - num_before + start + head, -1 - window)
            if head:
                parents[0] = start + head - 1
                parts.append(np.arange(start - 1, start + head - 1))
                parts[-1][0] = -1 - number
            parts.append(parents)
        return np.concatenate(parts)

    def sources(self, width: int, num_windows: int) -> torch.Tensor:
        """
        Return the sources of every token's convolution, itself last, `[N, width]`: indices into the step's inputs,
        followed by the inputs of `num_windows` windows.
        """
        if width not in self._sources:
            num, reach = len(self._parents), width - 1
            before = np.arange(num, num + num_windows * reach).reshape(num_windows, reach)
            parents = np.concatenate([self._parents, np.maximum(before - 1, before[:, :1]).reshape(-1)])
            roots = self._parents < 0
            parents[:num][roots] = before[-self._parents[roots] - 1, -1]
            found = np.empty((num, width), np.int64)
            found[:, -1] = np.arange(num)
            for column in range(reach - 1, -1, -1):
                found[:, column] = parents[found[:, column + 1]]
            self._sources[width] = to_device(found, self.device)
        return self._sources[width]

    @cached_property
    def levels(self) -> Levels:
        """The tails' tokens by depth."""
        return levels_of(self.parents, self.device)

    def levels_of_pieces(self, num: int) -> Levels:
        """Return the tokens of `num` pieces by depth."""
        if num not in self._levels_of_pieces:
            parents = np.tile(np.arange(-1, len(self.causal[0, 0]) - 1), (num, 1))
            self._levels_of_pieces[num] = levels_of(parents, self.device)
        return self._levels_of_pieces[num]

    def is_prompt(self) -> torch.Tensor:
        """Return for every token whether it belongs to a prompt, `[N]`, bool."""
        found = np.zeros(len(self._parents), np.int64)
        for start, num in zip(self._starts, self._num_prompt):
            found[start : start + num] = 1
        return to_device(found, self.device).bool()

    def tails(self, values: torch.Tensor) -> torch.Tensor:
        """Return the values of the tails' tokens, `[R, W, ...]`, of those of all tokens, `[N, ...]`."""
        return values.unflatten(0, self.shape) if self.tail is None else values[self.tail]

    def ends_of(self, rows: Sequence[CacheRow], paths: Sequence[Sequence[int]]) -> tuple[np.ndarray, np.ndarray]:
        """Return the rows' numbers, and the last token of each path in its tail; -1 if it is empty."""
        numbers = [self.rows[row] for row in rows]
        ends = [
            self.nodes[number][path[-1]] if len(path) else self.fed_in_tail[number] - 1
            for number, path in zip(numbers, paths)
        ]
        return np.array(numbers), np.array(ends)
