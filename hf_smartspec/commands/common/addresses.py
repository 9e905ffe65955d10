"""Addresses and ports to listen at."""

import argparse
import socket

from .arguments import UsageError, not_negative

_LAST_PORT = 65535


def host(text: str) -> str:
    """Return an address from the command line; an empty one is refused, since sockets take it for all addresses."""
    if not text:
        raise argparse.ArgumentTypeError("must name an address; 0.0.0.0 is all of this machine's")
    return text


def port(text: str) -> int:
    """Return a port number from the command line."""
    value = not_negative(text)
    if value > _LAST_PORT:
        raise argparse.ArgumentTypeError(f"must be at most {_LAST_PORT}, got {value}")
    return value


def listen_at(host: str, port: int) -> socket.socket:
    """
    Return a listening socket, to be made before anything is loaded. Port 0 takes a free one.

    Raises:
        UsageError: if the address is in use, or is no address.
    """
    from ...serving.server.running import listen  # needs a server's packages

    try:
        return listen(host, port)
    except OSError as error:
        raise UsageError(f"cannot listen at {host}, port {port}: {error.strerror or error}") from error
