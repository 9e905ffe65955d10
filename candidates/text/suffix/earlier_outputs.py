"""The outputs that suffix trees draft from: adding, listing, removing, saving and loading them."""

import os
import threading
from collections.abc import Hashable, Iterable, Mapping, Sequence
from itertools import takewhile
from typing import Any, TypeVar

import numpy as np
from transformers import PreTrainedTokenizerBase
from transformers.utils.logging import tqdm

from ..datastore.file import tokenizer_fingerprint
from .corpus import SuffixCorpus
from .files import column, making_sense, read, texts_of, words
from .slots import SuffixSlots

SourceT = TypeVar("SourceT", bound="EarlierOutputs")


class EarlierOutputs:
    """Methods of a source of suffix trees for what it keeps beyond its running requests."""

    _lock: threading.RLock
    _corpus: SuffixCorpus
    _slots: SuffixSlots

    def _keep(self, tokens: np.ndarray, namespace: Hashable, is_served: bool = False) -> int | None:
        try:
            return self._corpus.add(tokens, namespace, is_served)
        finally:
            if self._corpus.used is not self._slots.used:
                self._slots.refresh()

    @property
    def max_bytes(self) -> int:
        return self._corpus.max_bytes

    def num_bytes(self) -> int:
        """Return the memory in use by all trees, in bytes."""
        with self._lock:
            return self._corpus.num_bytes

    def draft_bytes(self) -> int:
        """
        Return the memory of drafts and of what running requests have matched, in bytes. It grows by powers of two with
        their number and the largest draft, and counts neither in `num_bytes` nor for `max_bytes`.
        """
        with self._lock:
            return self._slots.num_bytes

    def num_cached_tokens(self) -> int:
        """Return the number of tokens of the outputs that are kept."""
        with self._lock:
            return self._corpus.num_tokens

    def add_outputs(
        self, outputs: Iterable[np.ndarray | Sequence[int]], namespace: Hashable = "", progress: bool = True
    ) -> list[int | None]:
        """
        Add finished outputs, as token ids. Return a number for each, which `remove_output` takes (None: it is empty, or
        memory is full).
        """
        hash(namespace)
        numbers = []
        for tokens in tqdm(outputs, desc="suffix tree", unit=" outputs", disable=not progress):
            output = checked(tokens)
            with self._lock:
                numbers.append(self._keep(output, namespace))
        return numbers

    def add_texts(
        self,
        texts: Iterable[str],
        tokenizer: PreTrainedTokenizerBase,
        namespace: Hashable = "",
        progress: bool = True,
    ) -> list[int | None]:
        """
        Do as `add_outputs` for texts, such as a column of a `datasets.Dataset`; `load_dataset("json", ...)` reads JSON
        lines.
        """
        outputs = (tokenizer(text, add_special_tokens=False).input_ids for text in texts)
        return self.add_outputs(outputs, namespace, progress)

    def outputs(self, after: int = 0, only_served: bool = False) -> list[tuple[int, Hashable, np.ndarray]]:
        """
        Return the kept outputs with a higher number than `after`: number, namespace and tokens (int32), the oldest
        first.

        Args:
            only_served (`bool`): Leave out outputs that were added or loaded.
        """
        with self._lock:
            corpus, items = self._corpus, self._corpus.outputs  # in the order of their numbers
            new = [n for n in takewhile(lambda n: n > after, reversed(items)) if items[n].is_served or not only_served]
            return [(n, items[n].namespace, corpus.tokens(n).copy()) for n in reversed(new)]

    def remove_output(self, number: int) -> None:
        """Remove one output. Raises `KeyError` if it is not kept (any more)."""
        with self._lock:
            self._corpus.remove(number)

    def remove_namespace(self, namespace: Hashable) -> None:
        """
        Remove all outputs of a namespace, and what was learnt from them.

        Raises:
            ValueError: while a request drafts from it.
        """
        with self._lock:
            root = self._corpus.roots.get(namespace, -1)
            if root >= 0 and self._slots.reads(root):
                raise ValueError(f"Namespace {namespace!r} is in use by a running request.")
            self._corpus.remove_namespace(namespace)
            self._slots.forget(namespace)

    # Files

    def save(self, path: str | os.PathLike, tokenizer: PreTrainedTokenizerBase | None = None) -> None:
        """
        Write the kept outputs and what was learnt. The file is replaced as a whole; with `tokenizer`, it can only be
        loaded for the same vocabulary.

        Raises:
            ValueError: if a namespace is no string.
        """
        with self._lock:
            lines, learnt = self.learnt()
            if not all(isinstance(name, str) for name in self._corpus.roots):
                raise ValueError(f"Namespaces must be strings to be saved, got {list(self._corpus.roots)!r}.")
            fingerprint = None if tokenizer is None else tokenizer_fingerprint(tokenizer)
            self._corpus.save(path, {"lines": lines, "fingerprint": fingerprint}, learnt)

    @property
    def has_learnt(self) -> bool:
        """Return whether it has drafted before, or continues from what others have learnt."""
        with self._lock:
            return bool(self._slots.lines)

    def learnt(self) -> tuple[list[tuple[str, int]], dict[str, np.ndarray]]:
        """
        Return what was learnt of the acceptance of drafts: the lines of the namespaces in it, and its arrays.

        Raises:
            ValueError: if a namespace is no string.
        """
        with self._lock:
            self._slots.write_likeliest()
            model, lines = self._slots.model, self._slots.lines
            if not all(isinstance(name, str) for name in lines):
                raise ValueError(f"Namespaces must be strings to be saved, got {list(lines)!r}.")
            arrays = {"cells": model.cells, "weights": model.weights, "likely": model.likely}
            return [(str(name), line) for name, line in lines.items()], {
                name: array.copy() for name, array in arrays.items()
            }

    def take_over(self, lines: Iterable[tuple[str, int]], learnt: Mapping[str, np.ndarray]) -> bool:
        """
        Continue from what another source has learnt. Return False, and change nothing, if this source has drafted
        before.

        Raises:
            ValueError: if that cannot have been learnt.
        """
        with self._lock:
            if self._slots.lines:
                return False
            likely = learnt["likely"].copy() if "likely" in learnt else None  # files of before have none
            try:
                self._slots.take_over(learnt["cells"].copy(), learnt["weights"].copy(), likely, dict(lines))
            except TypeError as error:
                raise ValueError(str(error)) from None
            return True

    @classmethod
    def load(
        cls: type[SourceT],
        path: str | os.PathLike,
        tokenizer: PreTrainedTokenizerBase | None = None,
        progress: bool = True,
        **options: Any,
    ) -> SourceT:
        """
        Return a source with the outputs of a saved file; `options` are the constructor's.

        Raises:
            OSError: if the file cannot be read.
            ValueError: if the file is damaged, foreign, of another version or of another tokenizer.
        """
        header, arrays = read(path)
        with making_sense(str(path)):
            fingerprint, names, texts = header["fingerprint"], words(header, "names"), texts_of(arrays)
            numbers = column(arrays, "namespaces", len(texts), below=len(names))
            # Files of before say nothing of use: in order.
            used = column(arrays, "used", len(texts)) if "used" in arrays else np.arange(len(texts))
        if tokenizer is not None and fingerprint not in (None, tokenizer_fingerprint(tokenizer)):
            raise ValueError(f"{path} was made with another tokenizer: its tokens mean something else.")
        source = cls(**options)
        with making_sense(str(path)):
            source.take_over(header["lines"], arrays)
        ranks = np.argsort(np.argsort(used))
        source._corpus.clock = len(texts)  # later than all of these
        progress_bar = tqdm(texts, total=len(texts), disable=not progress)
        for tokens, name, rank in zip(progress_bar, numbers.tolist(), ranks):
            number = source._keep(checked(tokens), names[name])
            if number is not None:
                source._corpus.set_last_use(number, int(rank))
        return source


def checked(tokens: np.ndarray | Sequence[int]) -> np.ndarray:
    """Return token ids as int32. Raises `TypeError` or `ValueError` for anything else."""
    array = np.asarray(tokens)
    if array.ndim != 1 or (array.size and not np.issubdtype(array.dtype, np.integer)):
        raise TypeError(f"Tokens must be a sequence of integers, got {array.dtype} of shape {array.shape}.")
    if array.size and (array.min() < 0 or array.max() >= 2**31):
        raise ValueError(f"Token ids must lie in [0, 2**31), got {array.min()} to {array.max()}.")
    return array.astype(np.int32)
