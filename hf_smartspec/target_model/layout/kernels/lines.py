"""Copies of lines of keys and values in the memory of all layers."""

from ....jit import compiled
from ....jit.pointers import int8_at


@compiled
def move_lines(addresses, sizes, moves):
    """
    Copy lines within the keys and within the values of every layer, one after the other.

    Args:
        addresses (`[layers, 2]` int64): Of a layer's keys and values.
        sizes (`[layers]` int64): Bytes of a line.
        moves (`[2, moves]` int64): Lines, and the places that they are copied to, none of which is read later.
    """
    for layer in range(len(sizes)):
        size = sizes[layer]
        for kind in range(2):
            memory = int8_at(addresses[layer, kind])
            for number in range(moves.shape[1]):
                source, target = moves[0, number] * size, moves[1, number] * size
                for index in range(size):
                    memory[target + index] = memory[source + index]
