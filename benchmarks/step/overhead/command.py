"""`python -m benchmarks overhead`: the cost of the machinery, without speculation's gains."""

import argparse
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import LlamaForCausalLM, PreTrainedModel

from benchmarks.kit.timing import Stopwatch, side_by_side
from hf_smartspec.commands.common.models import load_model, use_machine
from hf_smartspec.commands.common.setup import Setup
from hf_smartspec.generate import enabled
from hf_smartspec.prepare.config import SmartSpecConfig

from ...kit.forwards import packed, plain_forward
from ...kit.models import choose_model
from ...kit.session import Case, Section, new_session, print_head
from ...kit.sources import sources_by_name
from ...kit.tables import Column, Row
from . import host, quality, quantized
from .arguments import QUALITY, QUANTIZED
from .stubs import VOCAB_SIZE, llama_config

CONTEXT = 256  # cached tokens per row before the measured forward
_LAYERS = 15  # of a model of random weights


def run(args: argparse.Namespace) -> int:
    named = args.model
    if args.layers is None:
        choose_model(args)
    use_machine(args)
    device, dtype = torch.device(args.device), getattr(torch, args.dtype)
    session = new_session(args, device, dtype, free=["parts"], context=CONTEXT)
    sections = [section for part, section in _sections(args, named).items() if part in args.parts]
    name = f"random weights, {args.layers or _LAYERS} layers" if args.model is None else Path(args.model).name
    return session.run(sections, print_head(session, "overhead", name))


def _sections(args: argparse.Namespace, named: str | None) -> dict[str, Section]:
    """
    Return the sections by part; those that run a model share it.

    Args:
        named (`str`, *optional*): The model that the user names; without one, the part "quantized" enlarges the
            embedded target.
    """
    sizes = (args.num_prompts, args.max_new_tokens, args.repeats or 3)
    model = cache(partial(_model, args))
    return {
        "host": host.section(args.host_steps),
        QUANTIZED: quantized.section(named, args.parameters, args.prompts, args.dtype, *sizes),
        QUALITY: quality.section(args.model, args.prompts),
        "forward": _forward_section(model, args.batch_sizes, args.widths, args.repeats or 7),
        "step": _step_section(model, batch_size=8, repeats=1),
        "none": _none_section(model, batch_size=8, new_tokens=32),
    }


def _model(args: argparse.Namespace) -> PreTrainedModel:
    """Return the chosen model, or one of random weights."""
    if args.model:
        return load_model(args.model, args.dtype, args.device)
    model = random_llama(args.layers or _LAYERS)
    return model.to(device=args.device, dtype=getattr(torch, args.dtype))  # type: ignore[call-arg]


def random_llama(num_layers: int, vocab_size: int = VOCAB_SIZE, seed: int = 0) -> LlamaForCausalLM:
    """Return a Llama of random weights, whose cost is real and whose text is not; 15 layers have 205 M parameters."""
    torch.manual_seed(seed)
    sizes = {"num_key_value_heads": 4, "intermediate_size": 2880, "max_position_embeddings": 4096}
    config = llama_config(1024, num_layers, num_heads=16, vocab_size=vocab_size, **sizes)
    return LlamaForCausalLM(config).eval()


def _forward_section(
    model: Callable[[], PreTrainedModel], batch_sizes: Sequence[int], widths: Sequence[int], repeats: int
) -> Section:
    columns = (
        Column("plain ms", "plain", "{:.1f}", 1e3),
        Column("packed ms", "packed", "{:.1f}", 1e3),
        Column("packed / plain", "ratio", "{:.3f}"),
    )

    def measured(size: int, width: int) -> Row:
        return forward_overhead(model(), size, width, repeats)

    cases = [Case(f"{size}, {width}", partial(measured, size, width)) for size in batch_sizes for width in widths]
    title = f"Packed against plain forward, context {CONTEXT}"
    return Section("forward", lambda: cases, columns, title, "batch, tokens per row")


@torch.no_grad()
def forward_overhead(model: PreTrainedModel, batch_size: int, width: int, repeats: int) -> Row:
    """Time the plain forward over `[batch, width]` tokens and the packed forward over the same tokens."""
    tokens = np.random.default_rng(0).integers(3, model.config.vocab_size, (batch_size, CONTEXT + width))
    functions = {"plain": plain_forward(model, tokens, CONTEXT), "packed": packed(model, tokens, CONTEXT)[0]}
    seconds = side_by_side(functions, repeats, model.device)
    ratio = seconds["packed"] / seconds["plain"]
    sizes = {"batch_size": batch_size, "width": width, "parameters": model.num_parameters()}
    return {**sizes, **seconds, "ratio": ratio}


