"""Turn the arguments that `generate` has prepared into a call of the decoding loop, with its length policy."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation import BaseStreamer
from transformers.generation.stopping_criteria import MaxLengthCriteria

from ..candidates.request import EncoderInputs
from ..decoding.batch import DecodingBatch
from ..decoding.call import DecodingCall, ModelForward, ModelLimits, Request
from ..decoding.committed import check_source
from ..decoding.trace import RequestTrace
from ..decoding.verify import METHODS
from ..goodput import CostModel, GoodputAuction, LengthPolicy
from ..sampling.noise import row_seed
from ..sampling.processors import TokenPicker
from ..target_model.cache.kept_memory import borrow_memory
from ..target_model.cache.loading import load
from ..target_model.compat import CACHE, cached_length, is_stateful, num_positions, renewal_length, run_encoder
from ..target_model.cost.profiling import load_or_profile, mend_profile
from ..target_model.encoded import EncodedForward, masks_encoder
from ..target_model.forward.packed import PackedForward
from ..target_model.forward.ranks import broadcast_from_rank0, is_sharded
from ..target_model.forward.rowwise import RowwiseForward
from ..target_model.model_state import state_of, warn_once
from ..target_model.written import packed_forward
from .checks import check_mask_shape
from .encoders import check_encoder_arguments, encoder_inputs, known_arguments
from .media import read_media, without_empty_media
from .route import Route, route_of
from .sources import Assistant


def model_limits(model: PreTrainedModel) -> ModelLimits:
    config = model.config.get_text_config(decoder=True)
    return ModelLimits(config.vocab_size, num_positions(config))


@dataclass(frozen=True, eq=False)
class PreparedCall:
    """
    Arguments that `generate` passes to a decoding method, and the call's assistant.

    Args:
        input_ids (`torch.LongTensor` of shape `[batch, length]`): Prompts, padded on the left.
        assistant (`Assistant`): The source that drafts, and its options.
        seeds (sequence of `int`): One per row; None for greedy rows.
        tags (sequence of `str`): One per row; None where the kind of text is unknown.
        model_kwargs (`dict`): Arguments of the model's forward: masks, positions, caches, images, ...
        encoder_arguments (`dict`): Arguments of the encoder's forward, where there is one and they are known.
    """

    model: PreTrainedModel
    input_ids: torch.LongTensor
    logits_processor: LogitsProcessorList
    stopping_criteria: StoppingCriteriaList
    generation_config: GenerationConfig
    assistant: Assistant
    seeds: Sequence[int | None]
    tags: Sequence[str | None]
    streamer: BaseStreamer | None
    model_kwargs: dict[str, Any]
    encoder_arguments: dict[str, Any] = field(default_factory=dict)

    @cached_property
    def route(self) -> Route:
        """The way the call is served, chosen once: the model may have to be probed."""
        return route_of(self.model, self.input_ids, self.generation_config, self.model_kwargs)

    def returns(self, name: str) -> bool:
        """Return whether the output is to contain `name`, such as "scores"."""
        config = self.generation_config
        return bool(config.return_dict_in_generate and getattr(config, f"output_{name}"))

    def read(self, inputs: EncoderInputs) -> EncoderInputs:
        """Run the encoder, which has not run before, and return `inputs` with its outputs."""
        ids: Any = self.encoder_arguments["input_ids"]
        outputs: Any = run_encoder(self.model, ids, self.model_kwargs, self.generation_config)
        return replace(inputs, outputs=outputs)


def prepare_call(
    model: PreTrainedModel,
    input_ids: torch.LongTensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    assistant: Assistant,
    seed: int | Sequence[int] | None = None,
    streamer: BaseStreamer | None = None,
    encoder_arguments: dict[str, Any] | None = None,
    **model_kwargs: Any,
) -> PreparedCall:
    """
    Return the arguments that `generate` passes to a decoding method as one value, after the checks that need the
    prepared batch. Those before have been made (`check_arguments`). `encoder_arguments` come from `watch_encoder`.

    Raises:
        ValueError, TypeError: for arguments that cannot be served; they name the argument and the remedy.
    """
    if not model.config.is_encoder_decoder:
        # Beside a cache or `inputs_embeds`, `input_ids` need not hold the whole text.
        is_whole = _is_empty(model, model_kwargs.get(CACHE)) and model_kwargs.get("inputs_embeds") is None
        if is_whole:
            check_mask_shape(model_kwargs.get("attention_mask"), input_ids.shape)
    if generation_config.max_time is not None and is_sharded(model):
        raise ValueError("`max_time` would end at another token in each of the processes that hold the model.")
    tags = assistant.config.tags_of(len(input_ids), generation_config.num_return_sequences or 1)
    arguments = known_arguments(model, encoder_arguments or {}, len(input_ids))
    check_encoder_arguments(assistant.source, arguments)
    # Last, since a call that is refused and left to transformers must not have drawn a random number.
    seeds = row_seeds(seed, len(input_ids), generation_config.do_sample)
    if seed is None and generation_config.do_sample:  # drawn at random in each process
        seeds = broadcast_from_rank0(model, lambda: seeds)
    return PreparedCall(
        model, input_ids, logits_processor, stopping_criteria, generation_config, assistant, seeds, tags, streamer,
        model_kwargs, arguments,
    )  # fmt: skip


def _is_empty(model: PreTrainedModel, cache: Any) -> bool:
    if cache is None:
        return True
    if is_stateful(model):  # some caches of states do not count tokens
        return not getattr(cache, "_is_user_defined", False)
    return bool(cached_length(cache) == 0)


def decoding_call(prepared: PreparedCall, forward: ModelForward | None = None) -> DecodingCall:
    """
    Return the call in the form that the decoding loop takes.

    Args:
        forward (`ModelForward`, *optional*): An engine's forward, which calls share; by default the call gets its own.
    """
    config, source = prepared.assistant
    requests = _requests(prepared)
    picker = TokenPicker(prepared.logits_processor, len(requests), prepared.input_ids.shape[1])
    records_scores, records_logits = prepared.returns("scores"), prepared.returns("logits")
    pad = prepared.generation_config._pad_token_tensor
    renewal = renewal_length(prepared.model)
    batch = DecodingBatch(
        requests,
        prepared.stopping_criteria,
        None if pad is None else int(pad),
        prepared.streamer,
        records_scores=records_scores,
        records_logits=records_logits,
        pads_stepwise=(picker.needs_lockstep or renewal is not None) and (records_scores or records_logits),
        device=prepared.input_ids.device,
    )
    forward = forward or _forward(prepared, requests)
    for stage in source.stages:
        check_source(stage, forward)
    if config.trace:
        for request in requests:
            request.trace = RequestTrace(request)
    return DecodingCall(
        forward,
        batch,
        picker,
        METHODS[config.verification],
        source,
        config.max_nodes_for(source),
        assignment=config.assignment,
        encoder_inputs=encoder_inputs(prepared.model_kwargs, prepared.encoder_arguments),
        renewal=renewal,
        learning=config.online,
    )


def row_seeds(seed: int | Sequence[int] | None, batch_size: int, do_sample: bool) -> list[int | None]:
    if isinstance(seed, Sequence) and len(seed) != batch_size:
        raise ValueError(f"`seed` must be one integer or one per row: got {len(seed)} for {batch_size} rows.")
    if not do_sample:
        return [None] * batch_size
    if seed is None:
        seed = int(torch.randint(2**62, ()))
    if isinstance(seed, Sequence):
        return [int(value) for value in seed]
    return [row_seed(int(seed), row) for row in range(batch_size)]


def _requests(prepared: PreparedCall) -> list[Request]:
    input_ids, mask = prepared.input_ids, prepared.model_kwargs.get("attention_mask")
    if mask is None or prepared.model.config.is_encoder_decoder:
        mask = torch.ones_like(input_ids)
    ids, mask = input_ids.cpu(), mask.bool().cpu()
    limits = [item.max_length for item in prepared.stopping_criteria if type(item) is MaxLengthCriteria]
    # Plain decoding checks the length after a token, so that one is always generated; a limit may be a float.
    max_new_tokens = max(1, math.ceil(min(limits)) - ids.shape[1]) if limits else None
    return [
        # Each request's id is a new object, and so unique: a source may serve several calls at once.
        Request(object(), row, ids[row], mask[row], max_new_tokens, prepared.seeds[row], prepared.tags[row])
        for row in range(len(ids))
    ]


def _forward(prepared: PreparedCall, requests: list[Request]) -> PackedForward | RowwiseForward:
    model, input_ids, model_kwargs = prepared.model, prepared.input_ids, prepared.model_kwargs
    if prepared.route.way == "rowwise":
        if len(requests) > 1:
            warn_once(
                model,
                f"{type(model).__name__} is decoded row by row, since {prepared.route.reason}. For large batches, "
                "plain decoding may be faster.",
            )
        return RowwiseForward(model, input_ids, without_empty_media(model_kwargs), prepared.generation_config)
    new_tokens = min(requests[0].max_new_tokens or 256, 1024)
    chunk = prepared.generation_config.prefill_chunk_size or 512
    forward = packed_forward(model, len(requests), input_ids.shape[1] + new_tokens + 16, chunk)
    borrow_memory(forward)
    if isinstance(forward, EncodedForward):
        _encode(forward, requests, prepared)
        return forward
    if prepared.route.reads_media:
        read_media(forward, requests, prepared)
        return forward
    cache: Any = model_kwargs.get(CACHE)
    length = 0 if cache is None else cached_length(cache)
    renewal = renewal_length(model)
    is_due = renewal is not None and length <= renewal < input_ids.shape[1]  # then the model ignores the cache
    if length > 0 and not is_due:
        for request in requests:
            request.row = forward.add()
        rows, masks = [item.cache_row for item in requests], [item.mask[:length] for item in requests]
        load(cache, forward.cache, rows, masks)
    return forward


def _encode(forward: EncodedForward, requests: list[Request], prepared: PreparedCall) -> None:
    """Give every request a row that reads its encoder's outputs."""
    kwargs = prepared.model_kwargs
    mask = kwargs.get("attention_mask") if masks_encoder(prepared.model) else None
    keep = bool(prepared.generation_config.return_dict_in_generate)
    for request, row in zip(requests, forward.encode(kwargs["encoder_outputs"], mask, keep=keep)):
        request.row = row


