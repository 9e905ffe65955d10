"""One forward over drafts, arg max included, against the least time in which its bytes can be read."""

from collections.abc import Iterator
from functools import partial

import numpy as np
import torch
from transformers import PreTrainedModel

from hf_smartspec.target_model.graphs import RUNS_UNTIL_RECORDED, records
from hf_smartspec.target_model.written import written_decoder

from ...kit.forwards import Forward, packed, plain_forward
from ...kit.session import Case, Section
from ...kit.tables import Column, Row
from ...kit.timing import side_by_side
from .arguments import VERIFICATION
from .bandwidth import PEAK, best_rate, cache_bytes, peak_bytes, weight_bytes
from .shapes import World

_PLAIN, _CALL_BY_CALL = "plain forward", "launched call by call"


def section(world: World, shape: str, bandwidth: dict[str, Row], share: float) -> Section:
    columns = [
        Column("ms", "seconds", "{:.2f}", 1e3),
        Column("limit ms", "limit", "{:.2f}", 1e3),
        Column("times limit", "times_limit", "{:.2f}"),
        PEAK,
    ]
    return Section(f"{VERIFICATION} {shape}", lambda: _cases(world, shape, bandwidth), columns, share=share)


def case_name(batch_size: int, width: int, way: str = "") -> str:
    return f"batch {batch_size}, {width} {'token' if width == 1 else 'tokens'}{way and ', '}{way}"


def _cases(world: World, shape: str, bandwidth: dict[str, Row]) -> Iterator[Case]:
    for batch_size, widths in world.plan.widths.items():
        ways = [*((width, "") for width in widths), (1, _PLAIN)]
        if records(world.device):
            ways += [(width, _CALL_BY_CALL) for width in widths]
        for width, way in ways:
            measure = partial(_measured, world, shape, batch_size, width, way, bandwidth)
            yield Case(case_name(batch_size, width, way), measure)


def _measured(world: World, shape: str, batch_size: int, width: int, way: str, bandwidth: dict[str, Row]) -> Row:
    """Time a forward after the plan's context in every row; the plain forward is transformers' own."""
    model = world.target(shape)
    context = world.plan.context
    size = (batch_size, context + width)
    tokens = np.random.default_rng(0).integers(4, model.config.vocab_size, size)
    with torch.inference_mode(), peak_bytes(world.device) as peak:
        if way == _PLAIN:
            forward = plain_forward(model, tokens, tokens.shape[1] - 1, picks=True)
        else:
            forward = _own_forward(model, tokens, context, is_recorded=way != _CALL_BY_CALL)
        seconds = side_by_side({way: forward}, world.plan.repeats, world.device)[way]
    num_bytes = weight_bytes(model) + batch_size * (context + width) * cache_bytes(model)
    limit = num_bytes / best_rate(bandwidth)
    return {
        "seconds": seconds,
        "limit": limit,
        "times_limit": seconds / limit,
        "bytes": num_bytes,
        "peak_bytes": peak.value,
        "parameters": model.num_parameters(),
        "is_written_out": written_decoder(model) is not None,
    }


def _own_forward(model: PreTrainedModel, tokens: np.ndarray, context: int, is_recorded: bool) -> Forward:
    forward, made = packed(model, tokens, context, picks=True)
    if not is_recorded:
        made.recordings = None
    for _ in range(RUNS_UNTIL_RECORDED if is_recorded else 0):
        forward()
    return forward
