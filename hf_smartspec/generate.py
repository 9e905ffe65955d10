"""`assistant=` in `model.generate`: switching it on and off, and handing the call to `decode`."""

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from types import MethodType
from typing import Any, TypeVar, overload

import torch
from transformers import GenerationMixin, Pipeline, PreTrainedModel

from .log import get_logger
from .prepare.arguments import by_name, check_arguments, run_with
from .prepare.decode import decode_prepared, decode_undrafted
from .prepare.defaults import Default, choose, serving, without_assistant
from .prepare.model_state import ModelStatistics, warn_once
from .prepare.resolve import check_assistant, resolve
from .target import kept_memory
from .target.written import forget

logger = get_logger(__name__)

ModelT = TypeVar("ModelT")

_PREVIOUS = "_smartspec_previous_generate"
_STATISTICS = "smartspec_statistics"
_DOCUMENTATION = """

        hf_smartspec adds:

            assistant (*optional*):
                What drafts for this call: a preset name ("auto", "suffix", "prompt_lookup", "datastore:PATH",
                "tuned:PATH", "none"), a draft model or its folder or hub id, a candidate source, a list of these or a
                `hf_smartspec.SmartSpecConfig`. By default, what `enable` or a generation config says.
            seed (`int` or sequence of `int`, *optional*):
                For sampling: the same tokens for the same seed, whatever drafts; one seed, or one per row.
        """


@overload
def enable(model: None = None, assistant: Any = None) -> AbstractContextManager[None]: ...
@overload
def enable(model: ModelT, assistant: Any = None) -> ModelT: ...
def enable(model: Any = None, assistant: Any = None) -> Any:
    """
    Makes `generate` understand `assistant=` and `seed=`. Calls without either go to the original untouched, unless a
    default is given here, or as `assistant` in a generation config.

    Args:
        model (`PreTrainedModel`, *optional*): The model to enable, in place; a pipeline, PEFT's or torch.compile's
            wrapper stands for the model inside. Without it, every model of the process.
        assistant (*optional*): What drafts for calls that do not say so themselves, see `SmartSpecConfig.assistant`.
            Calls that ask for what no assistant can do (beam search, another assistant, ...) go to the original. Where
            not given, a default of before stays.

    `model.smartspec_statistics` then tells what speculation did, in the last call (`.last`) and in all (`.total`).

    Returns:
        The model; without one, a context manager that disables again when it is left.

    Raises:
        TypeError: if `model` does not generate.
        ValueError, TypeError: if `assistant` cannot draft.

    Example:

        >>> model = hf_smartspec.enable(AutoModelForCausalLM.from_pretrained(name))
        >>> model.generate(**inputs, assistant="prompt_lookup", max_new_tokens=64)
        >>> hf_smartspec.enable(model, assistant="auto")
        >>> model.generate(**inputs, max_new_tokens=64)
    """
    if assistant is not None:
        check_assistant(assistant)
    if model is None:
        _enable_all(assistant)
        return _disabling()
    target = generating(model)
    enabled_before = vars(target).get("generate")
    vars(target).setdefault(_STATISTICS, ModelStatistics())
    if not isinstance(enabled_before, _EnabledGenerate):
        # A `generate` set on the instance, as other patches do, stays underneath.
        _set(target, _EnabledGenerate(_generate, target, enabled_before, Default(assistant)))
    elif assistant is not None:
        _set(target, _EnabledGenerate(_generate, target, enabled_before.previous, Default(assistant)))
    return model


def _enable_all(assistant: Any) -> None:
    if not _is_globally_enabled():
        GenerationMixin.generate = _routed(GenerationMixin.generate, Default(assistant))  # type: ignore[method-assign]
    elif assistant is not None:
        getattr(GenerationMixin.generate, _PREVIOUS)[2].assistant = assistant


def disable(model: Any = None) -> Any:
    """
    Takes `enable` back; without effect where it was not called. What is remembered with the model is forgotten, and the
    memory of keys and values that is kept for its next call freed; weights that were laid side by side in memory stay
    so. Returns the model.
    """
    if model is not None:
        target: Any = generating(model)
        forget(target)
        kept_memory.forget(target)
    return _take_back(model)


def _take_back(model: Any) -> Any:
    if model is None:
        if _is_globally_enabled():
            GenerationMixin.generate = getattr(GenerationMixin.generate, _PREVIOUS)[1]  # type: ignore[method-assign]
        return None
    target = generating(model)
    if _is_enabled(target):
        previous = vars(target).pop("generate").previous
        vars(target).pop(_STATISTICS, None)
        if previous is not None:
            _set(target, previous)
    return model


@contextmanager
def enabled(model: ModelT | None = None, assistant: Any = None) -> Iterator[ModelT | None]:
    """`enable` for the duration of a `with` block; what was enabled before, and its default, stays so."""
    target = None if model is None else generating(model)
    was_enabled = _is_globally_enabled() if target is None else _is_enabled(target)
    default = _default_of(target) if was_enabled else None
    enable(model, assistant)
    try:
        yield model
    finally:
        if not was_enabled:
            _take_back(model)  # what is known of it serves the next block
        elif target is None:
            getattr(GenerationMixin.generate, _PREVIOUS)[2].assistant = default
        else:
            _set(target, _EnabledGenerate(_generate, target, vars(target)["generate"].previous, Default(default)))


def _default_of(target: GenerationMixin | None) -> Any:
    if target is None:
        return getattr(GenerationMixin.generate, _PREVIOUS)[2].assistant
    return vars(target)["generate"].default.assistant


@contextmanager
def _disabling() -> Iterator[None]:
    try:
        yield
    finally:
        disable()


