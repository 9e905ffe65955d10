"""Private parts of transformers that this library calls, and the features that fail where a release lacks them."""

import importlib
from collections.abc import Callable
from typing import Any

import transformers
from packaging.version import Version
from transformers import GenerationMixin, PreTrainedModel

from ..log import get_logger

logger = get_logger(__name__)

TRANSFORMERS = Version(transformers.__version__)
NEWEST_TESTED = Version("5.24")  # patches of it included; `make test-versions` tests releases

_ROW_BY_ROW = "models that run row by row"
_WITH_STATE = "engines of models that are decoded without speculation"
_METHODS = {
    "_is_stateful": "`generate` with an assistant, and engines",
    "_prepare_cache_for_generation": _ROW_BY_ROW,
    "_prefill": f"prompts with images, {_WITH_STATE}",
    "_prepare_generation_config": "`generate` with an assistant",
    "_prepare_text_encoder_decoder_kwargs_for_generation": "engines of models with an encoder",
    "_sample": "seeds without an assistant, and calls that are decoded without speculation",
    "_supports_default_dynamic_cache": "`generate` with an assistant, and engines",
    "_supports_logits_to_keep": "drafters that learn online",
    "_update_model_kwargs_for_generation": f"models that have to be tried out, {_WITH_STATE}",
}
_missing: dict[str, str] = {}  # features that fail, by the name of the missing part


def is_newer() -> bool:
    """Return whether the installed transformers belongs to a later release line than those tested."""
    return TRANSFORMERS.release[:2] > NEWEST_TESTED.release[:2]


def private_function(module: str, name: str, serves: str) -> Callable[..., Any]:
    """
    Return a function of a module of transformers. Where the module lacks it, return one that raises when it is called,
    so that trials fail, and let `warn_of_release` list the affected features.

    Args:
        serves (`str`): The features that need the function.
    """
    try:
        return getattr(importlib.import_module(module), name)
    except (AttributeError, ImportError):
        _missing[name] = serves

    def absent(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"transformers {TRANSFORMERS} has no `{module}.{name}`, which {serves} need.")

    return absent


def private_value(module: str, name: str, default: Any, serves: str) -> Any:
    """
    Return a constant of a module of transformers; where it is missing, `default`, and let `warn_of_release` list
    `serves`.
    """
    try:
        return getattr(importlib.import_module(module), name)
    except (AttributeError, ImportError):
        _missing[name] = serves
        return default


def release_warning() -> str | None:
    """
    Return the warning for users of the installed release: it is newer than those tested, or lacks private functions.
    None where neither is so.
    """
    absent = {name: serves for name, serves in _METHODS.items() if not _has_method(name)} | _missing
    parts = []
    if is_newer():
        parts.append(
            f"transformers {TRANSFORMERS} is newer than {NEWEST_TESTED}, the newest release that this version of "
            "hf-smartspec was tested with. Models are tried out before they are sped up, and decoded without "
            "speculation, with a warning, where that fails; `smartspec verify MODEL` compares outputs."
        )
    if absent:
        listed = "; ".join(f"{serves} (`{name}`)" for name, serves in sorted(absent.items()))
        parts.append(
            f"transformers {TRANSFORMERS} lacks private functions that hf-smartspec calls. Affected are: {listed}."
        )
    return " ".join(parts) or None


def _has_method(name: str) -> bool:
    return hasattr(GenerationMixin, name) or hasattr(PreTrainedModel, name)


def warn_of_release() -> None:
    """Warn, once per process, if there is a `release_warning`."""
    if message := release_warning():
        logger.warning_once(message)