def _step_section(new_model: Callable[[], PreTrainedModel], batch_size: int, repeats: int) -> Section:
    """Return the steps of sources that draft in vain: what is drafted has no part in what is measured."""
    columns = (
        Column("ms per step", lambda row, _: f"{row['total'] / row['steps'] * 1e3:.1f}"),
        Column("outside the forwards", "outside_share", "{:.1%}"),
    )

    def cases() -> Iterator[Case]:
        model = new_model()
        draft: Any = random_llama(1, model.config.get_text_config(decoder=True).vocab_size)
        draft = draft.to(device=model.device, dtype=model.dtype)
        setup = Setup(model, draft, [], max_new_tokens=0, max_batch_size=batch_size, seed=0)
        for name, new_config in sources_by_name(("draft:4", "draft:8:3", "prompt_lookup:4"), setup).items():
            yield Case(name, partial(step_overhead, model, draft, new_config(), batch_size, repeats))

    return Section("step", cases, columns, f"A step of the engine at batch {batch_size}", "source:nodes:width")


def step_overhead(
    model: PreTrainedModel, draft: PreTrainedModel, config: SmartSpecConfig, batch_size: int, repeats: int = 3
) -> Row:
    """Return the share of generation time that is spent outside the two models' forwards."""
    ids = torch.randint(3, model.config.vocab_size, (batch_size, 64), device=model.device)
    runs = []
    for _ in range(repeats + 1):  # the first one warms up
        target_watch, draft_watch = Stopwatch(), Stopwatch()
        with enabled(model), target_watch.attached_to(model), draft_watch.attached_to(draft):
            output = model.generate(
                ids, assistant=config, max_new_tokens=24, eos_token_id=None, return_dict_in_generate=True
            )
        total, inside = output.statistics.seconds_total, target_watch.seconds + draft_watch.seconds
        steps = output.statistics.forwards
        runs.append({"total": total, "inside": inside, "steps": steps, "outside_share": 1 - inside / total})
    return sorted(runs[1:], key=lambda row: row["outside_share"])[repeats // 2]


def _none_section(model: Callable[[], PreTrainedModel], batch_size: int, new_tokens: int) -> Section:
    names = ("plain_seconds", "plain_tokens", "engine_seconds", "engine_tokens", "speedup")
    columns = [
        Column(name.replace("_", " "), name, "{:.2f}" if name.endswith(("seconds", "speedup")) else "{}")
        for name in names
    ]
    # In float32, where both decode the same tokens: in half precision near-ties let rows end at other lengths.
    case = Case("ragged prompts and ends", lambda: no_speculation(model().float(), batch_size, new_tokens))
    title = f"No speculation, float32, batch {batch_size}"
    return Section("no_speculation", lambda: [case], columns, title)


def no_speculation(model: PreTrainedModel, batch_size: int, new_tokens: int = 64, repeats: int = 3) -> dict[str, float]:
    """Time plain `generate` and the engine without drafts on ragged prompts, whose rows end at different lengths."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(8, 96, batch_size)
    ids = torch.zeros(batch_size, int(lengths.max()), dtype=torch.long, device=model.device)
    mask = torch.zeros_like(ids)
    for row, length in enumerate(lengths):
        ids[row, -length:] = torch.from_numpy(rng.integers(3, model.config.vocab_size, length))
        mask[row, -length:] = 1
    arguments: dict[str, Any] = {
        "attention_mask": mask, "max_new_tokens": new_tokens, "do_sample": False, "pad_token_id": 0
    }  # fmt: skip
    arguments["eos_token_id"] = _ends(model.generate(ids, **arguments, eos_token_id=None), ids.shape[1])
    outputs = {}

    def plain():
        outputs["plain"] = model.generate(ids, **arguments)

    def engine():
        outputs["engine"] = model.generate(ids, **arguments, assistant="none")

    with enabled(model):
        seconds = side_by_side({"plain": plain, "engine": engine}, repeats, model.device, warmup=1)
    new = {name: int((output[:, ids.shape[1] :] != 0).sum()) for name, output in outputs.items()}
    return {
        **{f"{name}_seconds": value for name, value in seconds.items()},
        **{f"{name}_tokens": value for name, value in new.items()},
        "speedup": seconds["plain"] / seconds["engine"],
    }


def _ends(sequences: torch.Tensor, prompt_length: int) -> list[int]:
    """Return token ids that, taken as ends of sequence, stop the rows at lengths spread over the whole run."""
    generated = sequences[:, prompt_length:].tolist()
    return [line[(row + 1) * len(line) // len(generated) - 1] for row, line in enumerate(generated)]
