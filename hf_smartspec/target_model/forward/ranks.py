"""Models whose weights are split over several processes (tensor parallelism, by transformers' `tp_plan`)."""

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from ...drafts.tree import DraftTree
from ..model_state import state_of

_FOREVER = timedelta(days=365)  # an engine may be idle for long
_FAILED = -1


class RankFailedError(RuntimeError):
    """Failure of the process that decides for all others."""


class Ranks:
    """
    Processes that hold a model together. Each runs the same calls. Values that could differ from one process to the
    next (times, cached values, random numbers, the moment at which requests arrive) are decided by the first and
    broadcast to the others, since a forward that does not run in all of them at once never ends.

    Args:
        members (sequence of `int`): Ranks of the processes in the world; the first decides.

    Broadcasts go over the CPU, in a group of their own: no device waits for them.
    """

    def __init__(self, members: Sequence[int]):
        self._first = members[0]
        self._group = dist.new_group(list(members), backend="gloo", timeout=_FOREVER, use_local_synchronization=True)
        self.is_first = dist.get_rank() == self._first

    def broadcast(self, value: Any) -> Any:
        """Return the first process's `value`, which must be picklable, in all processes."""
        box = [value if self.is_first else None]
        dist.broadcast_object_list(box, src=self._first, group=self._group)
        return box[0]

    def clock(self) -> float:
        """Return the first process's clock, in seconds."""
        seconds = torch.tensor([time.perf_counter()], dtype=torch.float64)
        dist.broadcast(seconds, self._first, group=self._group)
        return float(seconds)

    def trees(
        self, make: Callable[[], tuple[list[DraftTree], list[DraftTree]]], num_rows: int
    ) -> tuple[list[DraftTree], list[DraftTree]]:
        """
        Return the trees proposed in one step, which only the first process has, and those to be verified, one for each
        row.

        Raises:
            RankFailedError: if the first process could not draft.
        """
        if not self.is_first:
            return [], self._received(num_rows)
        try:
            proposed, selected = make()
        except BaseException:
            self._send(torch.full((num_rows + 1,), _FAILED))
            raise
        lengths = [len(tree) for tree in selected]
        self._send(torch.tensor([*lengths, 0]))
        if any(lengths):
            parts = [part for tree in selected for part in (tree.tokens, tree.parents)]
            self._send(torch.from_numpy(np.concatenate(parts)))
        return proposed, selected

    def _received(self, num_rows: int) -> list[DraftTree]:
        lengths = torch.empty(num_rows + 1, dtype=torch.int64)
        self._send(lengths)
        if int(lengths[-1]) == _FAILED:
            raise RankFailedError("The first of the processes that hold the model could not draft; see its log.")
        data = torch.empty(2 * int(lengths.sum()), dtype=torch.int64)
        if len(data):
            self._send(data)
        trees, start = [], 0
        for length in lengths[:-1].tolist():
            tokens, parents = data.numpy()[start : start + 2 * length].reshape(2, length)
            trees.append(DraftTree.of(tokens, parents, np.ones(length, np.float32)))
            start += 2 * length
        return trees

    def _send(self, data: torch.Tensor) -> None:
        dist.broadcast(data, self._first, group=self._group)


def is_sharded(model: PreTrainedModel) -> bool:
    """Return whether several processes hold the model together."""
    return (getattr(model, "_tp_size", None) or 1) > 1 and dist.is_initialized()


def ranks_of(model: PreTrainedModel) -> Ranks | None:
    """
    Return the processes that hold the model; None where this one holds all of it. Every one of them must call this, in
    the same order for several models.
    """
    if not is_sharded(model):
        return None
    state = state_of(model)
    if state.ranks is None:
        state.ranks = Ranks(_members(model))
    return state.ranks


def _members(model: PreTrainedModel) -> list[int]:
    mesh: Any = model._device_mesh
    if mesh.ndim > 1:
        mesh = mesh["tp"]
    return dist.get_process_group_ranks(mesh.get_group())


def clock_of(model: PreTrainedModel) -> Callable[[], float]:
    """Return a clock, in seconds, that is the same in all processes that hold the model."""
    ranks = ranks_of(model)
    return time.perf_counter if ranks is None else ranks.clock


def engine_ranks(model: PreTrainedModel) -> Ranks | None:
    """
    Return `Ranks` of its own for an engine's thread, whose broadcasts are not in turn with those of other calls; None
    where this process holds the whole model.
    """
    return Ranks(_members(model)) if is_sharded(model) else None


def broadcast_from_rank0(model: PreTrainedModel, find: Callable[[], Any]) -> Any:
    """Return in all processes that hold the model the result of `find` in the first one."""
    ranks = ranks_of(model)
    return find() if ranks is None else ranks.broadcast(find() if ranks.is_first else None)
