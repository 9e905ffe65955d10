"""SSSD's analysis of a forward by operator (table 1, figure 3)."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_smartspec.goodput import LayerSizes, Roofline

sizes = st.integers(1, 10_000)


@given(st.integers(1, 64), st.integers(1, 200), sizes, st.integers(1, 64), st.integers(1, 256), sizes)
def test_table_1(b, s_q, s_kv, n, d, h_mlp):
    """Every cell of the table, with n_q = n_kv = n and h = n d, as it is printed there."""
    h = n * d
    q, k, v, attention, y, z = LayerSizes(h, n, n, d, h_mlp).operators(b, s_q, s_kv)
    for product in (q, k, v, y):
        assert product[1:] == (2 * b * s_q * h**2, b * s_q * h + h**2, b * s_q * h, 2 * b * s_q)
        assert product.intensity == pytest.approx(1 / (1 / h + 1 / (2 * b * s_q)))
    assert attention[1:] == (
        4 * b * s_q * (s_q + s_kv) * n * d, b * n * (2 * s_kv + 3 * s_q) * d, b * n * s_q * d, 2 * s_q,
    )  # fmt: skip
    assert attention.intensity == pytest.approx(2 * s_q * (1 + s_q / s_kv) / (1 + 2 * s_q / s_kv))
    assert z[1:] == (4 * b * s_q * h * h_mlp, b * s_q * h + 2 * h * h_mlp, b * s_q * h, 2 * b * s_q)
    assert z.intensity == pytest.approx(2 / (1 / h_mlp + 1 / (b * s_q)))


def test_shared_keys_and_gates_are_counted():
    """What the table leaves out for simplicity: n_q is not n_kv, and Llama's MLP has three matrices."""
    q, k, _, attention, _, z = LayerSizes(64, 8, 2, 8, 96, mlp_matrices=3).operators(4, 2, 10**6)
    assert k.flops == q.flops / 4
    assert attention.intensity == pytest.approx(attention.limit, rel=1e-4) and attention.limit == 2 * 2 * 4
    assert z.flops == 6 * 4 * 2 * 64 * 96 and z.read == 4 * 2 * 64 + 3 * 64 * 96


def test_figure_3():
    """Products cost nothing more up to the free budget, and rise with it from there; attention hardly rises at all."""
    llama2, ascend = LayerSizes(4096, 32, 32, 128, 11008, mlp_matrices=3), Roofline(280e12, 0.8e12)

    def seconds(s_q, s_kv=1024):
        times = [operator.seconds(ascend) for operator in llama2.operators(8, s_q, s_kv)]
        return sum(times) - times[3], times[3]

    free = ascend.free_tokens(4096) / 8
    (one, attention), (most, later), (beyond, _) = seconds(1), seconds(int(free)), seconds(int(2 * free))
    assert most < 1.2 * one and later < 1.1 * attention
    assert beyond > 1.7 * most
    products, attention = seconds(1, 10_000)
    assert attention > products, "the cost of loading the KV cache comprises the highest share"