def generating(model: Any) -> GenerationMixin:
    """The model inside a pipeline, PEFT's wrapper or torch.compile's; `TypeError` if there is none that generates."""
    inner: Any = model.model if isinstance(model, Pipeline) else model
    while not isinstance(inner, GenerationMixin):
        if isinstance(inner, torch.nn.Module) and "_orig_mod" in inner._modules:  # torch.compile's
            inner = inner._modules["_orig_mod"]
        elif hasattr(inner, "get_base_model"):  # PEFT's pass `generate` on to the model inside
            inner = inner.get_base_model()
        else:
            raise TypeError(f"`model` must be a transformers model that can generate, got {type(model).__name__}.")
    return inner


class _EnabledGenerate(partial):
    """
    `generate` of an enabled model, for a place on the instance. A partial, not a bound method: only partials survive
    pickling as an attribute of the model they are bound to. To `help` and `inspect` it looks like a method.
    """

    __name__ = "generate"

    def __get__(self, instance: Any, owner: Any = None) -> "_EnabledGenerate":
        return self

    @property
    def previous(self) -> Callable | None:
        """What was set on the instance before."""
        return self.args[1]

    @property
    def default(self) -> Default:
        return self.args[2]

    @property
    def __wrapped__(self) -> Callable:
        return self.previous or MethodType(type(self.args[0]).generate, self.args[0])

    @property
    def __signature__(self) -> inspect.Signature:
        return _with_ours(inspect.signature(self.__wrapped__))

    @property
    def __doc__(self) -> str:  # type: ignore[override]
        return _documented(self.__wrapped__)


def _with_ours(signature: inspect.Signature) -> inspect.Signature:
    """The signature of a `generate`, with the parameters that are added to it."""
    added = inspect.signature(_generate).parameters
    names = [name for name in ("assistant", "seed") if name not in signature.parameters]
    parameters = list(signature.parameters.values())
    place = len(parameters) - any(item.kind is item.VAR_KEYWORD for item in parameters)
    parameters[place:place] = [added[name] for name in names]
    return signature.replace(parameters=parameters)


def _documented(generate: Callable) -> str:
    text = inspect.getdoc(generate) or ""
    return text if _DOCUMENTATION in text else text + _DOCUMENTATION


def _set(target: Any, generate: Any) -> None:
    target.generate = generate


def _is_enabled(model: GenerationMixin) -> bool:
    return isinstance(vars(model).get("generate"), _EnabledGenerate)


def _is_globally_enabled() -> bool:
    # Somebody else's wrapper may have copied our attributes.
    function = getattr(GenerationMixin.generate, _PREVIOUS, (None,))[0]
    return function is GenerationMixin.generate


def _generate(
    model: Any,
    previous: Callable | None,
    default: Default,
    *args: Any,
    assistant: Any = None,
    seed: int | Sequence[int] | None = None,
    **kwargs: Any,
) -> Any:
    """`generate` of an enabled model; `previous` is the one that was set on the instance before, if any."""
    original: Any = previous or MethodType(type(model).generate, model)
    common = getattr(GenerationMixin.generate, _PREVIOUS)[2] if _is_globally_enabled() else None
    if isinstance(previous, partial):  # a recipe of the model's repository, which has a decoding method of its own
        return _route(model, original, args, kwargs, assistant, seed, None, None)
    return _route(model, original, args, kwargs, assistant, seed, default, common)


def _routed(previous: Callable, default: Default) -> Callable:
    """`generate` of every model, while enabled for all; `previous` is what stood there before."""

    @functools.wraps(previous)
    def generate(
        self: Any, *args: Any, assistant: Any = None, seed: int | Sequence[int] | None = None, **kwargs: Any
    ) -> Any:
        return _route(self, MethodType(previous, self), args, kwargs, assistant, seed, None, default)

    generate.__signature__ = _with_ours(inspect.signature(previous))  # type: ignore[attr-defined]
    generate.__doc__ = _documented(previous)
    setattr(generate, _PREVIOUS, (generate, previous, default))
    return generate


def _route(
    model: PreTrainedModel,
    original: Callable,
    args: tuple,
    kwargs: dict[str, Any],
    assistant: Any,
    seed: Any,
    own: Default | None,
    common: Default | None,
) -> Any:
    """
    The call with its assistant, or untouched. A default gives way to whatever it cannot go with: it never makes a call
    fail that works without it.
    """
    config = kwargs.get("generation_config", args[1] if len(args) > 1 else None)
    choice = choose(model, assistant, config, own, common)
    with serving():
        if choice.assistant is None:
            return _undrafted(model, original, args, kwargs, seed)
        try:
            named = without_assistant(by_name(original, args, kwargs))
            arguments = check_arguments(model, named, choice.assistant, seed)
        except (TypeError, ValueError) as error:
            if not choice.is_default:
                raise
            logger.info(f"This call is left to transformers: {error}")
            return _undrafted(model, original, args, kwargs, seed)
        try:
            resolved = resolve(arguments.assistant, model)
        except (OSError, TypeError, ValueError) as error:
            if not choice.is_default:
                raise
            warn_once(model, f"The default assistant cannot draft for {type(model).__name__}: {error}")
            return _undrafted(model, original, args, kwargs, seed)
        return arguments.run(model, decode_prepared, original, resolved, choice.is_default)


def _undrafted(model: PreTrainedModel, original: Callable, args: tuple, kwargs: dict[str, Any], seed: Any) -> Any:
    if seed is None:
        return original(*args, **kwargs)
    try:
        return run_with(decode_undrafted, model, original, by_name(original, args, kwargs), "none", seed)
    except ValueError as error:
        raise ValueError(str(error).replace("`assistant`", "`seed`")) from error  # it is served in the same calls
