"""Loggers under `hf_smartspec`, which follow the verbosity of transformers and carry this library's name."""

import logging
import sys
from functools import lru_cache
from typing import Any

from transformers.utils import logging as transformers_logging

progress_bar = transformers_logging.tqdm  # hidden where transformers' bars are


def get_logger(name: str) -> Any:
    """
    Return the logger of a module. Its level follows transformers' (`TRANSFORMERS_VERBOSITY`, `set_verbosity_error()`),
    unless `logging.getLogger("hf_smartspec")` has been given one. It has transformers' `warning_once`.
    """
    _root()
    return logging.getLogger(name)


class _Root(logging.Logger):
    """A logger whose level, where none is set, is that of transformers."""

    @property
    def level(self) -> int:
        return vars(self)["level"] or transformers_logging.get_verbosity()

    @level.setter
    def level(self, value: int) -> None:
        vars(self)["level"] = value


class _Handler(logging.StreamHandler):
    """A handler that prints to stderr unless the application has handlers of its own, which then get the records."""

    def emit(self, record: logging.LogRecord) -> None:
        is_silenced = not transformers_logging.get_logger().handlers  # by `disable_default_handler()`
        if logging.getLogger().handlers or is_silenced:
            return
        self.stream = sys.stderr  # may have been replaced since
        super().emit(record)


@lru_cache(maxsize=1)
def _root() -> logging.Logger:
    root = logging.getLogger("hf_smartspec")
    root.__class__ = _Root
    handler = _Handler()
    handler.setFormatter(logging.Formatter("[hf_smartspec] %(levelname)s: %(message)s"))
    root.addHandler(handler)
    return root
