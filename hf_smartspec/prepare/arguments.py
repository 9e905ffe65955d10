"""Check the arguments of a `generate` call before any work starts, and run a decoding method with them."""

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from transformers import (
    GenerationConfig,
    GenerationMixin,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteriaList,
)
from transformers.generation import StopStringCriteria

from ..log import get_logger
from ..target_model.compat import is_synchronized
from ..validate import check_seed
from .call import PreparedCall, prepare_call
from .checks import check_mask, check_settings, check_source_options, check_token_ids
from .config import SmartSpecConfig
from .encoders import watch_encoder
from .resolve import Assistant, Drafters, resolve

logger = get_logger(__name__)

PARAMETERS = list(inspect.signature(GenerationMixin.generate).parameters)[1:]


class CheckedArguments(NamedTuple):
    """
    Checked keyword arguments of `generate`, with which an assistant can draft.

    Args:
        kwargs (`dict`): Arguments for transformers' `generate`.
        assistant: The assistant with its options: a `SmartSpecConfig`, or an `Assistant` that is already resolved.
        seed (`int` or sequence of `int`, *optional*): One seed for sampling, or one per row.
    """

    kwargs: dict[str, Any]
    assistant: SmartSpecConfig | Assistant
    seed: int | Sequence[int] | None = None

    def run(
        self,
        model: PreTrainedModel,
        method: Callable[[PreparedCall], Any],
        original: Callable,
        resolved: Assistant,
        gives_way: bool = False,
        to_read: Mapping[str, torch.Tensor] | None = None,
    ) -> Any:
        """
        Let `original`, transformers' own `generate`, prepare the call, and return the result of `method` for it.

        Args:
            gives_way (`bool`): Whether a call that the assistant cannot serve is decoded without it instead of raising.
            to_read (mapping, *optional*): Inputs of the model's encoder, where the encoder runs later.
        """
        streamer = self.kwargs.get("streamer")  # transformers drops it on the way to a callable `custom_generate`

        def custom_generate(model: Any, input_ids: torch.LongTensor, **prepared: Any) -> Any:
            try:
                call = prepare_call(
                    model, input_ids, assistant=resolved, seed=self.seed, streamer=streamer, encoder_arguments=seen,
                    **prepared,
                )  # fmt: skip
            except (TypeError, ValueError) as error:
                if not gives_way or self.seed is not None:  # transformers' own loop takes no seed
                    raise
                logger.info(f"This call is left to transformers: {error}")
                return model._sample(input_ids, streamer=streamer, **prepared)
            return method(call)

        with watch_encoder(model) as seen:
            seen.update(to_read or {})
            return original(**self.kwargs | {"custom_generate": custom_generate})


def run_with(
    method: Callable[[PreparedCall], Any],
    model: PreTrainedModel,
    original: Callable,
    kwargs: dict[str, Any],
    assistant: Any,
    seed: Any,
    drafters: Drafters | None = None,
    to_read: Mapping[str, torch.Tensor] | None = None,
) -> Any:
    """
    Check the arguments of a `generate` call and run `method` with them: see `CheckedArguments`, and `resolve` for
    `drafters`.
    """
    arguments = check_arguments(model, kwargs, assistant, seed)
    return arguments.run(model, method, original, resolve(arguments.assistant, model, drafters), to_read=to_read)


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


def check_arguments(model: PreTrainedModel, kwargs: dict[str, Any], assistant: Any, seed: Any) -> CheckedArguments:
    """
    Check the arguments and return them as an assistant can serve them, before anything is computed.

    Raises:
        ValueError, TypeError: for arguments that contradict `assistant` or that it cannot serve.
    """
    kwargs = dict(kwargs)
    assistant = _with_tokenizers(_with_num_nodes(assistant, kwargs), kwargs)
    settings = _checked_settings(model, kwargs, seed)
    return CheckedArguments(_with_stop_strings(model, kwargs, settings.stop_strings), assistant, seed)


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
    for name in ("inputs", "input_ids"):
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
