"""Entry of `generate` calls on enabled models: choose the assistant, then speculate or call transformers."""

from functools import partial
from typing import Any

import torch
from transformers import GenerationMixin, Pipeline

from ..log import get_logger
from .arguments import by_name, check_arguments, run_with
from .decode import decode_prepared, decode_undrafted
from .defaults import EnabledCall, choose, serving, without_assistant
from .model_state import warn_once
from .resolve import resolve

logger = get_logger(__name__)


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
    config = kwargs.get("generation_config", args[1] if len(args) > 1 else None)
    choice = choose(call, assistant, config)
    with serving():
        if choice.assistant is None:
            return _undrafted(call, seed)
        try:
            named = without_assistant(by_name(original, args, kwargs))
            arguments = check_arguments(model, named, choice.assistant, seed)
        except (TypeError, ValueError) as error:
            if not choice.is_default:
                raise
            logger.info(f"This call is left to transformers: {error}")
            return _undrafted(call, seed)
        try:
            resolved = resolve(arguments.assistant, model)
        except (OSError, TypeError, ValueError) as error:
            if not choice.is_default:
                raise
            warn_once(model, f"The default assistant cannot draft for {type(model).__name__}: {error}")
            return _undrafted(call, seed)
        return arguments.run(model, decode_prepared, original, resolved, choice.is_default)


def _undrafted(call: EnabledCall, seed: Any) -> Any:
    if seed is None:
        return call.plain()
    model, original, args, kwargs, *_ = call
    try:
        return run_with(decode_undrafted, model, original, by_name(original, args, kwargs), "none", seed)
    except ValueError as error:
        raise ValueError(str(error).replace("`assistant`", "`seed`")) from error  # seeds have the same limits
