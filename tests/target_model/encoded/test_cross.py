"""Who sees which encoder outputs."""

import numpy as np
import pytest
import torch

from hf_smartspec.target_model.attention.tree_attention import attend_part
from hf_smartspec.target_model.cache.slot_cache import SlotCache
from hf_smartspec.target_model.encoded.cross import cross_layout
from hf_smartspec.target_model.layout.rows import CacheRow

HEADS, SIZE = 2, 4


def attended(layout, packed, key, value):
    outputs = torch.cat([attend_part(packed, key, value, part, None, None) for part in layout.parts])
    return outputs if layout.scatter is None else outputs[layout.scatter]


@pytest.mark.parametrize("call", [0, 10**6], ids=["in many parts", "in one per slab"])
@pytest.mark.parametrize("seed", range(8))
def test_every_token_sees_its_own_rows_outputs(seed, call):
    rng = np.random.default_rng(seed)
    generator = torch.Generator().manual_seed(seed)
    cache = SlotCache(1, 1)
    rows = [cache.add(int(size)) for size in rng.choice([5, 20, 90], 9)]
    for row in rows:
        row.length = int(rng.integers(1, row.stride + 1))
    key, value = (torch.randn(cache.num_lines, HEADS, SIZE, generator=generator) for _ in range(2))
    chosen = [rows[index] for index in rng.permutation(9)[: rng.integers(1, 10)]]
    counts = rng.integers(1, 4, len(chosen)).tolist()
    packed = torch.randn(sum(counts), HEADS, SIZE, generator=generator)
    output = attended(cross_layout(list(zip(chosen, counts)), call), packed, key, value)
    start = 0
    for row, count in zip(chosen, counts):
        own = slice(row.line, row.line + row.length)
        for token in range(start, start + count):
            weights = torch.einsum("hd,lhd->hl", packed[token], key[own]).div(SIZE**0.5).softmax(-1)
            assert torch.allclose(output[token], torch.einsum("hl,lhd->hd", weights, value[own]), atol=1e-6)
        start += count


def test_rows_in_order_are_not_moved():
    rows = [CacheRow(slot, length=6, line=6 * slot, stride=6) for slot in range(3)]
    layout = cross_layout([(row, 2) for row in rows], 10**6)
    assert layout.scatter is None and layout.parts[0].gather is None and layout.parts[0].sees_all
    layout = cross_layout([(rows[1], 2), (rows[0], 2)], 10**6)
    assert layout.scatter is not None
