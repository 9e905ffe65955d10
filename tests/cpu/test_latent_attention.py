"""Compiled attention to latents, beside rotated keys, against double precision."""

import numpy as np
import pytest
import torch

from hf_smartspec.cpu.attention import SeenLines, has_attention, latent_attention, runs_of
from hf_smartspec.cpu.few_tokens import wide_linear

from .helpers import numbers
from .test_attention import assert_close, by_masks

pytestmark = pytest.mark.skipif(not has_attention(torch.float32), reason="there is no compiled attention for this CPU")
DTYPES = (torch.float32, torch.bfloat16)
ROWS, COUNTS = np.array([0, 1, 2, 2, 2, 3]), np.array([1, 33, 79, 80, 81, 64])


def seen(tokens: slice = slice(None)) -> SeenLines:
    """Rows of one line, of some blocks, and with a tree, of which the last token sees a sibling of its parent not."""
    nodes = np.full((2, 6), 2**40)
    nodes[1], nodes[:, 4] = -1, (2 * 100 + 78, 0b101)
    own = ROWS[tokens]
    return SeenLines(own * 100, COUNTS[tokens], runs_of(own), np.ascontiguousarray(nodes[:, tokens]))


def given(heads: int, rank: int, dim: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Queries, rotated queries, latents and rotated keys."""
    shapes = (heads, 6, rank), (heads, 6, dim), (400, 1, rank), (400, 1, dim)
    return [(numbers(*shape) / shape[-1] ** 0.25).to(dtype) for shape in shapes]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "rank", "dim"), [(1, 16, 16), (4, 48, 32), (3, 64, 16), (8, 512, 64), (12, 32, 64)])
def test_results_are_those_of_torch(heads, rank, dim, dtype):
    queries, turned, latents, rotated = given(heads, rank, dim, dtype)
    found = latent_attention(queries, turned, latents, rotated, seen(), 0.3)
    both, keys = torch.cat([queries, turned], dim=2).transpose(0, 1), torch.cat([latents, rotated], dim=2)
    assert found.dtype == dtype and found.shape == queries.shape
    assert_close(found.transpose(0, 1), by_masks(both, keys, latents, seen(), 0.3), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_a_tokens_bits_do_not_depend_on_others_or_threads(num_threads, dtype):
    torch.set_num_threads(num_threads)
    queries, turned, *memories = given(8, 512, 64, dtype)
    together = latent_attention(queries, turned, *memories, seen(), 0.3)
    for token in range(6):
        own = slice(token, token + 1)
        alone = [item[:, own].contiguous() for item in (queries, turned)]
        assert torch.equal(latent_attention(*alone, *memories, seen(own), 0.3)[:, 0], together[:, token])


def test_rows_with_a_prefix_have_the_bits_of_whole_rows():
    queries, turned, latents, rotated = given(8, 48, 16, torch.float32)
    queries, turned = (item[:, 4:5].contiguous() for item in (queries, turned))
    whole = SeenLines(np.array([0]), np.array([75]), np.array([0, 1]))
    expected = latent_attention(queries, turned, latents, rotated, whole, 0.3)
    moved = [item.clone() for item in (latents, rotated)]
    for own, item in zip(moved, (latents, rotated)):
        own[300:310] = item[65:75]
        own[65:75] = torch.nan
    shared = SeenLines(np.array([300]), np.array([10]), np.array([0, 1]), None, np.array([[0], [65]]))
    assert torch.equal(latent_attention(queries, turned, *moved, shared, 0.3), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_scores_of_routers_are_not_rounded(dtype):
    weight = numbers(37, 144) / 12
    for num_tokens in (1, 2, 5, 8, 40):
        x = numbers(num_tokens, 144).to(dtype)
        found = wide_linear(x, weight)
        assert found.dtype == torch.float32
        torch.testing.assert_close(found, (x.double() @ weight.double().mT).float(), rtol=1e-5, atol=1e-5)
        assert torch.equal(found[:1], wide_linear(x[:1], weight))
