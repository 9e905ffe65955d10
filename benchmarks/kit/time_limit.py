"""A limit on the time of one measurement."""

import math
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class OutOfTimeError(BaseException):
    """A measurement was stopped. No `Exception`: nothing on its way takes it for a failure of its own."""


@contextmanager
def stopping_after(seconds: float) -> Iterator[None]:
    """Raise `OutOfTimeError` in the block as soon as Python runs again after that time; main threads only can."""
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or not hasattr(signal, "setitimer") or seconds == math.inf:
        yield
        return

    def stop(*_: object) -> None:
        raise OutOfTimeError

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 0.1))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@contextmanager
def interrupted_by_sigterm() -> Iterator[None]:
    """Raise `KeyboardInterrupt` in the block at SIGTERM, as at Ctrl-C; main threads only can."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
