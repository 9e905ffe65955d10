"""Decoding one prepared `generate` call: checks, the choice of a forward, the engine, and the output."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache, GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation import (
    BaseStreamer,
    GenerateDecoderOnlyOutput,
    GenerateEncoderDecoderOutput,
)
from transformers.generation.stopping_criteria import MaxLengthCriteria
from transformers.utils import logging

from .checks import check_mask, check_seed, check_settings, check_token_ids
from .config import SmartSpecConfig
from .decoding import DecodingBatch
from .engine import Engine
from .fallback import RowwiseForward, can_run_rowwise
from .forward import PackedForward
from .layout import RowInput
from .packing import can_pack_call, plain_reason
from .plain import decode_plainly
from .processors import TokenPicker, row_seed
from .request import GenerationStatistics, Request
from .tree import DraftTree
from .verify import METHODS

logger = logging.get_logger(__name__)


@dataclass
class SpeculativeDecoderOnlyOutput(GenerateDecoderOnlyOutput):
    """transformers' output of `generate`, and what speculation did."""

    statistics: GenerationStatistics | None = None


@dataclass
class SpeculativeEncoderDecoderOutput(GenerateEncoderDecoderOutput):
    """transformers' output of `generate` for encoder-decoder models, and what speculation did."""

    statistics: GenerationStatistics | None = None


def decode(
    model: PreTrainedModel,
    input_ids: torch.LongTensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    assistant: Any = "prompt_lookup",
    seed: int | Sequence[int] | None = None,
    synced_gpus: bool = False,
    streamer: BaseStreamer | None = None,
    **model_kwargs: Any,
) -> torch.Tensor | GenerateDecoderOnlyOutput | GenerateEncoderDecoderOutput:
    """
    A decoding method for `model.generate(..., custom_generate=hf_smartspec.decode, assistant=...)`, called with what
    `generate` has prepared. Used this way, transformers hands on neither `streamer` nor `tokenizer`: enable the model
    (`hf_smartspec.enable`) to stream or to use `stop_strings`.

    Args:
        input_ids (`torch.LongTensor` of shape `[batch, length]`): Prompts, padded on the left.
        assistant: What drafts: see `SmartSpecConfig.assistant`, or a `SmartSpecConfig`.
        seed (`int` or sequence of `int`, *optional*): For sampling: one seed from which every row derives its own, or
            one per row. Without it, torch's global generator supplies one.

    Returns:
        As `generate`: token ids `[batch, length + new]`, or an output with `statistics`.

    Raises:
        ValueError, TypeError: for arguments that cannot be served; they name the argument and the remedy.
    """
    config = assistant if isinstance(assistant, SmartSpecConfig) else SmartSpecConfig(assistant)
    source = config.source_for(model)
    check_settings(generation_config, synced_gpus)
    check_token_ids(model, input_ids)
    if not model.config.is_encoder_decoder:
        # With a cache, or embeddings in their place, `input_ids` need not hold the whole text.
        is_whole = model_kwargs.get("past_key_values") is None or model_kwargs["past_key_values"].get_seq_length() == 0
        is_whole = is_whole and model_kwargs.get("inputs_embeds") is None
        check_mask(model_kwargs.get("attention_mask"), input_ids.shape if is_whole else None)
    seeds = _row_seeds(seed, len(input_ids), generation_config.do_sample)
    reason = plain_reason(model, input_ids, generation_config, model_kwargs)
    if reason is None and not can_pack_call(model, input_ids, model_kwargs) and not can_run_rowwise(model):
        reason = f"{type(model).__name__} cannot run several tokens at once and take them back"
    if reason is not None:
        logger.warning_once(f"Decoding without speculation: {reason}.")
        output, statistics = decode_plainly(
            model, input_ids, logits_processor, stopping_criteria, generation_config, seeds, streamer, model_kwargs
        )
        return output if isinstance(output, torch.Tensor) else _with_statistics(output, statistics)

    requests = _requests(model, input_ids, stopping_criteria, seeds, model_kwargs)
    forward = _forward(model, input_ids, requests, generation_config, model_kwargs)
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
    given_cache: Any = model_kwargs.get("past_key_values")
    gives_back = getattr(given_cache, "_is_user_defined", False)
    text_config = model.config.get_text_config(decoder=True)
    engine = Engine(
        forward,
        batch,
        picker,
        METHODS[config.verification],
        source,
        config.policy_for(source),
        vocab_size=text_config.vocab_size,
        keeps_cache=generation_config.return_dict_in_generate or gives_back,
        num_positions=getattr(text_config, "max_position_embeddings", None),
        assignment=config.assignment,
    )
    with torch.no_grad():
        engine.run()
        if engine.keeps_cache:
            _complete_rows(engine)
    if streamer is not None:
        streamer.end()
    assert batch.num_generated is not None, "a row has not stopped"
    sequences = batch.padded_batch(batch.num_generated)
    if not (generation_config.return_dict_in_generate or gives_back):
        return sequences
    cache = _export_cache(engine, sequences.shape[1] - 1, given_cache)
    if gives_back and cache is not given_cache:
        given_cache.layers, cache = cache.layers, given_cache
    return _output(model, engine, sequences, cache, generation_config, model_kwargs)


