"""
Triton's code against torch in float32: on a GPU, and on a CPU where Triton is installed and `TRITON_INTERPRET=1` is set
in the environment.
"""

import os

import numpy as np
import pytest
import torch
from torch.nn.functional import silu

from hf_smartspec.cpu.attention import NO_TREE
from hf_smartspec.gpu import elementwise
from hf_smartspec.gpu.attention import few_query_attention

from ..target_model.attention import test_varlen as written

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
pytestmark = pytest.mark.skipif(
    not (torch.cuda.is_available() or IS_INTERPRETED), reason="there is no CUDA device here"
)
DEVICE = "cpu" if IS_INTERPRETED else "cuda"
DTYPES = [torch.float16] if IS_INTERPRETED else [torch.float16, torch.bfloat16]  # the interpreter does not round


@pytest.fixture(autouse=True)
def _triton():
    pytest.importorskip("triton")


def random_trees(counts, used, rng):
    """Spans' `trees` of rows that begin with a token of no tree; later ones are nodes with random parents."""
    words, columns = -(-max(counts) // 64), []
    for count, num_keys in zip(counts, used):
        first, ancestors = num_keys - count + 1, []
        columns += [[NO_TREE, first - 1, *[0] * words]] * min(count, 1)
        for node in range(count - 1):
            parent = int(rng.integers(-1, node)) if node else -1
            ancestors.append((ancestors[parent] if parent >= 0 else 0) | 1 << node)
            bits = [ancestors[-1] >> 64 * word & (1 << 64) - 1 for word in range(words)]
            columns.append([first, first + ancestors[-1].bit_count() - 1, *np.array(bits, np.uint64).view(np.int64)])
    return torch.tensor(np.array(columns)).t().contiguous()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("counts", "used", "heads", "dim", "has_trees", "window"),
    [
        ([1, 1, 1], [3, 9, 40], (4, 2), 16, False, None),
        ([5, 2, 0, 1], [7, 100, 1, 3], (4, 4), 24, False, None),  # a row of padding has no queries
        ([7, 3], [120, 290], (8, 2), 64, True, None),
        ([16], [1290], (4, 2), 32, True, None),  # keys in pieces
        ([1], [3000], (2, 2), 64, False, None),
        ([3, 3], [700, 20], (6, 2), 80, False, 13),
        ([80, 5], [100, 90], (4, 1), 16, True, None),  # more nodes than bits of a word
        ([70], [600], (8, 2), 128, False, 32),
        ([9, 2], [2000, 30], (4, 2), 256, True, 65),
    ],
)
def test_attention_of_few_queries(counts, used, heads, dim, has_trees, window, dtype):
    rng, generator, (num_heads, kv_heads) = np.random.default_rng(0), torch.Generator().manual_seed(0), heads
    stride, num = max(used) + 7, len(counts)
    firsts = 5 + stride * np.arange(num + 1)
    rows = torch.from_numpy(np.stack([np.cumsum([0, *counts]), firsts, np.append(used, 0)]))
    key, value = (torch.randn(int(firsts[-1]), kv_heads, dim, generator=generator).to(dtype) for _ in range(2))
    query = torch.randn(sum(counts), num_heads + 2, dim, generator=generator).to(dtype)[:, :num_heads]
    trees = random_trees(counts, used, rng) if has_trees else None
    options = {"window": window, "scaling": 0.3}
    sizes = max(counts), max(used)
    expected = written.few_query_attention(query.float(), key.float(), value.float(), rows, *sizes, trees, **options)
    rows, trees = rows.to(DEVICE), None if trees is None else trees.to(DEVICE)
    tensors = [item.to(DEVICE) for item in (query, key, value)]
    found = few_query_attention(*tensors, rows, *sizes, trees, **options).cpu().float()
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-2 if dtype is torch.bfloat16 else 2e-3)


@pytest.mark.parametrize("dtype", DTYPES)
def test_norms_and_gates(dtype):
    x = torch.randn(5, 3, 200, device=DEVICE).to(dtype)
    weight = torch.randn(200, device=DEVICE).to(dtype)
    plain = torch.rms_norm(x, (200,), None, 0.5).mul_(weight)
    shifted = torch.rms_norm(x.float(), (200,), weight.float() + 1.0, 0.5).to(dtype)
    bound = {"rtol": 1e-2 if dtype is torch.bfloat16 else 2e-3, "atol": 1e-6}  # the last bit, where sums differ
    torch.testing.assert_close(elementwise.rms_norm(x, weight, 0.5, is_shifted=False), plain, **bound)
    torch.testing.assert_close(elementwise.rms_norm(x, weight, 0.5, is_shifted=True), shifted, **bound)
    hidden = torch.randn(7, 2 * 1300, device=DEVICE).to(dtype)
    torch.testing.assert_close(elementwise.silu_gated(hidden), silu(hidden[:, :1300]) * hidden[:, 1300:], **bound)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "dim", "rotated_dim"), [(6, 2, 64, 64), (5, 5, 40, 24), (9, 3, 16, 16)])
def test_rotations_are_those_of_torch_bit_for_bit(heads, kv_heads, dim, rotated_dim, dtype):
    states = torch.randn(7, heads + 2 * kv_heads, dim, device=DEVICE).to(dtype)
    tables = tuple(torch.randn(1, 7, rotated_dim, device=DEVICE).to(dtype).transpose(0, 1) for _ in range(2))
    lines = torch.tensor([12, 3, 4, 5, 0, 9, 1], device=DEVICE)
    own, values, turned = states[:, : heads + kv_heads], states[:, heads + kv_heads :], states.clone()
    expected = own.clone()
    expected[..., :rotated_dim] = (
        own[..., :rotated_dim] * tables[0] + own[..., :rotated_dim].roll(rotated_dim // 2, -1) * tables[1]
    )
    memories = tuple(torch.zeros(13, kv_heads, dim, device=DEVICE, dtype=dtype) for _ in range(2))
    elementwise.rotate_and_write(turned[:, : heads + kv_heads], values, tables, heads, memories, lines)
    assert torch.equal(turned[:, :heads], expected[:, :heads])
    assert torch.equal(memories[0][lines], expected[:, heads:]) and torch.equal(memories[1][lines], values)
    assert not memories[0][2].any() and not memories[1][2].any()
