"""Products with weights that lie the other way round: the same bits for a token in any number of them."""

import pytest
import torch

from hf_smartspec.cpu.columns import column_product
from hf_smartspec.cpu.few_tokens import has_kernels

from .helpers import numbers

pytestmark = pytest.mark.skipif(not has_kernels(torch.float32), reason="there is no compiled code for this CPU")
DTYPES = (torch.float32, torch.bfloat16)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("num_outputs", [16, 112, 464])  # wide, narrow and single vectors of columns
@pytest.mark.parametrize("num_inputs", [16, 144, 512])  # less than a part, one and a bit, several
def test_sums_are_right_and_rounded_once(num_inputs, num_outputs, has_bias, dtype):
    weight = (numbers(num_inputs, num_outputs) / num_inputs**0.5).to(dtype)
    bias = numbers(num_outputs).to(dtype) if has_bias else None
    for num_tokens in (1, 2, 3, 7, 20):
        x = numbers(num_tokens, num_inputs).to(dtype)
        expected = x.double() @ weight.double() + (0 if bias is None else bias.double())
        found = column_product(x, weight, bias)
        assert found.dtype == dtype
        if dtype is torch.float32:
            torch.testing.assert_close(found, expected.float(), rtol=1e-5, atol=1e-5)
        else:
            assert (found != expected.to(dtype)).float().mean() < 0.01


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_a_tokens_bits_do_not_depend_on_others_or_threads(num_threads, dtype):
    torch.set_num_threads(num_threads)
    weight, bias, x = numbers(400, 656).to(dtype), numbers(656).to(dtype), numbers(41, 400).to(dtype)
    alone = torch.cat([column_product(line[None], weight, bias) for line in x])
    for num_tokens in (2, 3, 4, 6, 7, 8, 13, 41):
        assert torch.equal(column_product(x[:num_tokens], weight, bias), alone[:num_tokens])
