"""Exchanging with a shared folder at intervals, beside whoever serves."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ..log import get_logger

logger = get_logger(__name__)


@contextmanager
def exchanging(exchange: Callable[[], object], interval: float, failed: str) -> Iterator[None]:
    """
    Calls `exchange` now, every `interval` seconds in a thread, and once more at the end. Its errors are reported once,
    behind `failed`, and disturb nobody.
    """

    def attempt() -> None:
        try:
            exchange()
        except Exception as error:  # of any file system
            logger.warning_once(f"{failed}: {error!r}")

    attempt()
    is_over = threading.Event()

    def run() -> None:
        while not is_over.wait(interval):
            attempt()

    thread = threading.Thread(target=run, name="hf-smartspec sharing", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
        attempt()
