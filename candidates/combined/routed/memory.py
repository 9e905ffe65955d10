"""Memory of several drafters of one target."""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch
from torch import nn

from ...base import TreeCandidateGenerator
from ..base import CombinedCandidates


class DrafterMemory(NamedTuple):
    """
    Bytes of one drafter.

    Args:
        weights (`int`): Bytes of parameters and buffers, without those of the target.
        state (`int`, *optional*): Bytes that it keeps of texts at present: keys and values, suffix trees, datastores;
            None if unknown.
    """

    weights: int
    state: int | None


class RoutedMemory(NamedTuple):
    """
    Bytes of several drafters of one target.

    Args:
        drafters (mapping of `str` to `DrafterMemory`): By name. Tensors that two of them share are counted in both.
        weights, state (`int`): Sums over all drafters, with every tensor and source counted once, as far as known.
        router (`int`): Bytes that the router and the bandit have learnt.
    """

    drafters: Mapping[str, DrafterMemory]
    weights: int
    state: int
    router: int

    @property
    def total(self) -> int:
        return self.weights + self.state + self.router


def memory_of(
    drafters: Mapping[str, TreeCandidateGenerator], target: nn.Module | None = None, router: int = 0
) -> RoutedMemory:
    """Return the bytes of drafters beside the target."""
    own = _storages([] if target is None else [target])
    parts = {name: list(_parts(source)) for name, source in drafters.items()}
    storages = {name: _storages(_modules(found)) for name, found in parts.items()}
    sizes = {name: {key: num for key, num in found.items() if key not in own} for name, found in storages.items()}
    states = {part: part.num_bytes() for found in parts.values() for part in found}
    own_states = {name: _sum(states[part] for part in found) for name, found in parts.items()}
    together = {key: num for found in sizes.values() for key, num in found.items()}
    return RoutedMemory(
        {name: DrafterMemory(sum(sizes[name].values()), own_states[name]) for name in drafters},
        sum(together.values()),
        sum(number or 0 for number in states.values()),
        router,
    )


def _sum(numbers: Iterable[int | None]) -> int | None:
    known = [number for number in numbers if number is not None]
    return sum(known) if known else None


def _parts(source: TreeCandidateGenerator) -> Iterable[TreeCandidateGenerator]:
    if not isinstance(source, CombinedCandidates):
        yield source
        return
    for member in source.sources:
        yield from _parts(member)


def _modules(sources: Iterable[TreeCandidateGenerator]) -> list[nn.Module]:
    return [value for source in sources for value in vars(source).values() if isinstance(value, nn.Module)]


def _storages(modules: Iterable[nn.Module]) -> dict[tuple[torch.device, int], int]:
    """Return bytes by place in memory."""
    tensors = [tensor for module in modules for tensor in (*module.parameters(), *module.buffers())]
    storages = [(tensor.device, tensor.untyped_storage()) for tensor in tensors]
    return {(device, storage.data_ptr()): storage.nbytes() for device, storage in storages}
