"""The plan of recurrent layers for one packed forward: every token's ancestors, and the pieces that scans run."""

from collections.abc import Sequence

import numpy as np
import torch

from ...device import send_together, to_device
from ..layout.kernels.trees import ancestor_bits
from ..layout.rows import CacheRow, RowInput
from .scan import Scanned


class RecurrentStep:
    """
    The tokens of R rows, N in all. A row's whole pieces of `chunk` fed tokens are run first, round by round, and change
    its state at once; the rest of its feed is run with its draft as one tree, the *tail*. The state after the accepted
    path is computed once that is known, from what the tails have left.

    Args:
        rows (sequence of `RowInput`): The rows, in the order of their tokens.
        places (sequence of `int`): The rows' places in the memory of states.
        chunk (`int`): Tokens of a piece, C.
        device (`torch.device`): Device of the layers.

    Attributes:
        at (`slice` or `torch.Tensor` of shape `[R]`): The places.
        rounds (list of pairs of `torch.Tensor`): For each round, the places of the rows that run a piece, `[P]`, and
            the pieces' tokens, `[P, C]`.
        tail (`torch.Tensor` of shape `[R, T]`): The tails' tokens, padded; None where these are all tokens in order.
        unpadded (`torch.Tensor` of shape `[tokens]`): Where tokens lie in `tail`; None where that has no padding.
        sees (`torch.Tensor` of shape `[R, 1, T, T]`, bool): A tail's ancestors of every token, itself included.
        inputs (dict): The convolutions' inputs of all tokens and the rows' windows, `[N + R * (width - 1), channels]`,
            with the width, by layer and number of the convolution.
        scanned (dict): What the tails' scans have left, by layer and number of the state.
    """

    def __init__(self, rows: Sequence[RowInput], places: Sequence[int], chunk: int, device: torch.device):
        if any([item.first_node for item in rows]):
            raise NotImplementedError("Recurrent layers run the whole draft of a row in one forward.")
        self.rows = {item.row: number for number, item in enumerate(rows)}
        self.device = device
        counts = np.array([item.num_tokens for item in rows])
        self._starts = np.cumsum(counts) - counts
        self.num_fed = np.array([len(item.feed) for item in rows])
        heads = np.maximum(self.num_fed - 1, 0) // chunk * chunk  # tokens of whole pieces
        self._parents = _parents(rows, counts, self._starts)
        self._windows: dict[int, torch.Tensor] = {}
        self.places = np.array(places)
        first = int(self.places[0])
        is_range = bool((self.places == np.arange(first, first + len(places))).all())

        sizes, begins = counts - heads, self._starts + heads
        self.tails_begin, self.fed_in_tail = begins, self.num_fed - heads
        width = int(sizes.max())
        within = np.arange(width)
        padded = begins[:, None] + np.minimum(within, sizes[:, None] - 1)
        is_token = within < sizes[:, None]
        parents = np.where(is_token, self._parents[padded] - begins[:, None], -1)
        bits = np.zeros((len(rows), width, -(-width // 64)), np.int64)
        ancestor_bits(sizes, np.maximum(parents, -1), bits)
        is_dense, has_heads = bool(is_token.all()), bool(heads.any())
        rounds = []
        for piece in range(int(heads.max()) // chunk):
            own = np.flatnonzero(heads > piece * chunk)
            rounds += [self.places[own], self._starts[own][:, None] + np.arange(piece * chunk, (piece + 1) * chunk)]
        tensors = [self.places, padded, np.flatnonzero(is_token.reshape(-1)), bits, *rounds]
        places_, tail, unpadded, words, *pieces = send_together([torch.from_numpy(item) for item in tensors], device)
        self.at = slice(first, first + len(places)) if is_range else places_
        self.tail = None if is_dense and not has_heads else tail
        self.unpadded = None if is_dense else unpadded
        self.tokens = tail.reshape(-1) if is_dense else tail.reshape(-1)[unpadded]
        self.shape = len(rows), width
        self.rounds = list(zip(pieces[::2], pieces[1::2]))
        seen = (words[..., None] >> torch.arange(64, device=device)) & 1
        self.sees = seen.flatten(2)[:, None, :, :width].bool()
        self.causal = torch.ones(chunk, chunk, dtype=torch.bool, device=device).tril()[None, None]
        self.inputs: dict[tuple[int, int], tuple[torch.Tensor, int]] = {}
        self.scanned: dict[tuple[int, int], Scanned] = {}

    def windows(self, width: int) -> torch.Tensor:
        """
        Return for every token the places of its `width` nearest inputs in `inputs`, itself last: its ancestors in the
        step, then the row's window. `[N, width]`.
        """
        if width not in self._windows:
            num, reach = len(self._parents), width - 1
            before = np.arange(num, num + len(self.rows) * reach).reshape(len(self.rows), reach)
            parents = np.concatenate([self._parents, np.maximum(before - 1, before[:, :1]).reshape(-1)])
            roots = self._parents < 0
            parents[:num][roots] = before[-self._parents[roots] - 1, -1]
            found = np.empty((num, width), np.int64)
            found[:, -1] = np.arange(num)
            for place in range(reach - 1, -1, -1):
                found[:, place] = parents[found[:, place + 1]]
            self._windows[width] = to_device(found, self.device)
        return self._windows[width]


def _parents(rows: Sequence[RowInput], counts: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """Return the parent of every token among the step's tokens, `[N]`; -1 - r for the roots of row r."""
    parents = np.arange(-1, int(counts.sum()) - 1)
    for number, item in enumerate(rows):
        start, num_fed = int(starts[number]), len(item.feed)
        if item.num_nodes:
            own = np.asarray(item.tree.parents, np.int64)
            last = start + num_fed - 1 if num_fed else -1 - number
            parents[start + num_fed : start + item.num_tokens] = np.where(own < 0, last, own + start + num_fed)
        if num_fed:
            parents[start] = -1 - number
    return parents


def path_ends(
    step: RecurrentStep, rows: Sequence[CacheRow], paths: Sequence[Sequence[int]]
) -> tuple[np.ndarray, np.ndarray]:
    """Return the rows' numbers in the step, and the last token of each path in its tail; -1 if it is empty."""
    numbers = np.array([step.rows[row] for row in rows])
    ends = [step.fed_in_tail[number] + (path[-1] if len(path) else -1) for number, path in zip(numbers, paths)]
    return numbers, np.array(ends)
