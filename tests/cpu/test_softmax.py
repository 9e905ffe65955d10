"""Exponentials of scores, and their sums, against those in double precision."""

import numpy as np
import pytest
import torch

from hf_smartspec.cpu.few_tokens import has_kernels
from hf_smartspec.cpu.kernels.softmax import MOST_SCORES, exponentiate
from hf_smartspec.jit import compiled
from hf_smartspec.jit.pointers import float32_at

pytestmark = pytest.mark.skipif(not has_kernels(torch.float32), reason="there is no compiled code for this CPU")


@compiled
def exponentials(address, number, highest, scale):
    return exponentiate(float32_at(address), number, np.float32(highest), np.float32(scale))


@pytest.mark.parametrize("number", [1, 7, 8, 15, 16, 17, 40, MOST_SCORES])
def test_exponentials_are_exact_but_for_the_last_bits_and_so_are_their_sums(number):
    scores = -np.random.default_rng(number).exponential(20, number + 16).astype(np.float32)
    scores[:number:5] = 0
    given, scale = scores.copy(), 0.25
    total = exponentials(scores.ctypes.data, number, 0.0, scale)
    found, rest = np.split(scores, [number])
    assert np.allclose(found, np.exp(given[:number].astype(np.float64) * scale), rtol=3e-7, atol=0)
    assert total == sum(int(item) for item in found.astype(np.float64) * 2.0**33)
    assert np.array_equal(rest, given[number:])


def test_scores_far_below_the_highest_weigh_nothing():
    scores = np.array([3.0, -np.inf, -84.5, -83.5, np.nan], np.float32)
    exponentials(scores.ctypes.data, 5, 3.0, 1.0)
    assert scores[0] == 1 and scores[1] == scores[2] == 0 < scores[3] and np.isnan(scores[4])
