"""Who asks: known to whatever handles a request, without being handed through transformers' application."""

from contextvars import ContextVar
from typing import NamedTuple


class Caller(NamedTuple):
    """
    Args:
        namespace (`str`): Of its texts: nobody else's drafts or reused keys and values are made of them.
        is_admin (`bool`): Whether it may see what the server counts over all tenants.
    """

    namespace: str = ""
    is_admin: bool = False


CALLER: ContextVar[Caller] = ContextVar("caller")
