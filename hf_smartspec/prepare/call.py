"""What `generate` has prepared, made ready for the decoding loop."""

from collections.abc import Sequence
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation import BaseStreamer
from transformers.generation.stopping_criteria import MaxLengthCriteria
from transformers.utils import logging

from ..candidates.base import TreeCandidateGenerator
from ..decoding.batch import DecodingBatch
from ..decoding.call import DecodingCall, ModelForward, ModelLimits
from ..decoding.request import Request
from ..decoding.verify import METHODS
from ..sampling.noise import row_seed
from ..sampling.processors import TokenPicker
from ..target.packed import PackedForward
from ..target.rowwise import RowwiseForward
from ..target.support import can_pack_call
from ..validate import check_seed
from .config import SmartSpecConfig

logger = logging.get_logger(__name__)


def model_limits(model: PreTrainedModel) -> ModelLimits:
    config = model.config.get_text_config(decoder=True)
    return ModelLimits(config.vocab_size, getattr(config, "max_position_embeddings", None))


def prepare_call(
    model: PreTrainedModel,
    input_ids: torch.LongTensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    config: SmartSpecConfig,
    source: TreeCandidateGenerator,
    seeds: Sequence[int | None],
    streamer: BaseStreamer | None,
    model_kwargs: dict[str, Any],
    forward: ModelForward | None = None,
) -> DecodingCall:
    """
    A call for the decoding loop from what a decoding method of transformers gets, and from

    Args:
        config, source: What drafts, and how much.
        seeds (sequence of `int`, *optional* entries): One per row.
        forward (`ModelForward`, *optional*): That of an engine, which calls share; else the call gets its own.
    """
    requests = _requests(model, input_ids, stopping_criteria, seeds, model_kwargs)
    picker = TokenPicker(logits_processor, len(input_ids), input_ids.shape[1])
    records_scores, records_logits = (_returns(generation_config, f"output_{name}") for name in ("scores", "logits"))
    batch = DecodingBatch(
        requests,
        stopping_criteria,
        None if generation_config._pad_token_tensor is None else int(generation_config._pad_token_tensor),
        streamer,
        records_scores=records_scores,
        records_logits=records_logits,
        pads_stepwise=picker.needs_lockstep and (records_scores or records_logits),
        device=input_ids.device,
    )
    return DecodingCall(
        forward or _forward(model, input_ids, requests, generation_config, model_kwargs),
        batch,
        picker,
        METHODS[config.verification],
        source,
        config.max_nodes_for(source),
        assignment=config.assignment,
    )


def row_seeds(seed: int | Sequence[int] | None, batch_size: int, do_sample: bool) -> list[int | None]:
    if seed is not None:
        check_seed(seed)
    if isinstance(seed, Sequence) and len(seed) != batch_size:
        raise ValueError(f"`seed` must be one integer or one per row: got {len(seed)} for {batch_size} rows.")
    if not do_sample:
        return [None] * batch_size
    if seed is None:
        seed = int(torch.randint(2**62, ()))
    if isinstance(seed, Sequence):
        return [int(value) for value in seed]
    return [row_seed(int(seed), row) for row in range(batch_size)]


def _requests(
    model: PreTrainedModel,
    input_ids: torch.LongTensor,
    stopping_criteria: StoppingCriteriaList,
    seeds: Sequence[int | None],
    model_kwargs: dict[str, Any],
) -> list[Request]:
    mask = model_kwargs.get("attention_mask")
    if mask is None or model.config.is_encoder_decoder:
        mask = torch.ones_like(input_ids)
    ids, mask = input_ids.cpu(), mask.bool().cpu()
    limits = [item.max_length for item in stopping_criteria if type(item) is MaxLengthCriteria]
    # Plain decoding checks the length after a token, so that one is always generated.
    max_new_tokens = max(1, min(limits) - ids.shape[1]) if limits else None
    return [
        # Names are unique, since a source may serve several calls at once.
        Request(object(), row, ids[row], mask[row], max_new_tokens, seeds[row])
        for row in range(len(ids))
    ]


def _forward(
    model: PreTrainedModel,
    input_ids: torch.LongTensor,
    requests: list[Request],
    generation_config: GenerationConfig,
    model_kwargs: dict[str, Any],
) -> PackedForward | RowwiseForward:
    if not can_pack_call(model, input_ids, model_kwargs):
        if len(requests) > 1:
            logger.warning_once(
                f"{type(model).__name__} is decoded row by row, since its attention or these arguments cannot be "
                "packed. For large batches, plain decoding may be faster."
            )
        return RowwiseForward(model, input_ids, model_kwargs, generation_config)
    new_tokens = min(requests[0].max_new_tokens or 256, 1024)
    chunk = generation_config.prefill_chunk_size or 512
    forward = PackedForward(model, len(requests), input_ids.shape[1] + new_tokens + 16, chunk)
    cache = model_kwargs.get("past_key_values")
    if cache is not None and cache.get_seq_length() > 0:
        length = cache.get_seq_length()
        for request in requests:
            request.row = forward.add()
        forward.cache.load(cache, [item.cache_row for item in requests], [item.mask[:length] for item in requests])
    return forward


def _returns(config: GenerationConfig, name: str) -> bool:
    return bool(config.return_dict_in_generate and getattr(config, name))
