"""`assistant=` in `model.generate`: switching it on and off, and handing the call to `decode`."""

import copy
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import MethodType
from typing import Any

import torch
from transformers import GenerationConfig, GenerationMixin, PreTrainedModel, StoppingCriteriaList
from transformers.generation import StopStringCriteria

from .prepare.call import PreparedCall, prepare_call
from .prepare.checks import check_mask, check_settings, check_source_options, check_token_ids
from .prepare.config import SmartSpecConfig
from .prepare.decode import decode_prepared
from .prepare.resolve import Assistant, resolve
from .validate import check_seed

_PARAMETERS = list(inspect.signature(GenerationMixin.generate).parameters)[1:]
_PREVIOUS = "_smartspec_previous_generate"


def enable(model: Any = None) -> Any:
    """
    Makes `generate` understand `assistant=` and `seed=`. Calls without `assistant` go to the original untouched.

    Args:
        model (`PreTrainedModel`, *optional*): The model to enable, in place; again to no effect. Without it, every
            model of the process.

    Returns:
        The model; without one, a context manager that disables again when it is left.

    Raises:
        TypeError: if `model` does not generate.

    Example:

        >>> model = hf_smartspec.enable(AutoModelForCausalLM.from_pretrained(name))
        >>> model.generate(**inputs, assistant="prompt_lookup", max_new_tokens=64)
    """
    if model is None:
        if not _is_globally_enabled():
            GenerationMixin.generate = _routed(GenerationMixin.generate)  # type: ignore[method-assign]
        return _disabling()
    target = generating(model)
    if not _is_enabled(target):
        # A `generate` set on the instance, as other patches do, stays underneath. A partial, not a bound method: only
        # partials survive pickling as an attribute of the model they are bound to.
        target.generate = partial(_generate, target, vars(target).get("generate"))  # type: ignore[method-assign, misc]
    return model


def disable(model: Any = None) -> Any:
    """Takes `enable` back; without effect where it was not called. Returns the model."""
    if model is None:
        if _is_globally_enabled():
            _, previous = getattr(GenerationMixin.generate, _PREVIOUS)
            GenerationMixin.generate = previous  # type: ignore[method-assign]
        return None
    target = generating(model)
    if _is_enabled(target):
        previous = vars(target).pop("generate").args[1]
        if previous is not None:
            target.generate = previous  # type: ignore[method-assign, misc]
    return model


@contextmanager
def enabled(model: Any = None) -> Iterator[Any]:
    """`enable` for the duration of a `with` block; what was enabled before stays so."""
    was_enabled = _is_enabled(generating(model)) if model is not None else _is_globally_enabled()
    enable(model)
    try:
        yield model
    finally:
        if not was_enabled:
            disable(model)


@contextmanager
def _disabling() -> Iterator[None]:
    try:
        yield
    finally:
        disable()


def generating(model: Any) -> GenerationMixin:
    if not isinstance(model, GenerationMixin) and hasattr(model, "get_base_model"):
        model = model.get_base_model()  # PEFT's wrappers pass `generate` on to the model inside
    if not isinstance(model, GenerationMixin):
        raise TypeError(f"`model` must be a transformers model that can generate, got {type(model).__name__}.")
    return model


def _is_enabled(model: GenerationMixin) -> bool:
    generate = vars(model).get("generate")
    return isinstance(generate, partial) and generate.func is _generate


def _is_globally_enabled() -> bool:
    # Somebody else's wrapper may have copied our attributes.
    function, _ = getattr(GenerationMixin.generate, _PREVIOUS, (None, None))
    return function is GenerationMixin.generate


def _generate(
    model: Any,
    previous: Callable | None,
    *args: Any,
    assistant: Any = None,
    seed: int | Sequence[int] | None = None,
    **kwargs: Any,
) -> Any:
    """`generate` of an enabled model; `previous` is the one that was set on the instance before, if any."""
    original = previous or MethodType(type(model).generate, model)
    return _route(model, original, args, kwargs, assistant, seed)


def _routed(previous: Callable) -> Callable:
    """`generate` of every model, while enabled for all; `previous` is what stood there before."""

    def generate(
        self: Any, *args: Any, assistant: Any = None, seed: int | Sequence[int] | None = None, **kwargs: Any
    ) -> Any:
        return _route(self, MethodType(previous, self), args, kwargs, assistant, seed)

    setattr(generate, _PREVIOUS, (generate, previous))
    return generate


def _route(
    model: PreTrainedModel, original: Callable, args: tuple, kwargs: dict[str, Any], assistant: Any, seed: Any
) -> Any:
    if assistant is None:
        if seed is not None:
            kwargs["seed"] = seed  # transformers says that it does not know it
        return original(*args, **kwargs)
    return run_with(decode_prepared, model, original, kwargs | _by_name(args, kwargs), assistant, seed)


