"""The slots of running requests: their memory, what was learnt, and the compiled calls that work on both."""

from collections.abc import Hashable, Iterable, Sequence

import numpy as np

from ..tree import DraftTree
from .suffix_batch import (
    END,
    MAX_PENDING,
    NUM_PENDING,
    START,
    STATE,
    Slots,
    absorb,
    begin,
    draft_batch,
    new_batch,
    new_slots,
)
from .suffix_corpus import SuffixCorpus
from .suffix_draft import MAX_TREES, Scratch, new_scratch
from .suffix_model import Model, new_model

_NUM_SLOTS, _NUM_ROWS = 8, 16  # at first


class SuffixSlots:
    """
    Memory for running requests, which grows as needed. Compiled code finds all of it through one table of addresses.

    Args:
        corpus (`SuffixCorpus`): Holds the trees and texts.
        settings (sequence of `float`): See `suffix_draft`.

    Attributes:
        lines (dict): The line of the model that each namespace learns in.
    """

    def __init__(self, corpus: SuffixCorpus, settings: Sequence[float]):
        self._corpus, self._settings = corpus, np.array(settings, np.float64)
        self._slots, self._scratch = new_slots(_NUM_SLOTS, corpus.max_depth), new_scratch(_NUM_SLOTS)
        self._free_slots = list(range(_NUM_SLOTS))
        self._batch = new_batch(_NUM_ROWS)
        self.model, self.lines = new_model(), dict[Hashable, int]()
        self._free_lines = [0]
        self.refresh()

    def refresh(self) -> None:
        """Looks up the addresses of all arrays again, after one was replaced."""
        corpus = self._corpus
        groups = corpus.store, self.model, self._slots, self._scratch, self._batch
        arrays = [*(array for group in groups for array in group), self._settings, corpus.owners, corpus.used]
        self._table = np.array([array.ctypes.data for array in arrays], np.int64)
        self._address = int(self._table.ctypes.data)
        # As memoryviews: numpy is slow on single elements.
        self._state, batch = self._slots.state.reshape(-1).data, self._batch
        self._rows = batch.slots.data, batch.limits.data, batch.ends.data

    # Slots

    def take(self, start: int, roots: Sequence[int], namespace: Hashable) -> int:
        """A slot for a text that begins at position `start` and drafts from these trees, the first of them its own."""
        line = self._line(namespace)
        if not self._free_slots:
            self._free_slots = list(range(len(self._slots.state), 2 * len(self._slots.state)))
            self._slots = Slots(*_doubled(self._slots, new_slots(len(self._free_slots), self._corpus.max_depth)))
            self._scratch = Scratch(*_doubled(self._scratch, new_scratch(len(self._free_slots))))
            self.refresh()
        slot = self._free_slots.pop()
        self._slots.trees[slot] = [*roots, *[-1] * (MAX_TREES - len(roots))]
        self._slots.points[slot, :2] = roots[0], 0
        self._slots.state[slot] = start, start, 0, 0, line, 0, 0, 0
        return slot

    def give_back(self, slot: int) -> None:
        self._slots.trees[slot] = -1
        self._free_slots.append(slot)

    def span(self, slot: int) -> tuple[int, int]:
        """Where the text begins and ends."""
        return self._state[slot * STATE + START], self._state[slot * STATE + END]

    def root(self, slot: int) -> int:
        """The text's own tree."""
        return int(self._slots.trees[slot, 0])

    def move(self, slot: int, distance: int) -> None:
        """The text lies elsewhere now."""
        self._slots.state[slot, [START, END]] += distance

    def reads(self, root: int) -> bool:
        """Whether a request drafts from this tree."""
        return bool((self._slots.trees == root).any())

    # Decoding

    def begin(self, slot: int, tokens: np.ndarray) -> None:
        """Appends the prompt (int32 `[n]`)."""
        begin(self._address, slot, tokens)

    def append(self, slot: int, tokens: np.ndarray) -> None:
        """Appends committed tokens. They join the tree with the next draft, which saves a compiled call."""
        at = slot * STATE + NUM_PENDING
        end = self._state[at] + len(tokens)
        if end > MAX_PENDING:
            self.absorb(slot)
            for first in range(0, len(tokens), MAX_PENDING):
                self.append(slot, tokens[first : first + MAX_PENDING])
            return
        self._slots.pending[slot, end - len(tokens) : end] = tokens
        self._state[at] = end

    def absorb(self, slot: int) -> None:
        """What was appended joins the tree now."""
        absorb(self._address, slot, self._corpus.clock)

    def draft(self, slots: Sequence[int], limits: Sequence[int]) -> list[DraftTree]:
        """Drafts of up to so many nodes for these slots."""
        num_rows = len(slots)
        if num_rows > len(self._batch.slots):
            self._batch = new_batch(2 * num_rows)
            self.refresh()
        batch, (row_slots, row_limits, row_ends) = self._batch, self._rows
        for row in range(num_rows):
            row_slots[row], row_limits[row] = slots[row], limits[row]
        draft_batch(self._address, num_rows, self._corpus.clock)
        total = row_ends[num_rows - 1] if num_rows else 0
        tokens, parents, probs = batch.tokens[:total].copy(), batch.parents[:total].copy(), batch.probs[:total].copy()
        trees, start = [], 0
        for end in row_ends[:num_rows]:
            trees.append(DraftTree.of(tokens[start:end], parents[start:end], probs[start:end]))
            start = end
        return trees

    # What was learnt

    def _line(self, namespace: Hashable) -> int:
        """The namespace's line of the model; a new one begins with nothing learnt."""
        if namespace not in self.lines:
            if not self._free_lines:
                self._free_lines = list(range(len(self.model.cells), 2 * len(self.model.cells)))
                self.model = Model(*_doubled(self.model, new_model(len(self._free_lines))))
                self.refresh()
            self.lines[namespace] = self._free_lines.pop()
        return self.lines[namespace]

    def forget(self, namespace: Hashable) -> None:
        """Forgets what was learnt from a namespace."""
        line = self.lines.pop(namespace, None)
        if line is not None:
            self._free_lines.append(line)
            for learnt, initial in zip(self.model, new_model()):
                learnt[line] = initial[0]

    def take_over(self, model: Model, lines: dict[Hashable, int]) -> None:
        """Goes on with what was learnt before, unless it was by a model of another shape."""
        if all(learnt.shape[1:] == initial.shape[1:] for learnt, initial in zip(model, new_model())):
            self.model, self.lines = model, dict(lines)
            self._free_lines = sorted(set(range(len(model.cells))) - set(lines.values()))
            self.refresh()


def _doubled(arrays: Iterable[np.ndarray], more: Iterable[np.ndarray]) -> list[np.ndarray]:
    return [np.concatenate([array, other]) for array, other in zip(arrays, more)]
