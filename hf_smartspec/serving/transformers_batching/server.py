"""transformers' server (`transformers serve --continuous-batching`), with each request's own settings."""

import copy
import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from .manager import http_settings

_PLACE = "transformers.cli.serving.utils"

_seed: ContextVar[int | None] = ContextVar("seed", default=None)  # of the present HTTP request


@contextmanager
def own_settings() -> Iterator[None]:
    """
    Let servers of transformers (`transformers.cli.serve.Serve`) pass every request's own sampling parameters, seed and
    stop strings to a manager of ours, while the context lasts. Otherwise they apply those of the first request to all,
    and drop its stop strings. Use it with `enable`d models.

    Raises:
        ImportError: if transformers' server is not installed (`pip install "transformers[serving]"`).

    Example:

        >>> with hf_smartspec.enable(assistant="auto"), own_settings():
        ...     Serve("Qwen/Qwen3-0.6B", continuous_batching=True)
    """
    utils: Any = importlib.import_module(_PLACE)
    before = utils.CBGenerateManager, utils.set_torch_seed

    def set_torch_seed(seed: int) -> None:
        _seed.set(seed)
        before[1](seed)

    utils.CBGenerateManager, utils.set_torch_seed = _requestwise(before[0]), set_torch_seed
    try:
        yield
    finally:
        utils.CBGenerateManager, utils.set_torch_seed = before


@contextmanager
def _settings_of(processor: Any, gen_config: Any) -> Iterator[None]:
    """Give the settings of an HTTP request to the requests that are added within."""
    settings = {"generation_config": gen_config}
    if gen_config.stop_strings:
        settings["tokenizer"] = getattr(processor, "tokenizer", processor)
    if (seed := _seed.get()) is not None:
        settings["seed"] = seed
    token = http_settings.set(settings)
    try:
        yield
    finally:
        http_settings.reset(token)


def _requestwise(base: Any) -> Any:
    """Return a subclass of `CBGenerateManager` that passes a request's settings to the manager."""

    class RequestwiseGenerateManager(base):
        def init_cb(self, model: Any, gen_config: Any) -> None:
            if self._cb is None:
                gen_config = copy.copy(gen_config)
                gen_config.stop_strings = None  # the first request's must not apply to others
            super().init_cb(model, gen_config)

        def generate_streaming(self, model: Any, processor: Any, inputs: Any, gen_config: Any, **kwargs: Any) -> Any:
            with _settings_of(processor, gen_config):
                return super().generate_streaming(model, processor, inputs, gen_config, **kwargs)

        async def generate_non_streaming(
            self, model: Any, processor: Any, inputs: Any, gen_config: Any, **kwargs: Any
        ) -> Any:
            with _settings_of(processor, gen_config):
                return await super().generate_non_streaming(model, processor, inputs, gen_config, **kwargs)

    return RequestwiseGenerateManager
