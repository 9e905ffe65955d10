"""Limits of a server: sizes and numbers of requests, beyond which they are refused."""

from collections import Counter
from dataclasses import dataclass

from ..errors import ApiError

_BUSY = 1  # seconds after which a refused client may try again


@dataclass(frozen=True)
class Limits:
    """
    Bounds on requests.

    Args:
        max_body_bytes (`int`): Largest body of a request.
        max_model_len (`int`, *optional*): Tokens of a prompt and its answer together; the model's positions if omitted.
        max_new_tokens (`int`): Tokens of an answer whose request sets no limit.
        max_queue (`int`): Requests that may wait while others run; further ones are refused.
        max_per_key (`int`, *optional*): Requests of one key that may wait and run; as many as of all keys if omitted.
        timeout (`float`, *optional*): Seconds after which a request is cancelled; never if omitted.
    """

    max_body_bytes: int = 2**23
    max_model_len: int | None = None
    max_new_tokens: int = 1024
    max_queue: int = 1024
    max_per_key: int | None = None
    timeout: float | None = None


class OpenRequests:
    """
    Counts of a model's waiting and running requests, by namespace. When the limit is reached, only namespaces with less
    than their equal part may add requests, so that no namespace is refused because of another's queue.

    Args:
        limits (`Limits`): Bounds on waiting requests, and on requests of one key.
        max_batch_size (`int`): Requests that run at once.
    """

    def __init__(self, limits: Limits, max_batch_size: int):
        self.room = max_batch_size + limits.max_queue
        self.room_per_key = self.room if limits.max_per_key is None else min(self.room, limits.max_per_key)
        self._counts: Counter[str] = Counter()

    def __len__(self) -> int:
        return self._counts.total()

    def of(self, namespace: str) -> int:
        """Return the number of one namespace's requests."""
        return self._counts[namespace]

    def check_count(self, num_new: int) -> None:
        """Raise `ApiError`, 400, for more requests at once than can ever be open."""
        if num_new > self.room_per_key:
            raise ApiError(
                400, f"The request asks for {num_new} answers at once, but at most {self.room_per_key} are accepted"
            )

    def add(self, namespace: str, num_new: int) -> None:
        """Count new requests; raise `ApiError`, 429, if they are too many now, or 400, if they always are."""
        self.check_count(num_new)
        own = self._counts[namespace] + num_new
        if own > self.room_per_key:
            raise ApiError(
                429,
                f"{own - num_new} requests of this key wait or run already, and {self.room_per_key} may: try again "
                "later",
                retry_after=_BUSY,
            )
        if len(self) + num_new > self.room and own > self.room // len(self._counts.keys() | {namespace}):
            raise ApiError(429, "Too many requests wait already: try again later", retry_after=_BUSY)
        self._counts[namespace] = own

    def remove(self, namespace: str, number: int = 1) -> None:
        """Subtract requests that have ended."""
        self._counts -= Counter({namespace: number})  # subtraction drops namespaces without requests


def max_answer_tokens(prompt_len: int, asked: int | None, usual: int, most: int | None) -> int:
    """
    Return the number of tokens that an answer may have.

    Args:
        asked (`int`, *optional*): The request's limit.
        usual (`int`): Limit of requests that set none, as far as there is room.
        most (`int`, *optional*): Tokens of prompt and answer together.

    Raises:
        ApiError: 400, if the prompt is too long, or the requested answer does not fit after it.
    """
    if most is None:
        return usual if asked is None else asked
    room = most - prompt_len
    if room < (1 if asked is None else asked):
        wanted = "" if asked is None else f" and {asked} for the answer"
        raise ApiError(
            400,
            f"The maximum context length is {most} tokens, but the request has {prompt_len} in its prompt{wanted}",
            code="context_length_exceeded",
        )
    return min(usual, room) if asked is None else asked
