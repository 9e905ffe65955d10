"""Who runs when: first come, first served, within a number of slots and a budget of key/value memory."""

from collections import deque
from dataclasses import dataclass
from typing import Generic, TypeVar

Item = TypeVar("Item")


@dataclass(frozen=True)
class MemoryShape:
    """Key/value memory of `num_slots` rows of `capacity` tokens."""

    num_slots: int
    capacity: int

    @property
    def num_tokens(self) -> int:
        return self.num_slots * self.capacity


class Scheduler(Generic[Item]):
    """
    Admits requests in the order in which they came, as soon as their keys and values fit beside those of the running
    ones, up to the last token that they may generate and the draft behind it. So a running one never has to give way.

    Memory is a rectangle: all slots are as long as the longest running request may become.

    Args:
        max_batch_size (`int`): Rows that may run at once.
        max_tokens (`int`): Tokens of all slots together.
    """

    def __init__(self, max_batch_size: int, max_tokens: int):
        self.max_batch_size, self.max_tokens = max_batch_size, max_tokens
        self.waiting: deque[tuple[Item, int]] = deque()
        self.running: dict[Item, int] = {}  # and the tokens that each may reach

    def __len__(self) -> int:
        return len(self.waiting) + len(self.running)

    def check(self, num_tokens: int) -> None:
        """Raises `ValueError` if a request of so many tokens can never run."""
        if num_tokens > self.max_tokens:
            raise ValueError(
                f"The request may reach {num_tokens} tokens (prompt, `max_new_tokens` and draft), and the key/value "
                f"memory holds {self.max_tokens}: shorten it, or raise the engine's `max_kv_bytes`."
            )

    def add(self, item: Item, num_tokens: int) -> None:
        self.waiting.append((item, num_tokens))

    def remove(self, item: Item) -> None:
        """Forgets a request, waiting or running."""
        if self.running.pop(item, None) is None:
            self.waiting = deque(entry for entry in self.waiting if entry[0] is not item)

    def next(self) -> Item | None:
        """The next request if it can begin now; it then counts as running."""
        if not self.waiting or len(self.running) == self.max_batch_size:
            return None
        item, num_tokens = self.waiting[0]
        longest = max([num_tokens, *self.running.values()])
        if (len(self.running) + 1) * longest > self.max_tokens:
            return None
        self.waiting.popleft()
        self.running[item] = num_tokens
        return item

    def shape(self, current: MemoryShape, num_kept: int = 0) -> MemoryShape:
        """
        The memory that the running requests need, with `num_kept` rows of ended ones if there is room. It grows in
        large steps, since growing copies, and shrinks once it is four times what is needed.
        """
        num_slots, longest = max(len(self.running), 1), max(self.running.values(), default=1)
        wanted = min(num_slots + num_kept, self.max_batch_size)
        shapes = [
            MemoryShape(min(_roomy(wanted), self.max_batch_size), _roomy(longest)),
            MemoryShape(min(_roomy(num_slots), self.max_batch_size), _roomy(longest)),
            MemoryShape(num_slots, _roomy(longest)),
            MemoryShape(num_slots, longest),
        ]
        best = next(shape for shape in shapes if shape.num_tokens <= self.max_tokens)
        fits = current.num_slots >= min(wanted, best.num_slots) and current.capacity >= longest
        is_right = fits and current.num_tokens <= min(4 * best.num_tokens, self.max_tokens)
        return current if is_right else best


def _roomy(number: int) -> int:
    """The next power of two."""
    return 1 << (number - 1).bit_length()
