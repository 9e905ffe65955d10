"""API keys and the namespaces of their tenants."""

import hashlib
import hmac
import secrets
from collections.abc import Iterable
from contextvars import ContextVar
from pathlib import Path
from typing import NamedTuple

_BEARER = "bearer "


class Caller(NamedTuple):
    """
    The tenant that sent a request.

    Args:
        namespace (`str`): Namespace of the tenant's texts: no other tenant's drafts or reused prefixes come from them.
        is_admin (`bool`): Whether the caller may read metrics over all tenants.
        teaches (`bool`): Whether drafters may learn from the tenant's requests.
    """

    namespace: str = ""
    is_admin: bool = False
    teaches: bool = True


# A context variable, since transformers' application does not pass such an argument on to handlers.
CALLER: ContextVar[Caller] = ContextVar("caller")


class ApiKeys:
    """
    The API keys of a server.

    Args:
        keys (iterable of `str`): Keys, one per tenant. Without any keys, all clients are admitted as one tenant.
        salt (`bytes`, *optional*): Secret from which tenants' namespaces are derived, so that keys cannot be guessed
            from a namespace. Servers that share outputs need the same salt; random if omitted.
        admin_keys (iterable of `str`): Keys of admins; they may be among `keys`. Without any keys, all clients are
            admins.
        unlearnt_keys (iterable of `str`): Those of the others from whose requests no drafter learns.

    Raises:
        ValueError: for keys that no header can carry, and for keys in `unlearnt_keys` alone.
    """

    def __init__(
        self,
        keys: Iterable[str] = (),
        salt: bytes | None = None,
        admin_keys: Iterable[str] = (),
        unlearnt_keys: Iterable[str] = (),
    ):
        salt = secrets.token_bytes(32) if salt is None else salt
        self._callers: dict[bytes, Caller] = {}
        for key, is_admin in [*((key, False) for key in keys), *((key, True) for key in admin_keys)]:
            if not key.isascii() or not key.isprintable() or not key.strip():
                raise ValueError("API keys must be printable ASCII text, and not empty.")
            namespace = hmac.new(salt, key.strip().encode(), hashlib.sha256).hexdigest()[:32]
            # The key itself is not stored.
            self._callers[_digest(key.strip())] = Caller(f"key:{namespace}", is_admin)
        for digest in map(_digest, map(str.strip, unlearnt_keys)):
            if digest not in self._callers:
                raise ValueError("A key that is not to be learnt from is none of the server's keys.")
            self._callers[digest] = self._callers[digest]._replace(teaches=False)

    def __len__(self) -> int:
        return len(self._callers)

    @property
    def callers(self) -> list[Caller]:
        """The callers that have keys."""
        return list(self._callers.values())

    def caller(self, authorization: str | None) -> Caller | None:
        """Return the caller with the key in a header; None for an unknown key. The time does not depend on the key."""
        if not self._callers:
            return Caller(is_admin=True)
        text = authorization or ""
        given = _digest(text[len(_BEARER) :].strip() if text[: len(_BEARER)].lower() == _BEARER else "")
        found = None
        for digest, caller in self._callers.items():
            if hmac.compare_digest(digest, given):
                found = caller
        return found


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def read_keys(path: str | Path) -> list[str]:
    """
    Return the keys in a file, one per line. Empty lines and lines that begin with # are skipped.

    Raises:
        OSError: if the file cannot be read.
        ValueError: if it contains no key.
    """
    lines = [line.strip() for line in Path(path).read_text(encoding="ascii", errors="replace").splitlines()]
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys:
        raise ValueError(f"{str(path)!r} holds no API keys.")
    return keys
