"""Decode one `generate` call: prepare it, choose a way to serve it, run the decoding loop, make the output."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import (
    DynamicCache,
    EncoderDecoderCache,
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteriaList,
)
from transformers.generation import (
    BaseStreamer,
    GenerateDecoderOnlyOutput,
    GenerateEncoderDecoderOutput,
)

from ..decoding.alarm import alarm_of
from ..decoding.call import DecodingCall, Request
from ..decoding.loop import DecodingLoop
from ..decoding.statistics import GenerationStatistics, record_call
from ..drafts.tree import DraftTree
from ..goodput import GoodputAuction, LengthPolicy
from ..log import get_logger
from ..target_model.cache.kept_memory import release_memory
from ..target_model.compat import CACHE, cached_length, is_synchronized, new_cache, splits_outputs
from ..target_model.encoded import EncodedForward
from ..target_model.forward.packed import PackedForward
from ..target_model.forward.ranks import ranks_of
from ..target_model.forward.rotary import forget_lengths
from ..target_model.forward.rowwise import RowwiseForward
from ..target_model.layout.rows import RowInput
from ..target_model.model_state import warn_once
from ..target_model.support.wrappers import row_mixing
from ..validate import check_seed
from .call import PreparedCall, decoding_call, model_limits, policy_of, prepare_call
from .checks import check_settings, check_token_ids
from .plain import decode_plainly
from .sources import Assistant, resolve

logger = get_logger(__name__)


@dataclass
class SpeculativeDecoderOnlyOutput(GenerateDecoderOnlyOutput):
    """transformers' output of `generate`, with statistics of speculation."""

    statistics: GenerationStatistics = None  # type: ignore[assignment]  # always set; ModelOutput needs a default


@dataclass
class SpeculativeEncoderDecoderOutput(GenerateEncoderDecoderOutput):
    """transformers' output of `generate` for encoder-decoder models, with statistics of speculation."""

    statistics: GenerationStatistics = None  # type: ignore[assignment]  # always set; ModelOutput needs a default


def decode(
    model: PreTrainedModel,
    input_ids: torch.LongTensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    assistant: Any = "prompt_lookup",
    seed: int | Sequence[int] | None = None,
    synced_gpus: bool | None = None,
    streamer: BaseStreamer | None = None,
    **model_kwargs: Any,
) -> torch.Tensor | GenerateDecoderOnlyOutput | GenerateEncoderDecoderOutput:
    """
    Decoding method for `model.generate(..., custom_generate=hf_smartspec.decode, assistant=...)`, called with the
    arguments that `generate` has prepared. Used this way, transformers passes on neither `streamer` nor `tokenizer`:
    enable the model (`hf_smartspec.enable`) to stream or to use `stop_strings`.

    Args:
        input_ids (`torch.LongTensor` of shape `[batch, length]`): Prompts, padded on the left.
        assistant: The drafter: see `SmartSpecConfig.assistant`, or a `SmartSpecConfig`.
        seed (`int` or sequence of `int`, *optional*): For sampling: one seed from which every row derives its own, or
            one per row. By default, one is drawn from torch's global generator.

    Returns:
        As `generate`: token ids `[batch, length + new]`, or an output with `statistics`.

    Raises:
        ValueError, TypeError: for arguments that cannot be served; they name the argument and the remedy.
    """
    check_settings(generation_config, is_synchronized(model) if synced_gpus is None else synced_gpus)
    check_token_ids(model, input_ids)
    if seed is not None:
        check_seed(seed)
    return decode_checked(
        model, input_ids, resolve(assistant, model), seed, streamer, logits_processor=logits_processor,
        stopping_criteria=stopping_criteria, generation_config=generation_config, **model_kwargs,
    )  # fmt: skip


