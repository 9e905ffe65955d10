"""Gain of int8 and int4: a target decodes real prompts one at a time in its dtype and quantized, side by side."""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel

from benchmarks.kit.timing import side_by_side
from hf_smartspec.commands.common.arguments import UsageError, usage_errors
from hf_smartspec.commands.common.cost_matched import enlarge
from hf_smartspec.commands.common.models import demo_folder, load_model, load_tokenizer
from hf_smartspec.commands.common.recordings import DataSet, Fields, read_requests
from hf_smartspec.cpu.quantized import KINDS, quantize
from hf_smartspec.generate import enabled
from hf_smartspec.prepare.presets import suffix_trees

from ...kit.session import Case, Section
from ...kit.tables import Column, Row

WAYS: dict[str, dict[str, str]] = {"plain": {}, "none": {"assistant": "none"}, "auto": {"assistant": "auto"}}
_WARMUP = 4  # tokens, before which the models are planned, measured and compiled
_MAX_PROMPT = 256  # tokens of a prompt, its end


def section(
    name: str | None, sizes: Sequence[float], path: Path | None, dtype: str, num_prompts: int, num_tokens: int,
    repeats: int,
) -> Section:  # fmt: skip
    """
    Return for every size and way to decode the tokens per second at batch 1 in `dtype`, in int8 and in int4, and the
    ratios. Suffix trees are emptied before every run.

    Args:
        name (`str`, *optional*): The model; by default the embedded target, at each of the sizes.
        sizes (sequence of `float`): Parameters of the target.
        path (`Path`, *optional*): A file of prompts; by default the demo's.
    """
    columns = (
        Column("MiB", lambda row, _: f"{row['mib']['full']:,.0f}"),
        Column("in int8", lambda row, _: f"{row['mib']['int8']:,.0f}"),
        Column("in int4", lambda row, _: f"{row['mib']['int4']:,.0f}"),
        Column(dtype, "full", "{:.1f}"),
        *(Column(kind, kind, "{:.1f}") for kind in KINDS),
        *(Column(f"{kind} / {dtype}", partial(_ratio, kind)) for kind in KINDS),
    )

    def cases() -> Iterator[Case]:
        small, prompts = _loaded(name, path, dtype, num_prompts, num_tokens)
        for size in sizes if name is None else [small.num_parameters()]:
            models = _models(small, size)
            for way in WAYS:
                label = f"{models['full'].num_parameters() / 1e6:.0f} M, {way}"
                yield Case(label, partial(_compare, models, way, prompts, num_tokens, repeats))

    title = f"Tokens per second at batch 1{', cost-matched targets' if name is None else ''}"
    return Section("quantized", cases, columns, title, "parameters, decoding")


def _ratio(kind: str, row: dict, _: list[dict]) -> str:
    """Return how many times as fast `kind` is in a row, written with two decimals."""
    return f"{row['ratios'][kind]:.2f}"


def _loaded(
    name: str | None, path: Path | None, dtype: str, num_prompts: int, num_tokens: int
) -> tuple[PreTrainedModel, list[torch.Tensor]]:
    """
    Return the model and the prompts.

    Raises:
        UsageError: for models and prompts that cannot be used.
    """
    model_name = name or str(demo_folder("--model") / "models" / "target")
    path = path or demo_folder("--prompts") / "prompts.jsonl"
    tokenizer = load_tokenizer(model_name)
    if tokenizer is None:
        raise UsageError(f"--model: {model_name!r} has no tokenizer")
    requests = read_requests(path, Fields(), None, needs_responses=False)
    data = DataSet.of(str(path), requests, tokenizer, num_prompts, 0, _MAX_PROMPT, num_tokens)
    return load_model(model_name, dtype), [torch.tensor(prompt)[None] for prompt in data.prompts]


def _models(small: PreTrainedModel, size: float) -> dict[str, PreTrainedModel]:
    """
    Return the target at this size in its dtype, in int8 and in int4.

    Raises:
        UsageError: for sizes that cannot be had, and CPUs that have no products of int8.
    """
    with usage_errors(f"--parameters {size:.0f}", ValueError):
        model = small if size == small.num_parameters() else enlarge(small, size)
        models = {"full": model, **{kind: quantize(copy.deepcopy(model), kind) for kind in KINDS}}
    for item in models.values():
        item.generation_config = GenerationConfig(pad_token_id=0)
    return models


def _compare(
    models: dict[str, PreTrainedModel], way: str, prompts: Sequence[torch.Tensor], num_tokens: int, repeats: int
) -> Row:
    model, arguments = models["full"], WAYS[way]
    with ExitStack() as stack:
        for item in models.values():
            stack.enter_context(enabled(item))
        for item in models.values():
            _decoding(item, prompts[:1], _WARMUP, arguments)()
        functions = {name: _decoding(item, prompts, num_tokens, arguments) for name, item in models.items()}
        seconds = side_by_side(functions, repeats, model.device, warmup=0)
    speed = {name: num_tokens * len(prompts) / value for name, value in seconds.items()}
    mib = {name: _num_mib(item) for name, item in models.items()}
    return {
        "parameters": model.num_parameters(),
        "way": way,
        **speed,
        "ratios": {kind: speed[kind] / speed["full"] for kind in KINDS},
        "mib": mib,
    }


def _num_mib(model: PreTrainedModel) -> float:
    return sum(weight.nbytes for weight in model.parameters()) / 2**20


def _decoding(
    model: Any, prompts: Sequence[torch.Tensor], num_tokens: int, arguments: dict[str, Any]
) -> Callable[[], object]:
    def decode() -> None:
        suffix_trees(model).remove_namespace("")
        for ids in prompts:
            model.generate(ids, max_new_tokens=num_tokens, eos_token_id=None, do_sample=False, **arguments)

    return decode
