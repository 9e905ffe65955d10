"""Lists of prompts, for which an engine runs where it does not already."""

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from transformers.utils.logging import tqdm

from .outputs import EngineOutput

# Engines are `Any` here: even a type-only import of `engine`, which imports this, would be a circle.


class OfflineCalls:
    """The calls of `generate` for which an engine runs: the last one stops it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num = 0

    @contextmanager
    def running(self, engine: Any) -> Iterator[None]:
        """Stop the engine after the last call, unless it ran before the first one."""
        with self._lock:
            is_own = self._num > 0 or not engine.is_running
            self._num += is_own
        try:
            yield
        finally:
            if is_own:
                with self._lock:
                    self._num -= 1
                    if not self._num:
                        engine.stop()


def answers(engine: Any, prompts: Sequence[Any], progress_bar: bool, options: Mapping[str, Any]) -> list[EngineOutput]:
    """
    Queue a request for each prompt, start the engine and return the outputs in order. If one request is refused or the
    call is interrupted, all are cancelled.
    """
    names: list[str] = []
    try:
        for prompt in prompts:
            names.append(engine.new_name())  # first: an interrupt may come as soon as the request is queued
            engine.add_request(prompt, request_id=names[-1], **options)
        engine.start()
        with tqdm(total=len(names), desc="generating", unit=" requests", disable=not progress_bar) as progress:
            outputs = []
            for name in names:
                output = engine.results.get(name)
                assert output is not None, "another reader has taken the output"
                outputs.append(output)
                progress.update()
        return outputs
    except BaseException:
        for name in names:
            engine.cancel_request(name, discard=True)
        raise
