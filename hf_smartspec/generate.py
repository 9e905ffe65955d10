"""Switch `assistant=` on and off in a model's `generate` and in its continuous batching."""

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from types import MethodType
from typing import Any, NamedTuple, TypeVar, overload

from transformers import GenerationMixin

from .decoding.statistics import ModelStatistics
from .prepare import entry
from .prepare.checks import check_assistant
from .prepare.entry import Default, EnabledCall, generating_model
from .serving.transformers_batching import entries
from .target_model.model_state import forget

ModelT = TypeVar("ModelT")

_PREVIOUS = "_smartspec_previous"
_STATISTICS = "smartspec_statistics"
_ADDED = """

        hf_smartspec adds:

            assistant (*optional*):
                The drafter of this call: a preset name ("auto", "suffix", "prompt_lookup", "datastore:PATH",
                "sssd:PATH", "tuned:PATH", "none", "mtp", "early_exit:N", ...), a draft model or its folder or hub id, a
                candidate source, a list of these or a `hf_smartspec.SmartSpecConfig`. By default, the one that `enable`
                or a generation config has set.
        """
_SEED = """    seed (`int` or sequence of `int`, *optional*):
                Seed of sampling, or one per row: the same seed gives the same tokens, whatever the assistant.
        """


class _Method(NamedTuple):
    """
    A method of models that `enable` replaces.

    Args:
        call (`Callable`): Serves a call of the method, as `entry.generate` does.
        documentation (`str`): Text that is added to the method's docstring.
        parameters (`tuple` of `str`): Names of keyword arguments that are added to its signature.
    """

    call: Callable[[EnabledCall], Any]
    documentation: str = _ADDED + _SEED
    parameters: tuple[str, ...] = ("assistant", "seed")


_METHODS = {
    "generate": _Method(entry.generate),
    "generate_batch": _Method(entries.generate_batch),
    "continuous_batching_context_manager": _Method(entries.continuous_batching_context_manager),
    "init_continuous_batching": _Method(entries.init_continuous_batching),
    "destroy_cached_continuous_batching_manager": _Method(entries.destroy_cached_manager, "", ()),
}