def cost_of(model: PreTrainedModel) -> CostModel | None:
    """Return the cost model of the model's forward; None, with a warning, if it cannot be measured (no memory, say)."""
    try:
        return load_or_profile(model)
    except (ValueError, RuntimeError) as error:
        warn_once(
            model,
            f"The speed of {type(model).__name__} cannot be measured, so drafts have their sources' usual size, "
            f"whether that pays or not: {error!r}",
        )
        return None


@contextmanager
def policy_of(model: PreTrainedModel, assistant: Assistant, forward: ModelForward) -> Iterator[LengthPolicy]:
    """
    Yield the length policy of a call: the caller's own, else the goodput auction, which measures the model's speed at
    its first use on this machine. Models that run row by row get drafts of the source's default size: the cost of a
    row does not depend on the other rows there.
    """
    config, source = assistant
    fixed = config.policy_for(source)
    if fixed is not None:
        yield fixed
        return
    if not isinstance(forward, PackedForward):
        yield config.fixed_policy_for(source)
        return
    cost = cost_of(model)
    if cost is None:
        yield config.fixed_policy_for(source)
        return
    with borrow_policy(model, source.name, cost) as policy:
        yield policy
    mend_profile(model, cost)  # if this call's steps took other times than predicted


@contextmanager
def borrow_policy(model: PreTrainedModel, source: str, cost: CostModel) -> Iterator[GoodputAuction]:
    """
    Yield the model's policy for the source of this name, with its estimates from earlier calls. No other call uses it
    meanwhile, since a policy serves one loop at a time.
    """
    state = state_of(model)
    with state.lock:
        idle = state.policies.setdefault(source, [])
        idle[:] = (policy for policy in idle if policy.cost is cost)  # the model may have been moved or cast
        policy = idle.pop() if idle else GoodputAuction(cost)
    try:
        yield policy
    finally:
        with state.lock:
            idle.append(policy)
