"""Products of a few tokens on a CPU with a weight `[in, out]`, which is read as it lies in memory."""

import numpy as np
import torch

from .few_tokens import SMALL, most_tokens
from .kernels.columns import COLUMNS
from .kernels.experts import BLOCK_SIZE
from .kernels.multiply import BIAS, NUM_INPUTS, NUM_OUTPUTS, NUM_TOKENS, OUTPUTS, SHARE, TOKENS, WEIGHT
from .kernels.program import EXPERTS
from .program import run_operator
from .threads import share_of


def column_share(num_outputs: int, num_inputs: int) -> int:
    """Return how many outputs a thread takes at a time."""
    return share_of(num_outputs, num_inputs, COLUMNS)


def column_product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """
    Return `x @ weight`, plus the bias where it is given, of tokens `[N, in]`, rounded once. Up to `most_tokens`, a
    token's result does not depend on the others.

    Args:
        weight (`torch.Tensor` of shape `[in, out]`): Contiguous, with multiples of 16 numbers either way.
    """
    x = x.contiguous()
    (num_tokens, num_inputs), num_outputs = x.shape, weight.shape[1]
    if not 0 < num_tokens <= most_tokens(x.dtype):
        return x @ weight if bias is None else torch.addmm(bias, x, weight)
    outputs = x.new_empty(num_tokens, num_outputs)
    numbers = {NUM_TOKENS: num_tokens, NUM_INPUTS: num_inputs, NUM_OUTPUTS: num_outputs}
    numbers |= {SHARE: column_share(num_outputs, num_inputs), BIAS: 0 if bias is None else bias.data_ptr()}
    numbers |= {WEIGHT: weight.data_ptr(), TOKENS: x.data_ptr(), OUTPUTS: outputs.data_ptr()}
    block = np.zeros(BLOCK_SIZE, np.int64)
    block[list(numbers)] = list(numbers.values())
    num_threads = 1 if num_tokens * num_inputs * num_outputs <= SMALL else torch.get_num_threads()
    run_operator(x.dtype, EXPERTS, num_threads, 1, block.ctypes.data, True)
    return outputs
