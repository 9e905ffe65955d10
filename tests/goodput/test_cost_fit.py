"""Fits of forwards as a GPU would run them, from data sheets: launched one kernel at a time, or as graphs."""

from typing import NamedTuple

import numpy as np
import pytest

from hf_smartspec.goodput import CostModel, CostPoint
from hf_smartspec.target_model.cost.measuring import DESIGN, Design

MOST_TOKENS = 2**19  # of keys and values that fit into memory


class Roofline(NamedTuple):
    """
    A decoder of 8 G parameters with grouped heads on an H100: every operation takes as long as its multiplications, or
    as long as its bytes, whichever is more; with `host` seconds to launch all of them, or run as one graph.
    """

    host: float = 0.0
    flops: float = 0.6 * 990e12  # 60 % of the data sheet's
    bandwidth: float = 0.8 * 3.35e12
    num_parameters: float = 7.5e9
    num_layers: int = 32
    hidden_size: int = 4096
    kv_size: int = 1024
    kernel: float = 3e-6  # a kernel's least

    def seconds(self, rows: int, context: int, width: int) -> float:
        tokens = rows * width
        weights = self.num_parameters / self.num_layers
        linear = max(2 * weights / self.bandwidth, 2 * weights * tokens / self.flops)
        cached = 4 * self.kv_size * rows * context / self.bandwidth
        attention = max(cached, 4 * self.hidden_size * rows * context * width / (0.5 * self.flops))
        others = 8 * max(self.kernel, 20 * self.hidden_size * tokens / self.bandwidth)
        device = self.num_layers * (linear + attention + others)
        return max(self.host, device)

    def point(self, item: Design, noise: float = 1.0) -> CostPoint:
        rows, context, width = item
        return CostPoint(rows * context, rows * width, width, self.seconds(*item) * noise)


EAGER, GRAPHED = Roofline(host=13e-3), Roofline()


def steps() -> list[Design]:
    """What decoding may run: up to 2,048 tokens in a forward, 64 of a row, and contexts of up to 8k."""
    rng, found = np.random.default_rng(0), []
    while len(found) < 400:
        rows, width = int(2 ** rng.uniform(0, 8.1)), int(2 ** rng.uniform(0, 6.1))
        context = int(2 ** rng.uniform(5, 13))
        if rows * width <= 2048 and rows * (context + width) <= MOST_TOKENS:
            found.append(Design(rows, context, width))
    return found


def fitted(device: Roofline, noise: float = 0.01) -> CostModel:
    rng = np.random.default_rng(1)
    return CostModel.fit([device.point(item, rng.lognormal(0, noise)) for item in DESIGN])


@pytest.mark.parametrize("device", [EAGER, GRAPHED, Roofline(host=7e-3)])
def test_predictions_of_a_roofline_are_right_up_to_2048_tokens_and_contexts_of_8k(device):
    cost, points = fitted(device), [device.point(item) for item in steps()]
    errors = np.abs(cost.errors(points))
    assert errors.max() < 0.15 and np.median(errors) < 0.05
    assert max(point.batched for point in points) > 1800 and max(point.context for point in points) > 400_000


def test_tokens_are_free_while_the_host_launches_kernels():
    cost = fitted(EAGER)
    assert cost.host == pytest.approx(13e-3, rel=0.02)
    assert cost.seconds(0, 256) == cost.seconds(4000, 1) == cost.host < cost.seconds(0, 1024)
    assert fitted(GRAPHED).host == 0.0


def test_the_jump_from_one_token_to_two_is_kept():
    """As CPUs have it at batch 1, be it 25 % in forwards that are else as straight as can be."""

    def seconds(item):
        rows, context, width = item
        return (20e-3 + 0.1e-3 * rows * width + 1e-6 * rows * context) * (1.25 if rows * width > 1 else 1.0)

    points = [CostPoint(item.rows * item.context, item.rows * item.width, item.width, seconds(item)) for item in DESIGN]
    cost = CostModel.fit(points)
    for num, true in ((1, 20.1e-3), (2, 25.25e-3), (3, 25.4e-3), (8, 26e-3)):
        assert cost.seconds(0, num) == pytest.approx(true, rel=0.03)


@pytest.mark.parametrize("sizes", [(1, 4), (1, 4, 16)])
def test_measurements_of_which_contexts_explain_all_make_a_model_too(sizes):
    """A busy machine, and few of them."""
    points = [CostPoint(context, size, 1, 1e-6 * context) for context in (8, 16, 30) for size in sizes]
    cost = CostModel.fit(points)
    assert cost.median_error(points) < 1e-6 and cost.seconds(0, 1) == pytest.approx(8e-6)


def test_an_impossible_time_of_the_host_is_refused():
    with pytest.raises(ValueError, match="host"):
        CostModel(0.0, 0.0, 1.0, host=-1.0)
