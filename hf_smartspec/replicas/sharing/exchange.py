"""Exchange with a shared folder at intervals, in a thread."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from ...log import get_logger

logger = get_logger(__name__)


@contextmanager
def exchanging(steps: Sequence[Callable[[], object]], interval: float, failed: str) -> Iterator[None]:
    """
    Call each of `steps` now, every `interval` seconds in a thread, and once more at the end. Errors are not raised: the
    first of a series is logged after the text `failed`.
    """
    failing = set[int]()

    def attempt() -> None:
        for place, step in enumerate(steps):
            try:
                step()
                failing.discard(place)
            except Exception as error:  # of any file system
                if place not in failing:
                    logger.warning(f"{failed}: {error!r}")
                failing.add(place)

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