def _row_seeds(seed: int | Sequence[int] | None, batch_size: int, do_sample: bool) -> list[int | None]:
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


def _complete_rows(engine: Engine) -> None:
    """
    Brings every row's cache and records to what plain decoding returns: rows that ran ahead of a criterion are taken
    back, and rows that finished early are fed the padding that plain decoding goes on feeding them.
    """
    batch, end = engine.batch, engine.batch.num_generated
    assert end is not None, "a row has not stopped"
    for request in batch.requests:
        cached = len(request.prompt) + min(request.num_generated, end) - 1
        if request.cache_row.length > cached:
            engine.forward.cut(request.cache_row, cached)
    late = [request for request in batch.requests if request.num_generated < end]
    padding = [[batch.pad_token_id] * (end - request.num_generated - 1) for request in late]
    if late and batch.records:
        _record_padding(engine, late, padding)
    elif late:
        feeds = [np.array([*request.uncached(), *tokens], np.int64) for request, tokens in zip(late, padding)]
        rows = [request.cache_row for request in late]
        engine.forward.forward([RowInput(row, feed) for row, feed in zip(rows, feeds)])
        engine.forward.commit(rows, [[]] * len(rows))


def _record_padding(engine: Engine, late: list[Request], padding: list[list[int]]) -> None:
    """The padding is a draft that is known beforehand: one forward yields all its logits."""
    inputs = [
        RowInput(request.cache_row, request.uncached(), DraftTree.chain(tokens))
        for request, tokens in zip(late, padding)
    ]
    logits, offsets = engine.forward.forward(inputs)
    for request, item, offset in zip(late, inputs, offsets):
        for line in range(offset, offset + len(item.tree) + 1):
            raw = logits[line : line + 1].float()
            request.raw_logits.append(raw[0])
            request.scores.append(engine.picker.process([request], raw, engine.batch)[0])
            request.append(engine.batch.pad_token_id)
    engine.forward.commit([item.row for item in inputs], [range(len(item.tree)) for item in inputs])


def _export_cache(engine: Engine, total_length: int, prepared: Any) -> Any:
    """All rows' keys and values in the cache that `generate` prepared, as long as it is empty, else in a new one."""
    rows = [request.cache_row for request in engine.batch.requests]
    if isinstance(engine.forward, RowwiseForward):
        return engine.forward.export(rows)
    columns = [request.columns(total_length) for request in engine.batch.requests]
    assert isinstance(engine.forward, PackedForward)
    if prepared is None or prepared.get_seq_length() > 0:
        prepared = DynamicCache(config=engine.forward.model.config.get_text_config(decoder=True))
    return engine.forward.cache.export(rows, columns, total_length, prepared)


def _output(
    model: PreTrainedModel,
    engine: Engine,
    sequences: torch.Tensor,
    cache: Any,
    generation_config: GenerationConfig,
    model_kwargs: dict[str, Any],
) -> torch.Tensor | SpeculativeDecoderOnlyOutput | SpeculativeEncoderDecoderOutput:
    if not generation_config.return_dict_in_generate:
        return sequences
    batch = engine.batch
    steps = range(batch.num_generated or 0)
    fields: dict[str, Any] = {
        "sequences": sequences,
        "scores": tuple(batch.column_of("scores", step) for step in steps) if batch.records_scores else None,
        "logits": tuple(batch.column_of("raw_logits", step) for step in steps) if batch.records_logits else None,
        "past_key_values": cache,
    }
    plain = GenerateEncoderDecoderOutput if model.config.is_encoder_decoder else GenerateDecoderOnlyOutput
    return _with_statistics(plain(**fields), engine.statistics)


def _with_statistics(
    output: GenerateDecoderOnlyOutput | GenerateEncoderDecoderOutput, statistics: GenerationStatistics
) -> SpeculativeDecoderOnlyOutput | SpeculativeEncoderDecoderOutput:
    if isinstance(output, GenerateEncoderDecoderOutput):
        return SpeculativeEncoderDecoderOutput(**output, statistics=statistics)
    return SpeculativeDecoderOnlyOutput(**output, statistics=statistics)
