"""Arguments of compiled code, which is called with the address of these numbers, int64 each."""

from ....jit import inner
from .memory import load_bfloat16, load_float16, load_float32

# next: incremented by the thread that takes the next share of the work; share: outputs in a share.
# tokens, outputs: addresses of numbers of one `kind`; bias: address of numbers of `bias_kind`, or 0.
# scales (one per output) and steps (one per token): float32; weight and levels: int8; offsets (one per token): int32.
# packed: levels of 16 tokens at a time, for matrix registers, or 0; registers: address of their configuration.
FIELDS = tuple(
    "next num_tokens num_inputs num_outputs share tokens outputs kind bias bias_kind scales steps weight levels "
    "offsets packed registers".split()
)
NEXT, NUM_TOKENS, NUM_INPUTS, NUM_OUTPUTS, SHARE, TOKENS, OUTPUTS, KIND, BIAS, BIAS_KIND = range(10)
SCALES, STEPS, WEIGHT, LEVELS, OFFSETS, PACKED, REGISTERS = range(10, 17)

FLOAT32, BFLOAT16, FLOAT16 = range(3)  # values of `kind`


@inner
def load(kind, address, index):
    """Load a number of any kind as float32."""
    if kind == FLOAT32:
        return load_float32(address, index)
    if kind == BFLOAT16:
        return load_bfloat16(address, index)
    return load_float16(address, index)
