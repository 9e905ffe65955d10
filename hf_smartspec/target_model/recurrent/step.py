"""The plan of recurrent layers for one packed forward: every token's ancestors, and the pieces that scans run."""

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch

from ...cpu.recurrence import Key, ShortTails, has_recurrence
from ...device import send_together, to_device
from ..layout.kernels.trees import ancestor_bits
from ..layout.rows import CacheRow, RowInput
from .diagonal import Levels, Trail, levels_of
from .scan import Scanned

_NO_TOKEN = -2


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
        short (`ShortTails`, *optional*): The rows for compiled code, on CPUs: whole ones, if all states are those after
            their last tokens then; else the tails.
        pieces (`ShortTails`, *optional*): The whole pieces, if they are run before `short`; the tokens of that are then
            `tokens`.
        num_prompt (`np.ndarray` of shape `[R]`): Fed tokens that belong to the rows' prompts.
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
        self.rows, self.inputs = {item.row: number for number, item in enumerate(rows)}, rows
        self.device, self.before = device, before
        counts, num_fed = np.array([item.num_tokens for item in rows]), np.array([len(item.feed) for item in rows])
        starts = np.cumsum(counts) - counts
        # Tokens of whole pieces. Where states before the last fed token are kept, the tail has the one before it, too.
        is_kept = np.array([item.row.length + len(item.feed) - 1 in item.row.marks for item in rows])
        heads = np.maximum(num_fed - 1 - is_kept, 0) // chunk * chunk
        sizes, begins = counts - heads, starts + heads
        width = int(sizes.max())
        self.entries, self.fed_in_tail = np.array(entries), num_fed - heads
        own = np.zeros(len(rows), int) if before is None else np.array([before.rows[row] for row in self.rows])
        self._lay_out_tails(rows, sizes, width, own)
        self.shape = len(rows), width
        self._starts, self._sizes, self._heads, self._own, self._chunk = starts, sizes, heads, own, chunk
        self.short = self.pieces = None
        if device.type == "cpu" and before is None and has_recurrence():
            # Rows without drafts end with their feed, unless the states before its last token are kept.
            is_open = (counts > num_fed) | is_kept
            if not is_open.any():
                self.short = _chains(starts, counts, self.entries)
            else:
                if heads.any():
                    self.pieces = _chains(*[item[heads > 0] for item in (starts, heads, self.entries)])
                    begins = np.cumsum(sizes) - sizes
                ends = np.where(is_open, -1, sizes - 1)
                self.short = ShortTails(np.stack([begins, sizes, self.entries, ends], axis=1), self.parents)
        # A row's prompt is as long as the batch's longest, less what that one is ahead.
        prompts = [item.row.least_length - item.row.ahead - item.row.length for item in rows]
        self.num_prompt = np.clip(prompts, 0, num_fed)
        self._sources: dict[int, torch.Tensor] = {}
        self.windows: dict[Key, torch.Tensor] = {}
        self.scanned: dict[Key, Scanned | Trail] = {}
        self._levels_of_pieces: dict[int, Levels] = {}

    @property
    def num_bytes(self) -> int:
        """Bytes of what the tails have left."""
        num = sum(item.nbytes for item in self.windows.values()) + sum(item.num_bytes for item in self.scanned.values())
        return num if self.short is None else num + self.short.num_bytes * self.parents.size // self.short.parents.size

    @property
    def is_stored(self) -> bool:
        """Return whether all states are those after the step."""
        return not self.windows and not self.scanned and (self.short is None or self.short.is_stored)

    @cached_property
    def _sent(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Entries, own, padded tails, places of their tokens, and bits of ancestors; and the tensors of `rounds`."""
        within, rounds = np.arange(self.shape[1]), []
        padded = (self._starts + self._heads)[:, None] + np.minimum(within, self._sizes[:, None] - 1)
        bits = np.zeros((*self.parents.shape, -(-self.parents.shape[1] // 64)), np.int64)
        ancestor_bits(self.parents, bits)
        for piece in range(int(self._heads.max()) // self._chunk):
            running = np.flatnonzero(self._heads > piece * self._chunk)
            pieces = np.arange(piece * self._chunk, (piece + 1) * self._chunk)
            rounds += [self.entries[running], self._starts[running][:, None] + pieces]
        is_token = within < self._sizes[:, None]
        tensors = [self.entries, self._own, padded, np.flatnonzero(is_token.reshape(-1)), bits, *rounds]
        sent = send_together([torch.from_numpy(item) for item in tensors], self.device)
        return sent[:5], sent[5:]

    @cached_property
    def at(self) -> slice | torch.Tensor:
        first, num = int(self.entries[0]), len(self.entries)
        is_range = bool((self.entries == np.arange(first, first + num)).all())
        return slice(first, first + num) if is_range else self._sent[0][0]

    @property
    def own(self) -> torch.Tensor:
        return self._sent[0][1]

    @property
    def _is_dense(self) -> bool:
        return bool((self._sizes == self.shape[1]).all())

    @cached_property
    def tail(self) -> torch.Tensor | None:
        return None if self._is_dense and not self._heads.any() else self._sent[0][2]

    @cached_property
    def unpadded(self) -> torch.Tensor | None:
        return None if self._is_dense else self._sent[0][3]

    @cached_property
    def tokens(self) -> torch.Tensor:
        tail = self._sent[0][2].reshape(-1)
        return tail if self.unpadded is None else tail[self.unpadded]

    @property
    def rounds(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        return list(zip(self._sent[1][::2], self._sent[1][1::2])) if self._heads.any() else []

    @cached_property
    def sees(self) -> torch.Tensor:
        seen = (self._sent[0][4][..., None] >> torch.arange(64, device=self.device)) & 1
        return seen.flatten(2)[:, None, :, : self.parents.shape[1]].bool()

    @cached_property
    def causal(self) -> torch.Tensor:
        return torch.ones(self._chunk, self._chunk, dtype=torch.bool, device=self.device).tril()[None, None]

    @cached_property
    def _parents(self) -> np.ndarray:
        num_before = 0 if self.before is None else self.before.parents.shape[1]
        return self._packed_parents(self._starts, self._heads, num_before)

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
            if reach:
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
        for start, num in zip(self._starts, self.num_prompt):
            found[start : start + num] = 1
        return to_device(found, self.device).bool()

    def tails(self, values: torch.Tensor) -> torch.Tensor:
        """Return the values of the tails' tokens, `[R, W, ...]`, of those of all tokens, `[N, ...]`."""
        return values.unflatten(0, self.shape) if self.tail is None else values[self.tail]

    def run_short(self, run: Callable[..., torch.Tensor], *given: torch.Tensor | None) -> torch.Tensor:
        """
        Run pieces and tails by compiled code, each with `run`.

        Args:
            run (`Callable`): Takes a `ShortTails` and its tokens' inputs; returns their outputs.
            given (`torch.Tensor` of shape `[N, ...]`, *optional*): Inputs of all tokens.

        Returns:
            Outputs of shape `[N, ...]`.
        """
        if self.pieces is None:
            return run(self.short, *given)
        output = run(self.pieces, *given)
        output[self.tokens] = run(self.short, *[None if item is None else item[self.tokens] for item in given])
        return output

    def scan(
        self,
        run: Callable[..., tuple[torch.Tensor, Any]],
        key: Key,
        memory: torch.Tensor,
        *given: torch.Tensor | None,
    ) -> torch.Tensor:
        """
        Run the pieces of prompts and the tails, each with `run`.

        Args:
            run (`Callable`): Takes the states of some rows, whether it runs pieces, what the step before has left, and
                the rows' inputs, with nodes as their third dimension. Returns outputs, and what it leaves.
            key (`Key`): The recurrence.
            memory (`torch.Tensor` of shape `[entries, ...]`): Its states, of which the pieces' are written.
            given (`torch.Tensor` of shape `[N, ...]`, *optional*): Inputs: queries, keys, values and others.

        Returns:
            Outputs of shape `[N, ...]`.
        """
        query, value = given[0], given[2]
        assert query is not None and value is not None
        if key in self.scanned:
            raise NotImplementedError("Layers with several recurrences are not packed.")  # those of Zamba
        output = torch.empty_like(value, dtype=query.dtype) if self.rounds else None
        for entries, tokens in self.rounds:
            parts = [None if item is None else item[tokens].transpose(1, 2) for item in given]
            found, scanned = run(memory[entries], True, None, *parts)
            memory[entries] = scanned.state_at_end(memory[entries])
            output[tokens] = found.transpose(1, 2)  # type: ignore[index]
        parts = [None if item is None else self.tails(item).transpose(1, 2) for item in given]
        before = None if self.before is None else self.before.scanned[key].of(self.own)
        found, self.scanned[key] = run(memory[self.at], False, before, *parts)
        tails = found.transpose(1, 2).flatten(0, 1)
        if self.unpadded is not None:
            tails = tails[self.unpadded]
        if output is None:
            return tails
        output[self.tokens] = tails
        return output

    def ends_of(self, rows: Sequence[CacheRow], paths: Sequence[Sequence[int]]) -> tuple[np.ndarray, np.ndarray]:
        """Return the rows' numbers, and the last token of each path in its tail; -1 if it is empty."""
        numbers = [self.rows[row] for row in rows]
        ends = [
            self.nodes[number][path[-1]] if len(path) else self.fed_in_tail[number] - 1
            for number, path in zip(numbers, paths)
        ]
        return np.array(numbers), np.array(ends)


def _chains(starts: np.ndarray, counts: np.ndarray, entries: np.ndarray) -> ShortTails:
    """Return rows without branches, whose states are stored after their last tokens."""
    within = np.arange(counts.max())
    parents = np.where(within < counts[:, None], within - 1, _NO_TOKEN)
    return ShortTails(np.stack([starts, counts, entries, counts - 1], axis=1), parents)