def run_with(
    method: Callable[[PreparedCall], Any],
    model: PreTrainedModel,
    original: Callable,
    kwargs: dict[str, Any],
    assistant: Any,
    seed: Any,
) -> Any:
    """
    Checks the arguments of a `generate` call, has `original`, transformers' own, prepare them, and hands them to
    `method`, whose result it returns.
    """
    assistant = _with_num_nodes(assistant, kwargs)
    settings = _checked_settings(model, kwargs, seed)
    resolved = resolve(assistant, model)  # refuses what cannot draft before any work starts
    kwargs = _with_stop_strings(model, kwargs, settings.stop_strings)
    streamer = kwargs.get("streamer")  # transformers drops it on the way to a callable `custom_generate`

    def custom_generate(model: PreTrainedModel, input_ids: torch.LongTensor, **prepared: Any) -> Any:
        return method(prepare_call(model, input_ids, assistant=resolved, seed=seed, streamer=streamer, **prepared))

    return original(**kwargs | {"custom_generate": custom_generate})


def _by_name(args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Positional arguments of `generate` under their names."""
    if len(args) > len(_PARAMETERS):
        raise TypeError(f"generate() takes at most {len(_PARAMETERS)} positional arguments, got {len(args)}.")
    named = dict(zip(_PARAMETERS, args))
    for name in named.keys() & kwargs.keys():
        raise TypeError(f"generate() got multiple values for argument '{name}'.")
    return named


def _with_num_nodes(assistant: Any, kwargs: dict[str, Any]) -> Any:
    """`num_assistant_tokens` says how much to draft, as for transformers' assistants."""
    num_nodes = kwargs.pop("num_assistant_tokens", None)
    if isinstance(assistant, SmartSpecConfig | Assistant):
        if num_nodes is not None:
            raise ValueError("`num_assistant_tokens` has no effect on a SmartSpecConfig. Set its `num_nodes` instead.")
        return assistant
    if num_nodes is None:
        num_nodes = getattr(kwargs.get("generation_config"), "num_assistant_tokens", None)
    return SmartSpecConfig(assistant, num_nodes=num_nodes)


def _checked_settings(model: PreTrainedModel, kwargs: dict[str, Any], seed: Any) -> GenerationConfig:
    """
    The settings of the call, merged as `generate` merges them: keywords, config object, the model's own defaults.
    Refuses what contradicts `assistant` or cannot be served, before an encoder runs or a streamer is fed.
    """
    config = kwargs.get("generation_config")
    if config is not None and not isinstance(config, GenerationConfig):
        raise TypeError(f"`generation_config` must be a GenerationConfig, got {type(config).__name__}.")
    for name in ("assistant_model", "prompt_lookup_num_tokens", "custom_generate", "use_mtp", "assistant_early_exit"):
        if kwargs.get(name) or getattr(config, name, None):
            raise ValueError(f"`{name}` and `assistant` both say how to decode: pass one of them.")
    if seed is not None:
        check_seed(seed)
    check_source_options(kwargs)
    for name in ("inputs", "input_ids"):
        if kwargs.get(name) is not None:
            check_token_ids(model, kwargs[name], name)
    if not model.config.is_encoder_decoder:
        check_mask(kwargs.get("attention_mask"))
    options = {name: value for name, value in kwargs.items() if name not in _PARAMETERS}
    settings, _ = model._prepare_generation_config(config, **options)  # type: ignore[operator]
    check_settings(settings, kwargs.get("synced_gpus"))
    return settings


def _with_stop_strings(model: PreTrainedModel, kwargs: dict[str, Any], stop_strings: Any) -> dict[str, Any]:
    """
    Turns `stop_strings` into a stopping criterion: transformers drops the tokenizer, which it needs for that, on the
    way to a callable `custom_generate`.
    """
    tokenizer = kwargs.pop("tokenizer", None)
    if stop_strings is None:
        return kwargs
    if tokenizer is None:
        raise ValueError("`stop_strings` need the model's tokenizer: pass `tokenizer=` to `generate` as well.")
    criteria = StoppingCriteriaList(kwargs.get("stopping_criteria") or [])
    if not any(type(item) is StopStringCriteria for item in criteria):  # else the caller's own takes precedence
        criteria.append(StopStringCriteria(stop_strings=stop_strings, tokenizer=tokenizer))
    kwargs["stopping_criteria"] = criteria
    kwargs.pop("stop_strings", None)
    if kwargs.get("generation_config") is not None:
        kwargs["generation_config"] = copy.deepcopy(kwargs["generation_config"])
        kwargs["generation_config"].stop_strings = None
    if getattr(model.generation_config, "stop_strings", None) is not None:
        kwargs["stop_strings"] = None  # nothing but a keyword overrides the model's own default
    return kwargs
