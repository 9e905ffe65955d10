"""The caller of a request, as a context variable, since transformers' application passes no such argument on."""

from contextvars import ContextVar
from typing import NamedTuple


class Caller(NamedTuple):
    """
    The tenant that sent a request.

    Args:
        namespace (`str`): Namespace of the tenant's texts: no other tenant's drafts or reused prefixes come from them.
        is_admin (`bool`): Whether the caller may read metrics over all tenants.
    """

    namespace: str = ""
    is_admin: bool = False


CALLER: ContextVar[Caller] = ContextVar("caller")
