"""Which assistant a `generate` call gets that may not name one itself."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

from transformers import GenerationMixin, PreTrainedModel

from ..target_model.compat import hands_arguments_on
from .resolve import check_assistant

_is_serving: ContextVar[bool] = ContextVar("is_serving", default=False)


class Default:
    """An assistant that was given to `enable`. Copies of a model share it, whatever it holds."""

    def __init__(self, assistant: Any = None):
        self.assistant = assistant

    def __deepcopy__(self, memo: Any) -> "Default":
        return self


class Choice(NamedTuple):
    """
    Args:
        assistant: What the caller wants to draft; None for nothing.
        is_default (`bool`): Whether the call did not ask for it itself: then it gives way to what it cannot go with.
    """

    assistant: Any
    is_default: bool = False


class EnabledCall(NamedTuple):
    """
    A call of a method of an enabled model.

    Args:
        model (`PreTrainedModel`): Whose method it is.
        original (`Callable`): The method as it was before.
        args, kwargs: Of the call.
        own, common (`Default`, *optional*): Of the model, and of all models.
    """

    model: PreTrainedModel
    original: Callable
    args: tuple
    kwargs: dict[str, Any]
    own: Default | None = None
    common: Default | None = None

    def take(self) -> tuple[Any, Any]:
        """Its `assistant` and `seed`, which transformers does not know; they are then no arguments any more."""
        return self.kwargs.pop("assistant", None), self.kwargs.pop("seed", None)

    def plain(self) -> Any:
        """What transformers makes of it."""
        return self.original(*self.args, **self.kwargs)


def choose(call: EnabledCall, assistant: Any, config: Any) -> Choice:
    """
    The first that says something: `assistant=` of the call, its `generation_config`, the default of the model, the
    model's own `generation_config`, the default of all models.

    Defaults are for calls of the user's: not for those that transformers makes within one (of a draft model), nor for
    models with a `generate` of their own, which prepares more than one call; except Whisper, whose calls are all alike.

    Args:
        config (`GenerationConfig`, *optional*): That of the call.

    Raises:
        ValueError, TypeError: if a `generation_config` names what is no assistant.
    """
    if assistant is not None:
        return Choice(assistant)
    model, _, _, _, own, common = call
    has_own = getattr(type(model), "generate", None) is not GenerationMixin.generate
    if (has_own and not hands_arguments_on(model)) or _is_serving.get() or getattr(config, "is_assistant", False):
        return Choice(None)
    of_model, of_call = _of_model(model), asked_by(config, model)
    if of_call is not None:
        return Choice(of_call)
    candidates = (own and own.assistant, of_model, common and common.assistant)
    return Choice(next((item for item in candidates if item is not None), None), is_default=True)


def asked_by(config: Any, model: PreTrainedModel) -> Any:
    """
    The assistant that a call's `generation_config` names; None where it names none, or the model's own: then it is made
    from that, as pipelines and servers do.

    Raises:
        ValueError, TypeError: if it names what is no assistant.
    """
    of_call = assistant_of(config)
    return None if of_call is None or of_call == _of_model(model) else of_call


def _of_model(model: PreTrainedModel) -> Any:
    """What the model's own `generation_config` names, which transformers copies in every call, and saves."""
    assistant = assistant_of(getattr(model, "generation_config", None))
    if _is_live(assistant):
        raise ValueError(
            "`assistant` of a model's own `generation_config` must be a preset name, the folder or hub id of a draft "
            "model, or a list of these, since transformers copies it in every call, and saves it. Give models, "
            "candidate sources and SmartSpecConfigs to `enable(model, assistant=...)`."
        )
    return assistant


def _is_live(assistant: Any) -> bool:
    """Whether it is, or holds, more than names."""
    if isinstance(assistant, list | tuple):
        return any(map(_is_live, assistant))
    return not isinstance(assistant, str | None)


def assistant_of(config: Any) -> Any:
    """
    What a `generation_config` names, if it is there and names something.

    Raises:
        ValueError, TypeError: if that is no assistant.
    """
    assistant = getattr(config, "assistant", None)
    if assistant is not None:
        check_assistant(assistant)
    return assistant


@contextmanager
def serving() -> Iterator[None]:
    """Calls of `generate` within have no default."""
    token = _is_serving.set(True)
    try:
        yield
    finally:
        _is_serving.reset(token)


def without_assistant(kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments for transformers, which would copy whatever a config holds; the caller's config stays as it is."""
    config: Any = kwargs.get("generation_config")
    if getattr(config, "assistant", None) is None:
        return kwargs
    config = copy.copy(config)
    del config.assistant
    return kwargs | {"generation_config": config}