def decode_checked(
    model: PreTrainedModel,
    input_ids: torch.LongTensor,
    assistant: Assistant,
    seed: int | Sequence[int] | None = None,
    streamer: BaseStreamer | None = None,
    encoder_arguments: dict[str, Any] | None = None,
    gives_way: bool = False,
    **arguments: Any,
) -> torch.Tensor | GenerateDecoderOnlyOutput | GenerateEncoderDecoderOutput:
    """
    Decoding method of calls whose arguments were checked before `generate` prepared them; as `decode`.

    Args:
        encoder_arguments (`dict`, *optional*): Arguments of the encoder's forward, from `watch_encoder`.
        gives_way (`bool`): Whether a call that the assistant cannot serve is decoded without it instead of raising.
    """
    try:
        prepared = prepare_call(
            model, input_ids, assistant=assistant, seed=seed, streamer=streamer, encoder_arguments=encoder_arguments,
            **arguments,
        )  # fmt: skip
    except (TypeError, ValueError) as error:
        if not gives_way or seed is not None:  # transformers' own loop takes no seed
            raise
        logger.info(f"This call is left to transformers: {error}")
        return model._sample(input_ids, streamer=streamer, **arguments)  # type: ignore[operator]
    if prepared.route.way == "plain":
        warn_once(model, f"Decoding without speculation: {prepared.route.reason}.")
        return decode_undrafted(prepared)

    forget_lengths(model)
    if (mixing := row_mixing(model)) is not None:
        warn_once(
            model,
            f"{type(model).__name__} {mixing}: tokens depend on what they are batched with, in plain decoding too, "
            "and outputs may differ from it.",
        )
    call = decoding_call(prepared)
    call.keeps_cache = prepared.generation_config.return_dict_in_generate or _callers_cache(prepared) is not None
    with torch.no_grad(), policy_of(model, assistant, call.forward) as policy:
        loop = DecodingLoop(policy, model_limits(model), ranks=ranks_of(model), alarm=alarm_of(model))
        loop.run(call)
        if call.keeps_cache:
            _complete_rows(call)
        _report(prepared, call, loop.statistics, policy)
    if streamer is not None:
        streamer.end()
    output = _output(prepared, call, loop.statistics)
    if isinstance(call.forward, PackedForward):  # not after an error, which may leave work under way on it
        release_memory(call.forward)
    return output


def decode_undrafted(prepared: PreparedCall) -> torch.Tensor | GenerateDecoderOnlyOutput | GenerateEncoderDecoderOutput:
    """Decode with transformers' own loop; the same seed gives the same tokens as with speculation."""
    forget_lengths(prepared.model)
    output, statistics = decode_plainly(prepared)
    record_call(prepared.model, statistics)
    return output if isinstance(output, torch.Tensor) else _with_statistics(prepared.model, output, statistics)


def _callers_cache(prepared: PreparedCall) -> Any:
    """Return the cache that the caller has passed, to which keys and values are added; None if there is none."""
    cache: Any = prepared.model_kwargs.get(CACHE)
    return cache if getattr(cache, "_is_user_defined", False) else None


def _report(prepared: PreparedCall, call: DecodingCall, statistics: GenerationStatistics, policy: LengthPolicy) -> None:
    """Store the call's statistics and traces with the model, and log them."""
    traces = [request.trace.traced() for request in call.requests if request.trace is not None]
    record_call(prepared.model, statistics, traces or None)
    predicted = ""
    if isinstance(policy, GoodputAuction):
        predicted = f", predicted to be {policy.speedup:.2f} times as fast as plain decoding"
    logger.info(
        f"{type(prepared.assistant.source).__name__}: {statistics.generated_tokens} tokens in {statistics.forwards} "
        f"forwards, {statistics.accepted_tokens} of {statistics.drafted_tokens} drafted tokens accepted "
        f"({statistics.acceptance_rate:.0%}), {statistics.mean_accepted_length:.2f} tokens per step{predicted}"
    )


def _complete_rows(call: DecodingCall) -> None:
    """
    Bring every row's cache and records to the state that plain decoding returns: cut rows that ran past the end of the
    batch, and feed rows that finished early the padding that plain decoding keeps feeding them.
    """
    batch, end = call.batch, call.batch.num_generated
    assert end is not None, "a row has not stopped"
    for request in batch.requests:
        cached = len(request.prompt) + min(request.num_generated, end) - 1
        if request.cache_row.length > cached:
            call.forward.cut(request.cache_row, cached)
        if request.cache_row.length < cached and request.num_generated >= end:  # a state was cut to nothing
            feed = request.text()[request.cache_row.length : cached]
            call.forward.forward([RowInput(request.cache_row, feed)])
            call.forward.commit([request.cache_row], [[]])
    late = [request for request in batch.requests if request.num_generated < end]
    padding = [[batch.pad_token_id] * (end - request.num_generated - 1) for request in late]
    if late and batch.records:
        _record_padding(call, late, padding)
    elif late:
        for request, tokens in zip(late, padding):
            if request.cache_row.is_due(request.length + len(tokens)):
                request.cache_row.renew()
        feeds = [np.array([*request.uncached(), *tokens], np.int64) for request, tokens in zip(late, padding)]
        rows = [request.cache_row for request in late]
        call.forward.forward([RowInput(row, feed) for row, feed in zip(rows, feeds)])
        call.forward.commit(rows, [[]] * len(rows))


