"""Convert a request's fields to arguments of `generate`."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from transformers import GenerationConfig

from ....sampling.noise import row_seed
from ..errors import ApiError
from .fields import GenerationFields, Speculation
from .grammar import form_of

# Settings that are read from a request's `generation_config`.
_CONFIG_FIELDS = (
    "do_sample temperature top_k top_p min_p typical_p repetition_penalty no_repeat_ngram_size max_new_tokens "
    "min_new_tokens"
).split()
_LEAST_TEMPERATURE = 1e-5  # below, scores would overflow: the likeliest token is taken
_SAMPLES = ("top_p", "top_k", "min_p", "typical_p")  # fields that have no effect without sampling


@dataclass(frozen=True)
class Settings:
    """
    Settings of a request, without its prompts.

    Args:
        arguments (`dict`): Arguments of `generate`.
        max_new_tokens (`int`, *optional*): The request's limit, if it sets one.
        seeds (sequence): One seed per choice, as `generate(seed=, num_return_sequences=)` gives them to its rows.
        stops (sequence of `str`): Stop strings.
        keeps_stop (`bool`): Whether texts include the stop string.
        num_top (`int`, *optional*): Likeliest tokens per place with their log-probabilities; None for no
            log-probabilities.
        form (`str`, *optional*): The form that the answer must have, see `form_of`.
        presence, frequency (`float`): OpenAI's penalties.
        assistant (`str`, *optional*): "none" for no speculation.
        num_nodes (`int`, *optional*): Draft nodes per step.
        references (sequence of `str`): Texts that the answer may repeat.
        prediction (`str`, *optional*): OpenAI's predicted output.
        known (`np.ndarray`, int64, *optional*): The answer itself, of which only the log-probabilities are wanted.
        teaches (`bool`): Whether drafters may learn from the request.
    """

    arguments: dict[str, Any]
    max_new_tokens: int | None
    seeds: Sequence[list[int] | None]
    stops: Sequence[str] = ()
    keeps_stop: bool = False
    num_top: int | None = None
    form: str | None = None
    presence: float = 0.0
    frequency: float = 0.0
    assistant: str | None = None
    num_nodes: int | None = None
    references: Sequence[str] = ()
    prediction: str | None = None
    known: np.ndarray | None = None
    teaches: bool = True


def read_settings(
    fields: GenerationFields,
    own: GenerationConfig,
    max_new_tokens: int | None,
    num_top: int | None = None,
    response_format: dict[str, Any] | None = None,
    calls: str | None = None,
) -> Settings:
    """
    Return the settings of a request.

    Args:
        own (`GenerationConfig`): The model's settings, used where the request has none.
        max_new_tokens (`int`, *optional*): The request's limit, under any of its names.
        calls (`str`, *optional*): The form of forced tool calls, see `forced_form`.

    Raises:
        ApiError: 400, for an invalid form, or two forms of one answer.
    """
    form = form_of(response_format or fields.response_format, fields.structured_outputs)
    if calls is not None and form is not None:
        message = "tool_choice: an answer that must call a tool cannot have another form as well"
        raise ApiError(400, message, param="tool_choice")
    config = _checked_config(fields.generation_config)
    arguments = {**config, **_sampling(fields, config, own)}
    limit = arguments.pop("max_new_tokens", None)
    if fields.no_repeat_ngram_size is not None:
        arguments["no_repeat_ngram_size"] = fields.no_repeat_ngram_size
    if fields.min_tokens:
        arguments["min_new_tokens"] = fields.min_tokens
    if fields.logit_bias:
        arguments["sequence_bias"] = [[[int(name)], value] for name, value in fields.logit_bias.items()]
    if fields.ignore_eos:
        arguments["eos_token_id"] = fields.stop_token_ids or None
    elif fields.stop_token_ids:
        arguments["eos_token_id"] = [*eos_ids(own), *fields.stop_token_ids]
    speculation = fields.speculation or Speculation.model_validate({})
    return Settings(
        arguments,
        limit if max_new_tokens is None else max_new_tokens,
        _seeds(fields, arguments["do_sample"]),
        fields.stops,
        bool(fields.include_stop_str_in_output),
        num_top,
        form or calls,
        fields.presence_penalty or 0.0,
        fields.frequency_penalty or 0.0,
        speculation.assistant,
        speculation.num_nodes,
        speculation.references,
        None if fields.prediction is None else fields.prediction.text,
        teaches=speculation.learn,
    )


def eos_ids(config: GenerationConfig) -> list[int]:
    """Return the tokens that end a text."""
    ids: Any = config.eos_token_id
    return [] if ids is None else [ids] if isinstance(ids, int) else list(ids)


def _checked_config(text: str | None) -> dict[str, Any]:
    """Return the sampling settings in the JSON of `generation_config`, a field of `transformers chat`."""
    if text is None:
        return {}
    try:
        config = json.loads(text)
        known = {name: config[name] for name in _CONFIG_FIELDS if config.get(name) is not None}
        checked = GenerationFields.model_validate(known)
    except (ValueError, TypeError, AttributeError, RecursionError):
        message = "generation_config: must be an object of generation settings, as JSON text"
        raise ApiError(400, message, param="generation_config") from None
    for name in ("max_new_tokens", "min_new_tokens"):
        if name in known and not (isinstance(known[name], int) and 0 < known[name] < 2**31):
            raise ApiError(400, f"generation_config: {name} must be a positive integer", param="generation_config")
    return {name: getattr(checked, name, value) for name, value in known.items()}


def _sampling(fields: GenerationFields, config: dict[str, Any], own: GenerationConfig) -> dict[str, Any]:
    """
    Return the sampling arguments. A temperature above 0 samples, a temperature of 0 does not. Without one, a request
    samples if it sets a field that has no effect otherwise (`top_p`, several choices), or if the model's settings do.
    """
    named = ("temperature", "repetition_penalty", *_SAMPLES)
    values = {name: config[name] for name in named if name in config}
    values |= {name: getattr(fields, name) for name in named if getattr(fields, name) is not None}
    if values.get("top_k", 1) <= 0:
        values["top_k"] = 0  # off
    if values.get("min_p") == 0:
        del values["min_p"]
    asks = any(name in values for name in _SAMPLES) or (fields.n or 1) > 1
    if fields.temperature is not None:
        samples = fields.temperature >= _LEAST_TEMPERATURE
    else:
        samples = bool(config.get("do_sample", own.do_sample or asks))
    if not samples:
        values = {name: value for name, value in values.items() if name not in ("temperature", *_SAMPLES)}
    return values | {"do_sample": samples}


def _seeds(fields: GenerationFields, samples: bool) -> list[list[int] | None]:
    count = fields.n or 1
    if not samples or fields.seed is None:  # the engine draws a seed for each
        return [None] * count
    return [[row_seed(fields.seed, index)] for index in range(count)]