@overload
def enable(model: None = None, assistant: Any = None) -> AbstractContextManager[None]: ...
@overload
def enable(model: ModelT, assistant: Any = None) -> ModelT: ...
def enable(model: Any = None, assistant: Any = None) -> Any:
    """
    Add `assistant=` and `seed=` to `generate` and to transformers' continuous batching: `generate_batch`,
    `continuous_batching_context_manager` and `init_continuous_batching`. Calls without either go to the original
    method unchanged, unless a default is given here, or as `assistant` in a generation config.

    Args:
        model (`PreTrainedModel`, *optional*): The model to enable, in place; a pipeline, PEFT's or torch.compile's
            wrapper stands for the model inside. By default, every model of the process.
        assistant (*optional*): Default assistant of calls that do not pass one, see `SmartSpecConfig.assistant`.
            Calls that no assistant can serve (beam search, another assistant, ...) go to the original method. Without
            it, an earlier default stays.

    `model.smartspec_statistics` then counts what speculation did, in the last call (`.last`) and in all (`.total`).

    Returns:
        The model; without `model`, a context manager that disables all models again on exit.

    Raises:
        TypeError: if `model` has no `generate` of transformers.
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
    target = generating_model(model)
    vars(target).setdefault(_STATISTICS, ModelStatistics())
    default = _default_of(target) or Default(assistant)
    if assistant is not None and default.assistant is not assistant:
        default = Default(assistant)
    _enable_methods(target, default)
    return model


def _enable_methods(target: Any, default: Default) -> None:
    for name in _METHODS:
        before = vars(target).get(name)
        # A method set on the instance, as other patches do, stays underneath.
        previous = before.previous if isinstance(before, _EnabledMethod) else before
        setattr(target, name, _EnabledMethod(_call, name, target, previous, default))


def _enable_all(assistant: Any) -> None:
    methods = {name: getattr(GenerationMixin, name) for name in _METHODS}
    # Another library's patch may lie on top of one of them.
    defaults = [getattr(method, _PREVIOUS)[2] for method in methods.values() if _is_ours(method)]
    default = defaults[0] if defaults else Default(assistant)
    if assistant is not None:
        default.assistant = assistant
    for name, method in methods.items():
        if not _is_ours(method):
            setattr(GenerationMixin, name, _routed(name, method, default))


def disable(model: Any = None) -> Any:
    """
    Undo `enable`, without effect on models that are not enabled, and return the model. All that is remembered about
    the model is deleted (`ModelState`): texts and estimates of drafters, loaded drafters, and the memory of keys and
    values that is kept for the next call. Weights that were laid side by side in memory stay so.
    """
    if model is not None:
        target: Any = generating_model(model)
        entries.destroy_manager(target)
        forget(target)
    return _take_back(model)


def _take_back(model: Any) -> Any:
    if model is None:
        for name in _METHODS:
            function = getattr(GenerationMixin, name)
            if _is_ours(function):
                _restore(name, getattr(function, _PREVIOUS)[1])
        return None
    target = generating_model(model)
    found = {name: item for name, item in vars(target).items() if isinstance(item, _EnabledMethod)}
    for name, method in found.items():
        vars(target).pop(name)
        if method.previous is not None:
            setattr(target, name, method.previous)
    if found:
        vars(target).pop(_STATISTICS, None)
    return model


def _restore(name: str, previous: Callable) -> None:
    """Restore a method of all models. Those of continuous batching are inherited, and return once ours is deleted."""
    delattr(GenerationMixin, name)
    if getattr(GenerationMixin, name, None) is not previous:
        setattr(GenerationMixin, name, previous)


@contextmanager
def enabled(model: ModelT | None = None, assistant: Any = None) -> Iterator[ModelT | None]:
    """Enable within a `with` block; models that were enabled before stay so, with their earlier default."""
    target = None if model is None else generating_model(model)
    default = _default_of(target)
    earlier = None if default is None else default.assistant  # which `enable` may replace
    enable(model, assistant)
    try:
        yield model
    finally:
        if default is None:
            _take_back(model)  # keeps the model's state for the next block
        elif target is None:
            default.assistant = earlier
        else:
            _enable_methods(target, Default(earlier))


def _default_of(target: GenerationMixin | None) -> Default | None:
    """Return the default of an enabled model, or that of all models; None where `enable` was not called."""
    if target is None:
        method = GenerationMixin.generate
        return getattr(method, _PREVIOUS)[2] if _is_ours(method) else None
    own = vars(target).get("generate")
    return own.default if isinstance(own, _EnabledMethod) else None


@contextmanager
def _disabling() -> Iterator[None]:
    try:
        yield
    finally:
        disable()


class _EnabledMethod(partial):
    """
    A method of an enabled model, set on the instance. It is a partial and not a bound method, since only partials
    survive pickling as an attribute of the model they are bound to; `help` and `inspect` show it as a method.
    """

    def __get__(self, instance: Any, owner: Any = None) -> "_EnabledMethod":
        return self

    @property
    def __name__(self) -> str:
        return self.args[0]

    @property
    def previous(self) -> Callable | None:
        """The attribute of the instance that this method has replaced, if any."""
        return self.args[2]

    @property
    def default(self) -> Default:
        return self.args[3]

    @property
    def __wrapped__(self) -> Callable:
        name, model, previous, _ = self.args
        return previous or MethodType(getattr(type(model), name), model)

    @property
    def __signature__(self) -> inspect.Signature:
        return _with_ours(inspect.signature(self.__wrapped__), self.__name__)

    @property
    def __doc__(self) -> str:  # type: ignore[override]
        return _documented(self.__wrapped__, self.__name__)


def _with_ours(signature: inspect.Signature, method: str) -> inspect.Signature:
    """Return the signature with the method's added parameters, before `**kwargs`."""
    names = [name for name in _METHODS[method].parameters if name not in signature.parameters]
    parameters = list(signature.parameters.values())
    place = len(parameters) - any(item.kind is item.VAR_KEYWORD for item in parameters)
    parameters[place:place] = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None) for name in names]
    return signature.replace(parameters=parameters)


def _documented(function: Callable, method: str) -> str:
    text, added = inspect.getdoc(function) or "", _METHODS[method].documentation
    return text if added in text else text + added


def _is_ours(function: Callable) -> bool:
    # Another library's wrapper may have copied our attributes.
    return getattr(function, _PREVIOUS, (None,))[0] is function


def _call(name: str, model: Any, previous: Callable | None, default: Default, *args: Any, **kwargs: Any) -> Any:
    """Serve a method of an enabled model; `previous` is the one that was set on the instance before, if any."""
    original: Any = previous or MethodType(getattr(type(model), name), model)
    return _METHODS[name].call(EnabledCall(model, original, args, kwargs, default, _default_of(None)))


def _routed(name: str, previous: Callable, default: Default) -> Callable:
    """Return the method that serves every model while all are enabled; `previous` is the method it replaces."""

    @functools.wraps(previous)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return _METHODS[name].call(EnabledCall(self, MethodType(previous, self), args, kwargs, common=default))

    method.__signature__ = _with_ours(inspect.signature(previous), name)  # type: ignore[attr-defined]
    method.__doc__ = _documented(previous, name)
    setattr(method, _PREVIOUS, (method, previous, default))
    return method
