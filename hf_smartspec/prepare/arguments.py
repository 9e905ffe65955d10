"""Check the arguments of a `generate` call before any work starts."""

import copy
import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from transformers import (
    GenerationConfig,
    GenerationMixin,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteriaList,
)
from transformers.generation import StopStringCriteria

from ..target_model.compat import is_synchronized
from ..validate import check_seed
from .checks import check_mask, check_settings, check_source_options, check_token_ids
from .config import SmartSpecConfig
from .sources import Assistant

PARAMETERS = list(inspect.signature(GenerationMixin.generate).parameters)[1:]


def by_name(generate: Callable, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
    """
    Return all arguments of a `generate` call by name. The names come from the model's own method, since the first
    parameter of Whisper's is `input_features`.

    Raises:
        TypeError: for too many positional arguments, and for arguments that are passed twice.
    """
    parameters = inspect.signature(generate).parameters.values()
    is_open = any(item.kind is item.VAR_POSITIONAL for item in parameters)
    names = PARAMETERS if is_open else [item.name for item in parameters if item.kind is item.POSITIONAL_OR_KEYWORD]
    if len(args) > len(names):
        raise TypeError(f"generate() takes at most {len(names)} positional arguments, got {len(args)}.")
    named = dict(zip(names, args))
    for name in named.keys() & kwargs.keys():
        raise TypeError(f"generate() got multiple values for argument '{name}'.")
    return kwargs | named


def check_arguments(
    model: PreTrainedModel, kwargs: dict[str, Any], assistant: Any, seed: Any
) -> tuple[dict[str, Any], SmartSpecConfig | Assistant]:
    """
    Check all that can be checked before anything is computed, and return the arguments for transformers' `generate`,
    and the assistant with the options among them.

    Raises:
        ValueError, TypeError: for arguments that contradict `assistant` or that it cannot serve.
    """
    kwargs = dict(kwargs)
    assistant = _with_tokenizers(_with_num_nodes(assistant, kwargs), kwargs)
    settings = _checked_settings(model, kwargs, seed)
    return _with_stop_strings(model, kwargs, settings.stop_strings), assistant


def _with_num_nodes(assistant: Any, kwargs: dict[str, Any]) -> SmartSpecConfig | Assistant:
    """Return the assistant with `num_assistant_tokens`, transformers' own argument, as its number of draft nodes."""
    num_nodes = kwargs.pop("num_assistant_tokens", None)
    if isinstance(assistant, SmartSpecConfig):
        if num_nodes is not None:
            raise ValueError("`num_assistant_tokens` has no effect on a SmartSpecConfig. Set its `num_nodes` instead.")
        return assistant
    if num_nodes is None:
        num_nodes = getattr(kwargs.get("generation_config"), "num_assistant_tokens", None)
    if not isinstance(assistant, Assistant):
        return SmartSpecConfig(assistant, num_nodes=num_nodes)
    if num_nodes is None:
        return assistant
    return assistant._replace(config=replace(assistant.config, num_nodes=num_nodes, policy=None))


def _with_tokenizers(assistant: SmartSpecConfig | Assistant, kwargs: dict[str, Any]) -> SmartSpecConfig | Assistant:
    """Return the assistant with the call's `tokenizer` and `assistant_tokenizer`, by which drafts are translated."""
    of_draft = kwargs.pop("assistant_tokenizer", None)
    if isinstance(assistant, Assistant):
        if of_draft is not None:
            raise ValueError("`assistant_tokenizer` needs an `assistant`: pass the draft model of this call as well.")
        return assistant
    of_target = kwargs.get("tokenizer")
    return assistant.with_tokenizers(of_target if isinstance(of_target, PreTrainedTokenizerBase) else None, of_draft)


def _checked_settings(model: PreTrainedModel, kwargs: dict[str, Any], seed: Any) -> GenerationConfig:
    """
    Return the settings of the call, merged as `generate` merges them: keywords, config object, the model's defaults.
    Raise for settings that contradict `assistant` or cannot be served, before an encoder runs or a streamer is fed.
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
    for name in ("inputs", "input_ids", "decoder_input_ids"):
        if kwargs.get(name) is not None:
            check_token_ids(model, kwargs[name], name)
    if not model.config.is_encoder_decoder:
        check_mask(kwargs.get("attention_mask"))
    options = {name: value for name, value in kwargs.items() if name not in PARAMETERS}
    settings, _ = model._prepare_generation_config(config, **options)  # type: ignore[operator]
    synced_gpus = kwargs.get("synced_gpus")
    check_settings(settings, is_synchronized(model) if synced_gpus is None else synced_gpus)
    return settings


def _with_stop_strings(model: PreTrainedModel, kwargs: dict[str, Any], stop_strings: Any) -> dict[str, Any]:
    """
    Turn `stop_strings` into a stopping criterion here, since transformers drops the tokenizer that the criterion needs
    before it calls `custom_generate`.
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
        kwargs["stop_strings"] = None  # only a keyword overrides the model's own default
    return kwargs
