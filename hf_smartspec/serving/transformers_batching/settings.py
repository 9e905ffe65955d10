"""What transformers' settings of continuous batching mean for an engine and its requests."""

import copy
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from ...log import get_logger
from ...target_model.cache.free_memory import free_bytes

logger = get_logger(__name__)

_MOST_ROWS = 256
_USUAL_ROWS = 64  # where nothing is known of the load

# Of a generation config, what continuous batching has no use for.
_PASSED_OVER = {
    "use_cache": True,
    "cache_implementation": None,
    "max_length": None,
    "num_return_sequences": 1,  # each is a request
    "return_dict_in_generate": False,
    "output_attentions": False,
    "output_hidden_states": False,
    "output_scores": False,
    "output_logits": False,
    "compile_config": None,
}
_NO_TOKEN = 2**31 - 1  # for texts that nothing ends: without any, a config gets the model's own
_SERVED = {
    "page_size", "block_size", "num_blocks", "max_batch_tokens", "max_memory_percent", "max_requests_per_batch",
    "return_logprobs", "seed", "allow_block_sharing", "per_request_processors", "drop_unsupported_processors",
    "auto_switch_to_flash", "disable_nccl_graph_mixing", "cpu_group_timeout",
}  # fmt: skip


def engine_options(model: PreTrainedModel, options: ContinuousBatchingConfig, hints: Any) -> dict[str, Any]:
    """
    Arguments of `Engine`.

    Args:
        hints (`WorkloadHints`, *optional*): What is known of the requests to come.
    """
    _say_what_has_no_effect(options)
    num_rows = options.max_requests_per_batch or min(getattr(hints, "num_requests", None) or _USUAL_ROWS, _MOST_ROWS)
    found: dict[str, Any] = {"max_batch_size": num_rows}
    if options.max_batch_tokens is not None:
        found["max_prefill_tokens"] = options.max_batch_tokens
    if options.max_memory_percent is not None:
        found["max_kv_bytes"] = max(int(options.max_memory_percent * free_bytes(torch.device(model.device))), 1)
    return found


def num_cached_tokens(options: ContinuousBatchingConfig) -> int | None:
    """Tokens that the memory of keys and values is to hold, if a number of blocks says so."""
    if options.num_blocks is None:
        return None
    return options.num_blocks * options.page_size


def _say_what_has_no_effect(options: ContinuousBatchingConfig) -> None:
    usual = ContinuousBatchingConfig()
    names = [item.name for item in fields(options) if item.name not in _SERVED]
    others = [name for name in names if getattr(options, name) != getattr(usual, name)]
    if others:
        logger.info(f"Of the ContinuousBatchingConfig, {others} mean nothing to this library's engine.")


def request_arguments(
    config: GenerationConfig,
    options: dict[str, Any],
    max_new_tokens: int,
    eos_token_id: int | Sequence[int] | None,
    tokenizer: PreTrainedTokenizerBase | None,
) -> dict[str, Any]:
    """
    Arguments of `Engine.add_request` for one request.

    Args:
        config (`GenerationConfig`): Of the request, or of all.
        options (`dict`): Further arguments of `generate`, which come first.
        eos_token_id (`int` or list of `int`, *optional*): Negative ones stand for none; None: that of the config.
        tokenizer (`PreTrainedTokenizerBase`, *optional*): Of the engine.
    """
    own = copy.copy(config)
    rest = {}
    for name, value in options.items():
        if name in vars(own) and name not in _PASSED_OVER:
            setattr(own, name, value)
        else:
            rest[name] = value
    for name, neutral in _PASSED_OVER.items():
        if hasattr(own, name):
            setattr(own, name, neutral)
    own.max_new_tokens = max_new_tokens
    if eos_token_id is None:
        eos_token_id = own.eos_token_id
    if eos_token_id is not None:
        ids = [eos_token_id] if isinstance(eos_token_id, int) else list(eos_token_id)
        own.eos_token_id = [item for item in ids if item >= 0] or [_NO_TOKEN]
    if own.stop_strings and tokenizer is None and "tokenizer" not in rest:
        if options.get("stop_strings"):
            raise ValueError("`stop_strings` need the model's tokenizer: pass `tokenizer=` as well.")
        own.stop_strings = None
        logger.warning("`stop_strings` of a generation config are left out: they need a `tokenizer=` beside them.")
    return {"generation_config": own, **rest}
