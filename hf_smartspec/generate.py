"""`assistant=` in `model.generate`: switching it on and off, and handing the call to `decode`."""

import copy
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import MethodType
from typing import Any

import torch
from transformers import GenerationMixin, PreTrainedModel, StoppingCriteriaList
from transformers.generation import StopStringCriteria

from .config import SmartSpecConfig
from .decode import decode

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
    target = _generating(model)
    if not _is_enabled(target):
        # A `generate` set on the instance, as other patches do, stays underneath.
        vars(target)[_PREVIOUS] = vars(target).get("generate")
        target.generate = partial(_generate, target)  # type: ignore[method-assign]
    return model


def disable(model: Any = None) -> Any:
    """Takes `enable` back; without effect where it was not called. Returns the model."""
    if model is None:
        if _is_globally_enabled():
            _, previous = getattr(GenerationMixin.generate, _PREVIOUS)
            GenerationMixin.generate = previous  # type: ignore[method-assign]
        return None
    target = _generating(model)
    if _is_enabled(target):
        del target.generate  # type: ignore[misc]
        previous = vars(target).pop(_PREVIOUS)
        if previous is not None:
            target.generate = previous  # type: ignore[method-assign, misc]
    return model


@contextmanager
def enabled(model: Any = None) -> Iterator[Any]:
    """`enable` for the duration of a `with` block; what was enabled before stays so."""
    was_enabled = _is_enabled(_generating(model)) if model is not None else _is_globally_enabled()
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


def _generating(model: Any) -> GenerationMixin:
    if not isinstance(model, GenerationMixin) and hasattr(model, "get_base_model"):
        model = model.get_base_model()  # PEFT's wrappers pass `generate` on to the model inside
    if not isinstance(model, GenerationMixin):
        raise TypeError(f"`model` must be a transformers model that can generate, got {type(model).__name__}.")
    return model


def _is_enabled(model: GenerationMixin) -> bool:
    # A partial, not a bound method: only partials survive pickling as an attribute of the model they are bound to.
    generate = vars(model).get("generate")
    return isinstance(generate, partial) and generate.func is _generate


def _is_globally_enabled() -> bool:
    # Somebody else's wrapper may have copied our attributes.
    function, _ = getattr(GenerationMixin.generate, _PREVIOUS, (None, None))
    return function is GenerationMixin.generate


def _generate(
    model: Any, *args: Any, assistant: Any = None, seed: int | Sequence[int] | None = None, **kwargs: Any
) -> Any:
    """`generate` of an enabled model."""
    original = vars(model).get(_PREVIOUS) or MethodType(type(model).generate, model)
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
    kwargs |= dict(zip(_PARAMETERS, args))
    _check_arguments(kwargs)
    config = assistant
    if not isinstance(assistant, SmartSpecConfig):
        config = SmartSpecConfig(assistant, num_nodes=kwargs.pop("num_assistant_tokens", None))
    config.source_for(model)  # refuses what cannot draft before any work starts
    kwargs = _with_stop_strings(model, kwargs)
    # transformers drops the streamer on the way to a callable `custom_generate`, so it travels with the callable.
    decoder = partial(decode, assistant=config, seed=seed, streamer=kwargs.get("streamer"))
    return original(**kwargs, custom_generate=decoder)


def _check_arguments(kwargs: dict[str, Any]) -> None:
    """Refuses arguments that contradict `assistant`, and inputs that are no batch of token ids."""
    config = kwargs.get("generation_config")
    for name in ("assistant_model", "prompt_lookup_num_tokens", "custom_generate", "use_mtp", "assistant_early_exit"):
        if kwargs.get(name) or getattr(config, name, None):
            raise ValueError(f"`{name}` and `assistant` both say how to decode: pass one of them.")
    for name in ("inputs", "input_ids"):
        ids = kwargs.get(name)
        if ids is None:
            continue
        if not isinstance(ids, torch.Tensor):
            raise TypeError(
                f"`{name}` must be a torch.Tensor of token ids of shape [batch, length], got {type(ids).__name__}."
            )
        if ids.shape[0] == 0:
            raise ValueError(f"`{name}` is an empty batch (shape {tuple(ids.shape)}): pass at least one sequence.")


def _with_stop_strings(model: PreTrainedModel, kwargs: dict[str, Any]) -> dict[str, Any]:
    """
    Turns `stop_strings` into a stopping criterion: transformers drops the tokenizer, which it needs for that, on the
    way to a callable `custom_generate`.
    """
    tokenizer = kwargs.pop("tokenizer", None)
    config = kwargs.get("generation_config")
    candidates = (kwargs.get("stop_strings"), getattr(config, "stop_strings", None), _default_stop_strings(model))
    stop_strings = next((value for value in candidates if value is not None), None)
    if stop_strings is None:
        return kwargs
    if tokenizer is None:
        raise ValueError("`stop_strings` need the model's tokenizer: pass `tokenizer=` to `generate` as well.")
    criterion = StopStringCriteria(stop_strings=stop_strings, tokenizer=tokenizer)
    kwargs["stopping_criteria"] = StoppingCriteriaList([*(kwargs.get("stopping_criteria") or []), criterion])
    kwargs.pop("stop_strings", None)
    if config is not None:
        kwargs["generation_config"] = copy.deepcopy(config)
        kwargs["generation_config"].stop_strings = None
    if _default_stop_strings(model) is not None:
        kwargs["stop_strings"] = None  # overrides the model's own default
    return kwargs


def _default_stop_strings(model: PreTrainedModel) -> Any:
    return getattr(model.generation_config, "stop_strings", None)