def _record_padding(call: DecodingCall, late: list[Request], padding: list[list[int]]) -> None:
    """Record the logits and scores of padding, run as a draft chain in one forward, since its tokens are known."""
    inputs = [
        RowInput(request.cache_row, request.uncached(), DraftTree.chain(tokens))
        for request, tokens in zip(late, padding)
    ]
    logits, offsets = call.forward.forward(inputs)
    for request, item, offset in zip(late, inputs, offsets):
        for line in range(offset, offset + len(item.tree) + 1):
            raw = logits[line : line + 1].float()
            request.raw_logits.append(raw[0])
            request.scores.append(call.picker.process([request], raw, call.batch)[0])
            request.append(call.batch.pad_token_id)
    call.forward.commit([item.row for item in inputs], [range(len(item.tree)) for item in inputs])


def _export_cache(call: DecodingCall, total_length: int, prepared: Any) -> Any:
    """Return all rows' keys and values, in the cache that `generate` prepared if that is empty, else in a new one."""
    rows = [request.cache_row for request in call.batch.requests]
    if isinstance(call.forward, RowwiseForward):
        return call.forward.export(rows, prepared)
    columns = [request.columns(total_length) for request in call.batch.requests]
    if isinstance(call.forward, EncodedForward):
        own = prepared.self_attention_cache if isinstance(prepared, EncoderDecoderCache) else DynamicCache()
        return call.forward.export(rows, columns, total_length, own)
    assert isinstance(call.forward, PackedForward)
    if prepared is None or cached_length(prepared) > 0:
        prepared = new_cache(call.forward.model)
    return call.forward.cache.export(rows, columns, total_length, prepared)


def _output(
    prepared: PreparedCall, call: DecodingCall, statistics: GenerationStatistics
) -> torch.Tensor | GenerateDecoderOnlyOutput | GenerateEncoderDecoderOutput:
    """Return what `generate` returns, after keys and values were added to the caller's cache, if there is one."""
    model, batch = prepared.model, call.batch
    assert batch.num_generated is not None, "a row has not stopped"
    sequences = batch.padded_batch(batch.num_generated)
    if not call.keeps_cache:
        return sequences
    cache: Any = _export_cache(call, sequences.shape[1] - 1, prepared.model_kwargs.get(CACHE))
    given = _callers_cache(prepared)
    if given is not None and cache is not given:
        given.layers, cache = cache.layers, given
    if not prepared.generation_config.return_dict_in_generate:
        return sequences
    steps = range(batch.num_generated)
    fields: dict[str, Any] = {
        "sequences": sequences,
        "scores": tuple(batch.column_of("scores", step) for step in steps) if batch.records_scores else None,
        "logits": tuple(batch.column_of("raw_logits", step) for step in steps) if batch.records_logits else None,
        CACHE: cache,
    }
    plain = GenerateEncoderDecoderOutput if model.config.is_encoder_decoder else GenerateDecoderOnlyOutput
    return _with_statistics(model, plain(**fields), statistics)


def _with_statistics(
    model: PreTrainedModel,
    output: GenerateDecoderOnlyOutput | GenerateEncoderDecoderOutput,
    statistics: GenerationStatistics,
) -> GenerateDecoderOnlyOutput | GenerateEncoderDecoderOutput:
    if splits_outputs(model):
        return output
    if isinstance(output, GenerateEncoderDecoderOutput):
        return SpeculativeEncoderDecoderOutput(**output, statistics=statistics)
    return SpeculativeDecoderOnlyOutput(**output, statistics=statistics)
