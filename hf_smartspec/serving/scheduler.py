"""Who runs when: first come, first served, within a number of rows and a budget of key/value memory."""

from collections import deque
from typing import Generic, TypeVar

from ..target.slabs import slot_size

Item = TypeVar("Item")


class Scheduler(Generic[Item]):
    """
    Admits requests in the order in which they came, as soon as their keys and values fit beside those of the running
    ones, up to the last token that they may generate and the draft behind it. So a running one never has to give way.

    Each has a slot of its own, of a size that a few lengths share (`slot_size`): what counts is the sum of these sizes.
    A long request takes room from others, but makes none of theirs longer.

    Args:
        max_batch_size (`int`): Rows that may run at once.
        max_tokens (`int`): Tokens of all slots together.
    """

    def __init__(self, max_batch_size: int, max_tokens: int):
        self.max_batch_size, self.max_tokens = max_batch_size, max_tokens
        self.waiting: deque[tuple[Item, int]] = deque()
        self.running: dict[Item, int] = {}  # and the tokens that the slot of each has room for

    def __len__(self) -> int:
        return len(self.waiting) + len(self.running)

    def size(self, num_tokens: int) -> int:
        """What a request of so many tokens takes of the budget."""
        return slot_size(num_tokens, self.max_tokens)

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

    @property
    def first(self) -> Item | None:
        """The next request if it may begin now, as far as the number of requests goes."""
        return self.waiting[0][0] if self.waiting and len(self.running) < self.max_batch_size else None

    def next(self, num_shared: int = 0, num_held: int = 0) -> Item | None:
        """
        The next request if it can begin now; it then counts as running.

        Args:
            num_shared (`int`): Its first tokens that lie in the slot of another.
            num_held (`int`): Tokens of slots of requests that run no more, in which running ones begin.
        """
        if self.first is None:
            return None
        item, num_tokens = self.waiting[0]
        size = self.size(num_tokens - num_shared)
        if self.num_taken + num_held + size > self.max_tokens:
            return None
        self.waiting.popleft()
        self.running[item] = size
        return item

    @property
    def num_taken(self) -> int:
        """Tokens of the running requests' slots."""
        return sum(self.running.values())


class ByteScheduler(Scheduler[Item]):
    """The same for requests of so many bytes each, with nothing between them: what it calls tokens are bytes."""

    def size(self, num_tokens: int) -> int:
        return num_tokens

    def check(self, num_tokens: int) -> None:
        if num_tokens > self.max_tokens:
            raise ValueError(
                f"The request may need {num_tokens} bytes of keys, values and states, and the engine's `max_kv_bytes` "
                f"allows {self.max_tokens}: shorten it, or raise that."
            )
