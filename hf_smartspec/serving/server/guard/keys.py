"""Who may ask: API keys, and whose texts are whose."""

import hashlib
import hmac
import secrets
from collections.abc import Iterable
from pathlib import Path

from .caller import Caller

_BEARER = "bearer "


class ApiKeys:
    """
    Args:
        keys (iterable of `str`): Each is a tenant of its own. Without any, everybody may ask, as one tenant.
        salt (`bytes`, *optional*): Makes tenants' namespaces of keys, so that who sees a namespace cannot try out keys
            without it. Servers that share what was served need the same; random, where not given.
        admin_keys (iterable of `str`): Further keys, or some of these, whose callers are admins. Without any keys,
            everybody is one.

    Raises:
        ValueError: for keys that no header can carry.
    """

    def __init__(self, keys: Iterable[str] = (), salt: bytes | None = None, admin_keys: Iterable[str] = ()):
        salt = secrets.token_bytes(32) if salt is None else salt
        self._callers: dict[bytes, Caller] = {}
        for key, is_admin in [*((key, False) for key in keys), *((key, True) for key in admin_keys)]:
            if not key.isascii() or not key.isprintable() or not key.strip():
                raise ValueError("API keys must be printable ASCII text, and not empty.")
            namespace = hmac.new(salt, key.strip().encode(), hashlib.sha256).hexdigest()[:32]
            # The key itself is written nowhere.
            self._callers[_digest(key.strip())] = Caller(f"key:{namespace}", is_admin)

    def __len__(self) -> int:
        return len(self._callers)

    def caller(self, authorization: str | None) -> Caller | None:
        """Whose key a header brings; None for nobody's. It takes as long whatever the key has in common with one."""
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
    One key per line; empty lines and those that begin with # are none.

    Raises:
        OSError: if the file cannot be read.
        ValueError: if it holds none.
    """
    lines = [line.strip() for line in Path(path).read_text(encoding="ascii", errors="replace").splitlines()]
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys:
        raise ValueError(f"{str(path)!r} holds no API keys.")
    return keys
