"""Products of a few tokens: by whichever way, they are those of `linear`."""

import pytest
import torch
from torch.nn.functional import linear

from hf_smartspec.cpu.few_tokens import product


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("num_inputs", [300, 320])
@pytest.mark.parametrize("num_tokens", [1, 2, 5, 16, 40])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 2**-8), (torch.float16, 2**-10)]
)
def test_products_are_those_of_linear(dtype, tolerance, num_tokens, num_inputs, with_bias):
    generator = torch.Generator().manual_seed(num_tokens)
    x, weight, bias = (
        torch.randn(size, generator=generator).to(dtype)
        for size in ((num_tokens, num_inputs), (700, num_inputs), (700,))
    )
    found = product(x, weight, bias if with_bias else None)
    expected = linear(x.double(), weight.double(), bias.double() if with_bias else None)
    assert found.shape == expected.shape and found.dtype == dtype and found.is_contiguous()
    assert (found - expected).abs().max() <= tolerance * expected.abs().max()
    if dtype != torch.float32 or num_inputs % 16:  # where own products serve, sums are added in another order
        # A token's result is rounded once: as near to the exact one as that of torch's own product.
        torch.testing.assert_close(
            found, linear(x, weight, bias if with_bias else None), rtol=2 * tolerance, atol=2 * tolerance
        )
