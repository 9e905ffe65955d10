"""What a server bears, and what it refuses."""

from collections import Counter
from dataclasses import dataclass

from ..errors import ApiError

_BUSY = 1  # seconds after which a refused client may try again


@dataclass(frozen=True)
class Limits:
    """
    Args:
        max_body_bytes (`int`): Of a request.
        max_model_len (`int`, *optional*): Tokens of a prompt and its answer; as the model says, where not given.
        max_new_tokens (`int`): Of an answer whose request does not say.
        max_queue (`int`): Requests that may wait while others run; further ones are refused.
        max_per_key (`int`, *optional*): Requests of one key that may wait and run; as many as of all, where not given.
        timeout (`float`, *optional*): Seconds after which a request is given up.
    """

    max_body_bytes: int = 2**23
    max_model_len: int | None = None
    max_new_tokens: int = 1024
    max_queue: int = 1024
    max_per_key: int | None = None
    timeout: float | None = None


class OpenRequests:
    """
    The requests of a model that wait and run, by namespace. Where there are as many as there may be, only namespaces
    that have less than their equal part of these may add some: nobody is refused because of another's queue.

    Args:
        limits (`Limits`): How many may wait, and be one key's.
        max_batch_size (`int`): How many run.
    """

    def __init__(self, limits: Limits, max_batch_size: int):
        self.room = max_batch_size + limits.max_queue
        self.room_of_one = self.room if limits.max_per_key is None else min(self.room, limits.max_per_key)
        self._counts: Counter[str] = Counter()

    def __len__(self) -> int:
        return self._counts.total()

    def check_count(self, num_new: int) -> None:
        """Raises `ApiError`, 400, for more requests at once than can ever be open."""
        if num_new > self.room_of_one:
            raise ApiError(
                400, f"The request asks for {num_new} answers at once, and {self.room_of_one} are the most here"
            )

    def add(self, namespace: str, num_new: int) -> None:
        """Raises `ApiError`: 429, if so many further requests would be too many now; 400, if always."""
        self.check_count(num_new)
        own = self._counts[namespace] + num_new
        if own > self.room_of_one:
            raise ApiError(
                429,
                f"{own - num_new} requests of this key wait or run already, and {self.room_of_one} may: try again "
                "later",
                retry_after=_BUSY,
            )
        if len(self) + num_new > self.room and own > self.room // len(self._counts.keys() | {namespace}):
            raise ApiError(429, "Too many requests wait already: try again later", retry_after=_BUSY)
        self._counts[namespace] = own

    def remove(self, namespace: str, number: int = 1) -> None:
        """So many requests have ended."""
        self._counts -= Counter({namespace: number})  # which forgets namespaces that have none any more


def new_tokens(prompt_len: int, asked: int | None, usual: int, most: int | None) -> int:
    """
    How many tokens an answer may have.

    Args:
        asked (`int`, *optional*): By the request.
        usual (`int`): Where it does not say, as far as there is room.
        most (`int`, *optional*): Tokens of prompt and answer together.

    Raises:
        ApiError: 400, if the prompt is too long, or the answer that is asked for does not fit behind it.
    """
    if most is None:
        return usual if asked is None else asked
    room = most - prompt_len
    if room < (1 if asked is None else asked):
        wanted = "" if asked is None else f" and {asked} for the answer"
        raise ApiError(
            400,
            f"The maximum context length is {most} tokens, and the request has {prompt_len} in its prompt{wanted}",
            code="context_length_exceeded",
        )
    return min(usual, room) if asked is None else asked
