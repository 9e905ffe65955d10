"""Convert transformers' settings of continuous batching to arguments of an engine and its requests."""

import copy
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from ...decoding.call import DRAFT_ROOM
from ...log import get_logger
from ...target_model.cache.free_memory import free_bytes
from ..memory.budget import Budget

logger = get_logger(__name__)

_MOST_ROWS = 256
_USUAL_ROWS = 64  # if the number of requests is unknown

# Fields of a generation config that continuous batching ignores, with their neutral values.
_IGNORED = {
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
_NO_TOKEN = 2**31 - 1  # for texts without an end token: a config without one would get the model's
_SERVED = {
    "page_size", "block_size", "num_blocks", "max_batch_tokens", "max_memory_percent", "max_requests_per_batch",
    "return_logprobs", "seed", "allow_block_sharing", "per_request_processors", "drop_unsupported_processors",
    "auto_switch_to_flash", "disable_nccl_graph_mixing", "cpu_group_timeout",
}  # fmt: skip


def engine_options(model: PreTrainedModel, options: ContinuousBatchingConfig, hints: Any) -> dict[str, Any]:
    """
    Return arguments of `Engine`.

    Args:
        hints (`WorkloadHints`, *optional*): The expected number of requests.
    """
    usual = ContinuousBatchingConfig()
    names = [item.name for item in fields(options) if item.name not in _SERVED]
    if ignored := [name for name in names if getattr(options, name) != getattr(usual, name)]:
        logger.info(f"Fields of the ContinuousBatchingConfig without effect on an engine are ignored: {ignored}")
    num_rows = options.max_requests_per_batch or min(getattr(hints, "num_requests", None) or _USUAL_ROWS, _MOST_ROWS)
    found: dict[str, Any] = {"max_batch_size": num_rows}
    if options.max_batch_tokens is not None:
        found["max_prefill_tokens"] = options.max_batch_tokens
    if options.num_blocks is not None:
        num_tokens = options.num_blocks * options.page_size + num_rows * DRAFT_ROOM
        found["max_kv_bytes"] = Budget(max_tokens=num_tokens)
    elif options.max_memory_percent is not None:
        found["max_kv_bytes"] = max(int(options.max_memory_percent * free_bytes(torch.device(model.device))), 1)
    return found


def request_arguments(
    config: GenerationConfig,
    options: dict[str, Any],
    max_new_tokens: int,
    eos_token_id: int | Sequence[int] | None,
    tokenizer: PreTrainedTokenizerBase | None,
) -> dict[str, Any]:
    """
    Return arguments of `Engine.add_request` for one request.

    Args:
        config (`GenerationConfig`): The request's, or that of all requests.
        options (`dict`): Further arguments of `generate`, which override the config.
        eos_token_id (`int` or list of `int`, *optional*): End tokens; negative ones stand for none. Default: the
            config's.
        tokenizer (`PreTrainedTokenizerBase`, *optional*): The engine's tokenizer.
    """
    own = copy.copy(config)
    rest = {}
    for name, value in options.items():
        if name in vars(own) and name not in _IGNORED:
            setattr(own, name, value)
        else:
            rest[name] = value
    for name, neutral in _IGNORED.items():
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
        logger.warning("`stop_strings` of a generation config are ignored without a `tokenizer=` argument.")
    return {"generation_config": own, **rest}
