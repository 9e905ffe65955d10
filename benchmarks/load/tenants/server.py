"""`smartspec serve` in a process of its own, with a key for each tenant."""

import argparse
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import httpx

from hf_smartspec.commands.common.arguments import UsageError

_SECONDS_TO_START, _SECONDS_TO_END = 300.0, 30.0
_MAX_QUEUE = 4096  # has room for all of an attack


class TenantServer(NamedTuple):
    """
    Args:
        url (`str`): Its address, on loopback.
        keys (list of `str`): One for each tenant.
    """

    url: str
    keys: list[str]


@contextmanager
def tenant_server(args: argparse.Namespace) -> Iterator[TenantServer]:
    """
    Yield a server that ends with the block.

    Raises:
        UsageError: if it does not start; with its last words.
    """
    keys = [secrets.token_hex(16) for _ in range(args.tenants)]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with TemporaryDirectory() as folder:
        key_file, log = Path(folder, "keys"), Path(folder, "log")
        key_file.write_text("\n".join(keys) + "\n")
        with log.open("w") as stderr:
            process = subprocess.Popen(
                [sys.executable, "-m", "hf_smartspec.commands.main", *_command(args, key_file, port)],
                stdout=stderr, stderr=stderr, start_new_session=True,  # what interrupts this process leaves it
            )  # fmt: skip
        try:
            _wait_until_it_serves(process, port, log)
            yield TenantServer(f"http://127.0.0.1:{port}", keys)
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(_SECONDS_TO_END)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _command(args: argparse.Namespace, key_file: Path, port: int) -> list[str]:
    words = ["serve", *([] if args.model is None else [args.model]), "--assistant", args.assistant]
    words += ["--api-key-file", str(key_file), "--port", str(port), "--drain-seconds", "0"]
    words += ["--max-batch-size", str(args.max_batch_size), "--max-queue", str(_MAX_QUEUE), "--dtype", args.dtype]
    for option, value in (
        ("--max-requests-per-key", args.max_requests_per_key),
        ("--device", args.device),
        ("--threads", args.threads),
    ):
        words += [] if value is None else [option, str(value)]
    return words


def _wait_until_it_serves(process: subprocess.Popen, port: int, log: Path) -> None:
    deadline = time.monotonic() + _SECONDS_TO_START
    while True:
        try:
            if httpx.get(f"http://127.0.0.1:{port}/health").status_code == 200:
                return
        except httpx.TransportError:
            pass
        if process.poll() is not None or time.monotonic() > deadline:
            lines = log.read_text(errors="replace").strip().splitlines()
            raise UsageError(f"the server did not start: {lines[-1] if lines else 'it said nothing'}")
        time.sleep(0.1)
