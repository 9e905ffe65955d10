"""SSSD's datastore: the continuations of the last tokens in a large fixed text, found in microseconds."""

import os
from collections.abc import Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from ....drafts.price import LevelPrice
from ....drafts.tree import DraftTree
from ....validate import is_integer
from ...base import TYPICAL_NODES, TreeCandidateGenerator
from .file import Datastore
from .search import Drafts, Settings, Text, propose

_ROWS_PER_THREAD = 8  # fewer are done before another thread has woken up
_MOST_NODES = 63  # nodes of a draft, where goodput decides
_MAX_NUMBER = 100_000  # of any setting; counts of occurrences, times their depth, stay far within int32


class DatastoreCandidates(TreeCandidateGenerator):
    """
    Proposes what followed the last tokens of the request in a large text ("SSSD: Simply-Scalable Speculative Decoding",
    section 3.1.2). It looks for the longest end of the request that occurs, picks continuations at regular intervals
    among all occurrences, goes on with shorter ends until there are enough, and merges all into one tree that counts
    occurrences. Matches of a longer end also match a shorter one, and count again there. `probs` of the drafts are
    ratios of counts: how often the node followed its parent; `match_lengths` are those of the longest ends that the
    nodes followed. The best `max_nodes` nodes are proposed, best first.

    Keeps no state but the last tokens. It does not draft from the request's own text: combine it with a source that
    does. The engine drops drafts with ids beyond the target's vocabulary, but ids that mean other tokens there are
    just never accepted: pass `tokenizer` to have it checked.

    Args:
        datastore (`Datastore`, `str` or `os.PathLike`): The text, or the file where it lies (see `build_datastore`).
        num_nodes (`int`, *optional*): Nodes per row where the caller names no number. Where not given, 16, and where
            goodput decides, up to 63: beyond 16, those that promise more tokens than they cost.
        max_prefix (`int`): The longest end of a request that is looked for, in tokens.
        min_continuations (`int`): Shorter ends are tried until one has so many continuations.
        num_continuations (`int`): Continuations that are picked per end, at most (M of the paper).
        branch_len (`int`): Tokens per continuation, at most.
        breadth (`int`, *optional*): Continuations of drafts of n nodes have at most `n / breadth` tokens (and one at
            least), so that small drafts are broad rather than deep (SSSD, section 4.3). By default, `branch_len` alone
            bounds them.
        first_n (`bool`): Pick the first continuations in sorted order instead of such at regular intervals. That is
            how REST does it (He et al., 2023), with `min_continuations=1, num_continuations=5000`; for comparison.
        tokenizer (`PreTrainedTokenizerBase`, *optional*): The target's; the datastore must have been built with it.

    Raises:
        ValueError: for numbers out of range, files that are no valid datastore, and another tokenizer.
        TypeError: for a datastore of another type.
    """

    label = "datastore"

    def __init__(
        self,
        datastore: Datastore | str | os.PathLike[str],
        num_nodes: int | None = None,
        max_prefix: int = 8,
        min_continuations: int = 10,
        num_continuations: int = 100,
        branch_len: int = 8,
        breadth: int | None = None,
        first_n: bool = False,
        tokenizer: PreTrainedTokenizerBase | None = None,
    ):
        _check_positive(
            num_nodes=TYPICAL_NODES if num_nodes is None else num_nodes,
            max_prefix=max_prefix,
            min_continuations=min_continuations,
            num_continuations=num_continuations,
            branch_len=branch_len,
            breadth=1 if breadth is None else breadth,
        )
        if min_continuations > num_continuations:
            raise ValueError(
                "`min_continuations` must not exceed `num_continuations`, of which no more are picked; got "
                f"{min_continuations} > {num_continuations}."
            )
        if not isinstance(first_n, bool):
            raise TypeError(f"`first_n` must be a bool, got {first_n!r}.")
        datastore = _as_datastore(datastore, tokenizer)
        if max_prefix + branch_len > datastore.sort_depth:
            raise ValueError(
                f"`max_prefix` and `branch_len` together must not exceed {datastore.sort_depth}, the depth to which "
                f"the datastore is sorted; got {max_prefix} + {branch_len}. Build it with a larger `sort_depth`."
            )
        self.datastore = datastore
        self.default_num_nodes = num_nodes or TYPICAL_NODES
        self.heeds_prices = num_nodes is None
        self.most_nodes = num_nodes or _MOST_NODES
        self.max_prefix = max_prefix
        self._text = Text(datastore.tokens, datastore.suffixes, datastore.starts)
        # All ends but the last one that is looked at have fewer than `min_continuations`.
        most_picked = num_continuations + (max_prefix - 1) * (min_continuations - 1)
        self._settings = Settings(
            int(min_continuations),
            int(num_continuations),
            int(branch_len),
            int(breadth or 0),
            first_n,
            int(1 + most_picked * branch_len),
            usual=TYPICAL_NODES,
            least=0.0,
        )
        self._ends: dict[Hashable, np.ndarray] = {}  # the last `max_prefix` tokens, int32, -1 where there are fewer
        self._pool: tuple[int, ThreadPoolExecutor] | None = None  # and the process that it belongs to
        self.warm_up()

    def warm_up(self) -> None:
        """Compile the search, or load it from the disk where it was compiled before. Done at construction."""
        self._search(np.full((1, self.max_prefix), -1, np.int32), np.ones(1, np.int64), self._settings)

    @property
    def name(self) -> str:
        return f"{type(self).__name__}({self.datastore.num_tokens} tokens, {id(self.datastore):x})"

    def start(self, request_id: Hashable, prompt: np.ndarray) -> None:
        self._ends[request_id] = np.full(self.max_prefix, -1, np.int32)
        self.observe(request_id, prompt)

    def observe(self, request_id: Hashable, tokens: np.ndarray) -> None:
        end, tokens = self._ends[request_id], tokens[-self.max_prefix :]
        if len(tokens):
            end[: -len(tokens)] = end[len(tokens) :]
            end[-len(tokens) :] = tokens

    def stop(self, request_id: Hashable) -> None:
        self._ends.pop(request_id, None)

    def propose(
        self, request_ids: Sequence[Hashable], max_nodes: Sequence[int], price: LevelPrice | None = None
    ) -> list[DraftTree]:
        """Propose drafts; where a node costs little, also unlikely nodes."""
        if not len(request_ids):
            return []
        least = price.least_probability if self.heeds_prices and price is not None else 0.0
        ends = np.array([self._ends[name] for name in request_ids])
        return self._search(ends, np.array(max_nodes, np.int64), self._settings._replace(least=least)).trees()

    def _search(self, ends: np.ndarray, limits: np.ndarray, settings: Settings) -> Drafts:
        num_rows = len(ends)
        drafts = Drafts.of(num_rows, min(max(0, int(limits.max())), settings.capacity))
        num_threads = max(1, min(torch.get_num_threads(), num_rows // _ROWS_PER_THREAD))
        borders = [num_rows * thread // num_threads for thread in range(num_threads + 1)]
        # Threads of Python's, not of numba's: the latter's end the process when two engines draft at once, or after a
        # fork.
        others = [
            self._threads().submit(propose, self._text, ends, limits, settings, drafts, first, last)
            for first, last in pairwise(borders[1:])
        ]
        propose(self._text, ends, limits, settings, drafts, 0, borders[1])
        for other in others:
            other.result()
        return drafts

    def _threads(self) -> ThreadPoolExecutor:
        if self._pool is None or self._pool[0] != os.getpid():  # threads do not survive a fork
            self._pool = os.getpid(), ThreadPoolExecutor(thread_name_prefix="datastore")
        return self._pool[1]


def _check_positive(**numbers: int) -> None:
    for name, value in numbers.items():
        if not is_integer(value) or not 1 <= value <= _MAX_NUMBER:
            raise ValueError(f"`{name}` must be an integer in [1, {_MAX_NUMBER}], got {value!r}.")


def _as_datastore(
    datastore: Datastore | str | os.PathLike[str], tokenizer: PreTrainedTokenizerBase | None
) -> Datastore:
    if isinstance(datastore, str | os.PathLike):
        return Datastore.open(datastore, tokenizer)
    if not isinstance(datastore, Datastore):
        raise TypeError(f"`datastore` must be a Datastore or a path, got {type(datastore).__name__}.")
    if tokenizer is not None:
        datastore.check_tokenizer(tokenizer)
    return datastore
