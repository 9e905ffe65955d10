"""What a server bears, and what it refuses."""

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
        timeout (`float`, *optional*): Seconds after which a request is given up.
    """

    max_body_bytes: int = 2**23
    max_model_len: int | None = None
    max_new_tokens: int = 1024
    max_queue: int = 1024
    timeout: float | None = None

    def check_queue(self, num_open: int, num_new: int, max_batch_size: int) -> None:
        """Raises `ApiError`: 429, if so many further requests would make the queue too long; 400, if always."""
        room = max_batch_size + self.max_queue
        if num_new > room:
            raise ApiError(400, f"The request asks for {num_new} answers at once, and {room} are the most here")
        if num_open + num_new > room:
            raise ApiError(429, "Too many requests wait already: try again later", retry_after=_BUSY)


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
