"""What compiled code is called with: the address of numbers, int64 each, that say where everything lies."""

from ....jit import inner
from .memory import load_bfloat16, load_float16, load_float32

# next: counted up by whoever takes the next share of the work; share: of outputs, how many these are.
# tokens, outputs: addresses of their numbers, of one kind; bias: of another's, or 0.
# scales (of outputs) and steps (of tokens): float32; weight and levels: int8; offsets (of tokens): int32.
# packed: levels of 16 tokens at a time, for matrix registers, or 0; registers: what these are like.
FIELDS = tuple(
    "next num_tokens num_inputs num_outputs share tokens outputs kind bias bias_kind scales steps weight levels "
    "offsets packed registers".split()
)
NEXT, NUM_TOKENS, NUM_INPUTS, NUM_OUTPUTS, SHARE, TOKENS, OUTPUTS, KIND, BIAS, BIAS_KIND = range(10)
SCALES, STEPS, WEIGHT, LEVELS, OFFSETS, PACKED, REGISTERS = range(10, 17)

FLOAT32, BFLOAT16, FLOAT16 = range(3)  # kinds of numbers


@inner
def load(kind, address, index):
    """A number of any kind, as float32."""
    if kind == FLOAT32:
        return load_float32(address, index)
    if kind == BFLOAT16:
        return load_bfloat16(address, index)
    return load_float16(address, index)
