"""The slots of running requests: their memory, what was learnt, and the compiled calls that work on both."""

from collections.abc import Hashable, Iterable, Sequence

import numpy as np

from ....drafts.tree import DraftTree
from ....validate import is_integer
from ...committed import Likeliest
from .corpus import SuffixCorpus
from .kernels.batch import (
    END,
    NAMESPACE,
    NUM_ADDRESSES,
    NUM_PENDING,
    REMOVALS_SEEN,
    START,
    STATE,
    Batch,
    Slots,
    absorb,
    begin,
    draft_batch,
    draft_batch_by_counts,
    new_batch,
    new_slots,
)
from .kernels.expand import BY_COUNTS, LEAST, LONGEST, MAX_TREES, NODES, WALKS, Scratch, new_scratch
from .kernels.likely import new_lines, write_lines
from .kernels.mix import Model, log_odds, new_model

MOST_NODES = 2**12  # of a draft; a slot takes about 1.5 kB for each
_NUM_SLOTS, _NUM_ROWS, _NUM_NODES = 8, 16, 64  # at first
_MOST_UNWRITTEN = 256  # steps of requests whose likeliest tokens wait for a draft


class SuffixSlots:
    """
    Memory for running requests, which grows as needed. Compiled code finds all of it through one table of addresses.

    Args:
        corpus (`SuffixCorpus`): Holds the trees and texts.
        settings (sequence of `float`): See `kernels.expand`; without `NODES` and `WALKS`.

    Attributes:
        lines (dict): The line of the model that each namespace learns in.
        used (`np.ndarray`): The corpus' array whose address compiled code has.
    """

    def __init__(self, corpus: SuffixCorpus, settings: Sequence[float]):
        num_walks = 1 << (int(settings[LONGEST]) - 1).bit_length()
        self._corpus, self._settings = corpus, np.array([*settings, _NUM_NODES, num_walks], np.float64)
        self._draft_batch = draft_batch_by_counts if self._settings[BY_COUNTS] else draft_batch
        self._table = np.zeros(NUM_ADDRESSES, np.int64)
        self._address = int(self._table.ctypes.data)
        self._replace(new_model(), *self._memory(_NUM_SLOTS, _NUM_NODES), new_batch(_NUM_ROWS, _NUM_NODES))
        self.lines = dict[Hashable, int]()
        self._unwritten: dict[int, list[Likeliest]] = {}  # by line of the model
        self._free_slots, self._free_lines = list(range(_NUM_SLOTS)), [0]

    @property
    def least_probability(self) -> float:
        """Least probability of the path to a node that is proposed."""
        return float(self._settings[LEAST])

    @least_probability.setter
    def least_probability(self, least: float) -> None:
        self._settings[LEAST] = least

    @property
    def num_bytes(self) -> int:
        """Bytes of slots and drafts; what was learnt does not count."""
        return sum(array.nbytes for group in (self._slots, self._scratch, self._batch) for array in group)

    def refresh(self) -> None:
        """Look up the addresses of all arrays again, after the corpus replaced one."""
        self._replace(self.model, self._slots, self._scratch, self._batch)

    def _memory(self, num_slots: int, num_nodes: int) -> tuple[Slots, Scratch]:
        """Return new memory for drafts of `num_nodes` nodes, the last committed token included."""
        longest, num_walks = int(self._settings[LONGEST]), int(self._settings[WALKS])
        slots = new_slots(num_slots, self._corpus.max_depth, num_walks, num_nodes)
        return slots, new_scratch(num_slots, num_nodes, longest)

    def _replace(self, model: Model, slots: Slots, scratch: Scratch, batch: Batch) -> None:
        """
        Let compiled code and Python work on these arrays from now on. An error or interrupt leaves all the old ones.
        """
        corpus = self._corpus
        groups = corpus.store, model, slots, scratch, batch
        arrays = [*(array for group in groups for array in group), self._settings, corpus.owners, corpus.used]
        addresses = np.array([array.ctypes.data for array in arrays], np.int64)
        num_nodes = slots.pending.shape[1]
        # As memoryviews: numpy is slow on single elements.
        state, rows = slots.state.reshape(-1).data, (batch.slots.data, batch.limits.data, batch.ends.data)
        # No calls from here on: Python handles signals at calls. The old arrays live as long as the table names them.
        self._table[:], self._settings[NODES], self._num_nodes = addresses, num_nodes, num_nodes
        self.model, self._slots, self._scratch, self._batch = model, slots, scratch, batch
        self._arrays, self.used, self._state, self._rows = arrays, arrays[-1], state, rows

    # Slots

    def take(self, start: int, roots: Sequence[int], namespace: Hashable) -> int:
        """
        Return a slot for a text that begins at position `start` and drafts from these trees, the first of them its own.
        """
        line = self._line(namespace)
        if not self._free_slots:
            num = len(self._slots.state)
            slots, scratch = self._memory(num, self._num_nodes)
            slots, scratch = Slots(*_doubled(self._slots, slots)), Scratch(*_doubled(self._scratch, scratch))
            self._replace(self.model, slots, scratch, self._batch)
            self._free_slots = list(range(num, 2 * num))
        slot = self._free_slots.pop()
        self._slots.trees[slot] = [*roots, *[-1] * (MAX_TREES - len(roots))]
        self._slots.points[slot, :2] = roots[0], 0
        self._slots.state[slot] = start, start, 0, 0, line, 0, -1, 0
        self._slots.pointers[slot] = -1
        return slot

    def give_back(self, slot: int) -> None:
        self._slots.trees[slot] = -1
        self._free_slots.append(slot)

    def span(self, slot: int) -> tuple[int, int]:
        """Return where the text begins and ends."""
        return self._state[slot * STATE + START], self._state[slot * STATE + END]

    def root(self, slot: int) -> int:
        """Return the root of the text's own tree."""
        return int(self._slots.trees[slot, 0])

    def move(self, slot: int, distance: int) -> None:
        """Update the slot after its text was moved."""
        self._slots.state[slot, [START, END]] += distance
        self._slots.state[slot, REMOVALS_SEEN] = -1  # walks name text positions
        self._slots.pointers[slot] = -1

    def reads(self, root: int) -> bool:
        """Return whether a request drafts from this tree."""
        return bool((self._slots.trees == root).any())

    # Decoding

    def begin(self, slot: int, tokens: np.ndarray) -> None:
        """Append the prompt (int32 `[n]`)."""
        begin(self._address, slot, tokens)

    def append(self, slot: int, tokens: np.ndarray) -> None:
        """Append committed tokens. They join the tree with the next draft, which saves a compiled call."""
        at = slot * STATE + NUM_PENDING
        end = self._state[at] + len(tokens)
        if end > self._num_nodes:
            self.absorb(slot)
            for first in range(0, len(tokens), self._num_nodes):
                self.append(slot, tokens[first : first + self._num_nodes])
            return
        self._slots.pending[slot, end - len(tokens) : end] = tokens
        self._state[at] = end

    def add_likeliest(self, slot: int, item: Likeliest) -> None:
        """
        Note the target's likeliest tokens of a slot, for drafts of its namespace; the next draft writes them.

        Raises:
            ValueError: if the arrays are of different lengths. Compiled code relies on it.
        """
        if not len(item.before) == len(item.tokens) == len(item.following) or item.following.shape != item.shares.shape:
            shapes = ", ".join([str(array.shape) for array in item])
            raise ValueError(f"likeliest tokens must be arrays of [n], [n], [n, k] and [n, k], got {shapes}.")
        items = self._unwritten.setdefault(self._state[slot * STATE + NAMESPACE], [])
        items.append(item)
        if len(items) >= _MOST_UNWRITTEN:
            self.write_likeliest()

    def write_likeliest(self) -> None:
        """Write to the model what was noted of the target's likeliest tokens: for all slots of a step at once."""
        for namespace, items in self._unwritten.items():
            for before, tokens, following, shares in items:
                following, shares = np.ascontiguousarray(following, np.int64), np.ascontiguousarray(shares, np.float32)
                write_lines(self.model.likely[namespace], before, tokens, following, shares)
        self._unwritten.clear()

    def absorb(self, slot: int) -> None:
        """Add the appended tokens to the tree now."""
        absorb(self._address, slot, self._corpus.clock)

    def draft(self, slots: Sequence[int], limits: Sequence[int]) -> list[DraftTree]:
        """Return drafts of up to so many nodes for these slots."""
        self.write_likeliest()
        num_rows = len(slots)
        if num_rows and max(limits) >= self._num_nodes:
            self._make_room(min(1 << max(limits).bit_length(), MOST_NODES + 1))  # seldom: the next power of two
        if num_rows > len(self._batch.slots):
            self._replace(self.model, self._slots, self._scratch, new_batch(2 * num_rows, self._num_nodes))
        batch, (row_slots, row_limits, row_ends) = self._batch, self._rows
        for row in range(num_rows):
            row_slots[row], row_limits[row] = slots[row], limits[row]
        self._draft_batch(self._address, num_rows, self._corpus.clock)
        total = row_ends[num_rows - 1] if num_rows else 0
        tokens, parents, probs = batch.tokens[:total].copy(), batch.parents[:total].copy(), batch.probs[:total].copy()
        trees, start = [], 0
        for end in row_ends[:num_rows]:
            if start < end:
                nodes = slice(start, end)
                trees.append(DraftTree.of(tokens[nodes], parents[nodes], probs[nodes]))
                start = end
            else:
                trees.append(DraftTree.empty())
        return trees

    def _make_room(self, num_nodes: int) -> None:
        """Make memory for larger drafts, the last committed token included."""
        if num_nodes == self._num_nodes:
            return
        before = self._slots
        for slot in np.flatnonzero(before.trees[:, 0] >= 0).tolist():
            self.absorb(slot)  # then its last draft is needed no more
        slots, scratch = self._memory(len(before.state), num_nodes)
        batch = new_batch(len(self._batch.slots), num_nodes)
        self._replace(self.model, before._replace(pending=slots.pending), scratch, batch)

    # What was learnt

    def _line(self, namespace: Hashable) -> int:
        """Return the namespace's line of the model; a new one begins with nothing learnt."""
        if namespace not in self.lines:
            if not self._free_lines:
                num = len(self.model.cells)
                model = Model(*_doubled(self.model, new_model(num)))
                self._replace(model, self._slots, self._scratch, self._batch)
                self._free_lines = list(range(num, 2 * num))
            self.lines[namespace] = self._free_lines.pop()
        return self.lines[namespace]

    def forget(self, namespace: Hashable) -> None:
        """Drop what was learnt from a namespace."""
        line = self.lines.pop(namespace, None)
        if line is not None:
            self._free_lines.append(line)
            self._unwritten.pop(line, None)
            for learnt, initial in zip(self.model, new_model()):
                learnt[line] = initial[0]

    def take_over(
        self, cells: np.ndarray, weights: np.ndarray, likely: np.ndarray | None, lines: dict[Hashable, int]
    ) -> None:
        """
        Continue from what was learnt before (see `Model`), unless it was by a model of another shape.

        Raises:
            ValueError: if that cannot have been learnt. Compiled code relies on it.
        """
        initial = new_model()
        likely = new_lines(len(cells)) if likely is None else likely
        given, known = (cells, weights, likely), (initial.cells, initial.weights, initial.likely)
        if [array.shape[1:] for array in given] != [array.shape[1:] for array in known]:
            return
        if [array.dtype for array in given] != [array.dtype for array in known]:
            types = ", ".join([str(array.dtype) for array in given])
            raise ValueError(f"what was learnt must be float32, float32 and int32, got {types}.")
        if not 0 < len(cells) == len(weights) == len(likely):
            raise ValueError(
                f"every line has cells, weights and likely tokens, got {len(cells)}, {len(weights)} and {len(likely)}."
            )
        numbers = list(lines.values())
        if not all(is_integer(line) and 0 <= line < len(cells) for line in numbers) or len(set(numbers)) < len(numbers):
            raise ValueError(f"namespaces must have lines of their own, below {len(cells)}, got {lines!r}.")
        frequencies, observations = cells[:, :, 0], cells[:, :, 1]
        if not ((frequencies > 0) & (frequencies < 1) & (observations >= 0) & (observations < np.inf)).all():
            raise ValueError("frequencies must lie between 0 and 1, and numbers of observations be finite.")
        if not np.isfinite(weights).all():
            raise ValueError("weights must be finite.")
        self._replace(Model(cells, log_odds(cells), weights, likely), self._slots, self._scratch, self._batch)
        self.lines, self._free_lines = dict(lines), sorted(set(range(len(cells))) - set(numbers))


def _doubled(arrays: Iterable[np.ndarray], more: Iterable[np.ndarray]) -> list[np.ndarray]:
    return [np.concatenate([array, other]) for array, other in zip(arrays, more)]
