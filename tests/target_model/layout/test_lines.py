"""Lines of keys and values moved in one compiled call: what torch's operators leave."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_smartspec.target_model.cache.slot_cache import SlotCache
from hf_smartspec.target_model.cache.slot_layer import SlotLayer
from hf_smartspec.target_model.layout.kernels.lines import move_lines

from ...covering import examples

DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int8)
sizes = st.tuples(st.sampled_from(DTYPES), st.integers(1, 3), st.integers(0, 33))


@settings(max_examples=examples(100), deadline=None)
@given(
    kinds=st.lists(sizes, min_size=1, max_size=4),
    paths=st.lists(st.sets(st.integers(0, 11)).map(sorted), min_size=1, max_size=3),
)
def test_paths_of_trees_are_moved_as_by_torch(kinds, paths):
    """Memories of any dtypes and sizes; rows of 12 nodes, whose paths move to the front of their slots."""
    moves = [(12 * row + node, 12 * row + place) for row, path in enumerate(paths) for place, node in enumerate(path)]
    sources, targets = np.array(moves, np.int64).reshape(-1, 2).T
    generator = torch.Generator().manual_seed(len(moves))
    memories = [
        torch.randint(-99, 99, (12 * len(paths), *shape), generator=generator).to(dtype) for dtype, *shape in kinds
    ]
    expected = [memory.clone() for memory in memories]
    for memory in expected:
        memory[torch.from_numpy(targets)] = memory[torch.from_numpy(sources)]
    layer = SlotLayer(SlotCache())
    layer.hold(*memories)
    assert layer.line_bytes == tuple(memory[0].nbytes for memory in memories)
    move_lines(np.array(layer.addresses), np.array(layer.line_bytes), np.array([sources, targets]))
    assert all(map(torch.equal, memories, expected))
