"""Entry of `generate` calls on enabled models: choose the assistant, then speculate or call transformers."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, NamedTuple

import torch
from transformers import GenerationMixin, Pipeline, PreTrainedModel

from ..log import get_logger
from ..target_model.compat import delegates_generate
from ..target_model.model_state import warn_once
from .arguments import by_name, check_arguments
from .call import prepare_call
from .checks import check_assistant
from .decode import decode_checked, decode_undrafted
from .encoders import watch_encoder
from .sources import resolve

logger = get_logger(__name__)

_is_serving: ContextVar[bool] = ContextVar("is_serving", default=False)  # within `without_defaults`


class Default:
    """An assistant given to `enable`. Deep copies of a model share it: what it holds is not copied."""

    def __init__(self, assistant: Any = None):
        self.assistant = assistant

    def __deepcopy__(self, memo: Any) -> "Default":
        return self


class Choice(NamedTuple):
    """
    The assistant chosen for a call.

    Args:
        assistant: The assistant; None to decode without one.
        is_default (`bool`): Whether it is a default, which is dropped where it does not fit the call.
    """

    assistant: Any
    is_default: bool = False


class EnabledCall(NamedTuple):
    """
    A call of a method of an enabled model.

    Args:
        model (`PreTrainedModel`): The model that the method belongs to.
        original (`Callable`): The method as it was before `enable`.
        args, kwargs: Arguments of the call.
        own, common (`Default`, *optional*): Defaults of the model, and of all models.
    """

    model: PreTrainedModel
    original: Callable
    args: tuple
    kwargs: dict[str, Any]
    own: Default | None = None
    common: Default | None = None

    def take(self) -> tuple[Any, Any]:
        """Remove `assistant` and `seed`, which transformers does not accept, from the arguments and return them."""
        return self.kwargs.pop("assistant", None), self.kwargs.pop("seed", None)

    def plain(self) -> Any:
        """Call the original method, without an assistant."""
        return self.original(*self.args, **self.kwargs)


def generating_model(model: Any) -> GenerationMixin:
    """
    Return the model inside a pipeline, PEFT's wrapper or torch.compile's wrapper.

    Raises:
        TypeError: if that model has no `generate` of transformers.
    """
    inner: Any = model.model if isinstance(model, Pipeline) else model
    while not isinstance(inner, GenerationMixin):
        if isinstance(inner, torch.nn.Module) and "_orig_mod" in inner._modules:  # torch.compile's
            inner = inner._modules["_orig_mod"]
        elif hasattr(inner, "get_base_model"):  # PEFT's wrapper calls `generate` of the model inside
            inner = inner.get_base_model()
        else:
            raise TypeError(f"`model` must be a transformers model that can generate, got {type(model).__name__}.")
    return inner


def generate(call: EnabledCall) -> Any:
    """
    Serve a call with its assistant, or pass it to transformers unchanged. A default assistant is dropped where it does
    not fit the call, so that a default never makes a call fail that works without it.
    """
    assistant, seed = call.take()
    model, original, args, kwargs, *_ = call
    if isinstance(original, partial):  # the model's repository brings a decoding method: defaults do not apply
        call = call._replace(own=None, common=None)
    choice = choose(call, assistant, kwargs.get("generation_config", args[1] if len(args) > 1 else None))
    with without_defaults():
        if choice.assistant is None:
            return _undrafted(call, seed)
        try:
            named = without_assistant(by_name(original, args, kwargs))
            arguments, config = check_arguments(model, named, choice.assistant, seed)
        except (TypeError, ValueError) as error:
            if not choice.is_default:
                raise
            logger.info(f"This call is left to transformers: {error}")
            return _undrafted(call, seed)
        try:
            resolved = resolve(config, model)
        except (OSError, TypeError, ValueError) as error:
            if not choice.is_default:
                raise
            warn_once(model, f"The default assistant cannot draft for {type(model).__name__}: {error}")
            return _undrafted(call, seed)
        with watch_encoder(model) as encoder_arguments:
            # The streamer is among them, since transformers drops it on the way to a callable.
            custom_generate = partial(
                decode_checked, assistant=resolved, seed=seed, streamer=arguments.get("streamer"),
                encoder_arguments=encoder_arguments, gives_way=choice.is_default,
            )  # fmt: skip
            return original(**arguments | {"custom_generate": custom_generate})


def _undrafted(call: EnabledCall, seed: Any) -> Any:
    """Decode a call without an assistant: by the original method, or with seeded noise if there is a seed."""
    if seed is None:
        return call.plain()
    model, original, args, kwargs, *_ = call

    def custom_generate(model: PreTrainedModel, input_ids: torch.LongTensor, **prepared: Any) -> Any:
        options = {"assistant": none, "seed": seed, "streamer": arguments.get("streamer")}
        return decode_undrafted(prepare_call(model, input_ids, **options, **prepared))

    try:
        arguments, config = check_arguments(model, by_name(original, args, kwargs), "none", seed)
        none = resolve(config, model)
        return original(**arguments | {"custom_generate": custom_generate})
    except ValueError as error:
        raise ValueError(str(error).replace("`assistant`", "`seed`")) from error  # seeds have the same limits


def choose(call: EnabledCall, assistant: Any, config: Any) -> Choice:
    """
    Return the first assistant found in: `assistant=` of the call, its `generation_config`, the default of the model,
    the model's own `generation_config`, the default of all models.

    Defaults apply to the user's own calls: not to calls that transformers makes within one (of a draft model), nor to
    models whose class has its own `generate`, which prepares more than one call; except Whisper, whose calls are all
    alike.

    Args:
        config (`GenerationConfig`, *optional*): The call's own.

    Raises:
        ValueError, TypeError: if the assistant of a `generation_config` cannot draft.
    """
    if assistant is not None:
        return Choice(assistant)
    model, _, _, _, own, common = call
    has_own = getattr(type(model), "generate", None) is not GenerationMixin.generate
    if (has_own and not delegates_generate(model)) or _is_serving.get() or getattr(config, "is_assistant", False):
        return Choice(None)
    of_model, of_call = _of_model(model), assistant_of_call(config, model)
    if of_call is not None:
        return Choice(of_call)
    candidates = (own and own.assistant, of_model, common and common.assistant)
    return Choice(next((item for item in candidates if item is not None), None), is_default=True)


def assistant_of_call(config: Any, model: PreTrainedModel) -> Any:
    """
    Return the assistant that a call's `generation_config` names. None if it names none, or the same as the model's own
    config: pipelines and servers make a call's config from that one.

    Raises:
        ValueError, TypeError: if that assistant cannot draft.
    """
    of_call = assistant_of(config)
    return None if of_call is None or of_call == _of_model(model) else of_call


def _of_model(model: PreTrainedModel) -> Any:
    """Return the assistant of the model's own `generation_config`, which transformers saves and copies in each call."""
    assistant = assistant_of(getattr(model, "generation_config", None))
    if _is_live(assistant):
        raise ValueError(
            "`assistant` of a model's own `generation_config` must be a preset name, the folder or hub id of a draft "
            "model, or a list of these, since transformers copies it in every call, and saves it. Give models, "
            "candidate sources and SmartSpecConfigs to `enable(model, assistant=...)`."
        )
    return assistant


def _is_live(assistant: Any) -> bool:
    """Return whether `assistant` is or contains an object, and not only names."""
    if isinstance(assistant, list | tuple):
        return any(map(_is_live, assistant))
    return not isinstance(assistant, str | None)


def assistant_of(config: Any) -> Any:
    """
    Return the assistant of a `generation_config`; None if there is no config, or no assistant in it.

    Raises:
        ValueError, TypeError: if that assistant cannot draft.
    """
    assistant = getattr(config, "assistant", None)
    if assistant is not None:
        check_assistant(assistant)
    return assistant


@contextmanager
def without_defaults() -> Iterator[None]:
    """Context in which calls of `generate` get no default assistant."""
    token = _is_serving.set(True)
    try:
        yield
    finally:
        _is_serving.reset(token)


def without_assistant(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments with a config without `assistant`, which transformers would copy; the caller's stays."""
    config: Any = kwargs.get("generation_config")
    if getattr(config, "assistant", None) is None:
        return kwargs
    config = copy.copy(config)
    del config.assistant
    return kwargs | {"generation_config": config}
