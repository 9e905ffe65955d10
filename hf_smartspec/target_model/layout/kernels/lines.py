"""Copies of lines of keys and values in the memory of all layers."""

from ....jit import compiled_for
from ....jit.pointers import int8_at


@compiled_for("i8:1 i8:1 i8:2")
def move_lines(addresses, line_bytes, moves):
    """
    Copy lines within every memory, one after the other.

    Args:
        addresses, line_bytes (`[memories]` int64): The address of each memory, and the bytes of its lines.
        moves (`[2, moves]` int64): Lines, and the places that they are copied to, none of which is read later.
    """
    for number in range(len(addresses)):
        memory, size = int8_at(addresses[number]), line_bytes[number]
        for move in range(moves.shape[1]):
            source, target = moves[0, move] * size, moves[1, move] * size
            for index in range(size):
                memory[target + index] = memory[source + index]
