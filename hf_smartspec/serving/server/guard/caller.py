"""Who asks: known to whatever handles a request, without being handed through transformers' application."""

from contextvars import ContextVar
from typing import NamedTuple


class Caller(NamedTuple):
    """
    Args:
        namespace (`str`): Of its texts: nobody else's drafts or reused keys and values are made of them.
    """

    namespace: str = ""


CALLER: ContextVar[Caller] = ContextVar("caller")
