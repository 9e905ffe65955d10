"""`python -m benchmarks queue`: an offline queue of prompts, against transformers' static and continuous batches."""

import argparse
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from rich.console import Console
from rich.markup import escape

from hf_smartspec.candidates.base import NoCandidates
from hf_smartspec.commands.common.arguments import UsageError, command_of
from hf_smartspec.commands.common.console import make_console, table
from hf_smartspec.commands.common.figures import saved_figure
from hf_smartspec.commands.common.models import left_padded
from hf_smartspec.commands.common.names import WITH_DRAFT_MODEL
from hf_smartspec.commands.common.outputs import check_outputs, write_json
from hf_smartspec.commands.common.progress import track
from hf_smartspec.commands.common.replaying import RecordedText
from hf_smartspec.commands.common.runs import eos_ids, up_to_end
from hf_smartspec.commands.common.setup import Setup, load_setup
from hf_smartspec.commands.common.timing import environment
from hf_smartspec.goodput import NoSpeculation

from ...kit.claims import Claim, exit_status, print_claims
from ...kit.continuous import continuous_config, serve_lengths

_STATIC, _CONTINUOUS = "transformers, static batches", "transformers, generate_batch"
_WARM_UP = 8  # new tokens

Prompts = list[np.ndarray]
Outputs = list[list[int]]


def run(args: argparse.Namespace) -> int:
    check_outputs(args)
    setup = load_setup(args).shuffled()  # one data set after the other would hide how ragged batches are
    missing = [name for name in args.assistant if name in WITH_DRAFT_MODEL]
    if missing and setup.draft is None:
        raise UsageError(f"--assistant: {missing[0]} needs --draft, a draft model")
    methods = _methods(setup, args)
    console = make_console()
    report: dict[str, Any] = {"command": command_of(args), "parameters": setup.model.num_parameters()}
    report["environment"] = environment(setup.model.device, setup.model.dtype)
    seconds: dict[str, list[float]] = {name: [] for name in methods}
    outputs: dict[str, Outputs] = {}
    with track(total=args.repetitions * len(methods), desc="serving the queue") as progress:
        try:
            for name, serve in _methods(replace(setup, max_new_tokens=_WARM_UP), args).items():
                progress.set_postfix_str(f"{name}: warm-up")
                serve(setup.prompts[: setup.max_batch_size])  # measures the model's speed, too, once
            for _ in range(args.repetitions):
                for name, serve in methods.items():
                    progress.set_postfix_str(name)
                    start = time.perf_counter()
                    outputs[name] = serve(setup.prompts)
                    seconds[name].append(time.perf_counter() - start)
                    progress.update()
        finally:  # interrupted, what was measured so far is still worth reading
            report["methods"] = _summaries(seconds, outputs)
            _print(report, len(setup.prompts), console)
            if args.json:
                write_json(args.json, report)
            if args.plot and report["methods"]:
                _plot(report["methods"], args.plot)
    return exit_status(_claims(report, len(setup.prompts)))


def _claims(report: dict[str, Any], num_prompts: int) -> list[Claim]:
    """In float32, all outputs are the same, but those of `generate_batch` where it cannot replay."""
    if report["environment"]["dtype"] != "float32" or (
        report["command"]["replay"] and next(iter(report["methods"])) == _CONTINUOUS
    ):
        return []
    rows = {name: row for name, row in report["methods"].items() if name != _CONTINUOUS}
    different = {name: num_prompts - row["same_outputs"] for name, row in rows.items()}
    return [Claim(f"{name} gives the first one's outputs", not num, f"{num} differ" if num else "")
            for name, num in different.items()]  # fmt: skip


def _methods(setup: Setup, args: argparse.Namespace) -> dict[str, Callable[[Prompts], Outputs]]:
    methods: dict[str, Callable[[Prompts], Outputs]] = {}
    if "static" not in args.skip:
        methods[_STATIC] = partial(_static, setup)
    if "continuous" not in args.skip:
        methods[_CONTINUOUS] = partial(_continuous, setup)
    for name in args.assistant:
        methods[f"engine, {name}"] = partial(_engine, setup, name)
    return methods


def _static(setup: Setup, queue: Prompts) -> Outputs:
    """Batches of prompts in their order, padded on the left, each as long as its longest output."""
    outputs: Outputs = []
    pad_id, ends = setup.model.generation_config.pad_token_id, set(eos_ids(setup.model))
    for first in range(0, len(queue), setup.max_batch_size):
        prompts = queue[first : first + setup.max_batch_size]
        inputs: dict[str, Any] = left_padded(prompts, pad_id, setup.model.device)
        if setup.replays:
            texts = [_responses(setup)[prompt.tobytes()] for prompt in prompts]
            inputs["logits_processor"] = [RecordedText(inputs["input_ids"], texts, setup.end_id)]
        found = setup.model.generate(**inputs, max_new_tokens=setup.max_new_tokens)
        outputs += [up_to_end(row, ends) for row in found[:, inputs["input_ids"].shape[1] :].tolist()]
    return outputs


def _continuous(setup: Setup, queue: Prompts) -> Outputs:
    """
    With room for as many rows as the others have. It cannot be made to say what was recorded, but to say as much.

    Raises:
        UsageError: if transformers, which only logs what goes wrong, leaves requests out or unfinished.
    """
    longest = max(map(len, setup.prompts)) + setup.max_new_tokens
    config = continuous_config(setup.max_batch_size, longest)
    if setup.replays:
        found = _continuous_of_lengths(setup, queue, config)
    else:
        found = setup.model.generate_batch(
            [prompt.tolist() for prompt in queue],
            max_new_tokens=setup.max_new_tokens,
            continuous_batching_config=config,
        )
    errors = [output.error for output in found.values() if output.error is not None]
    if errors or len(found) != len(queue):
        reason = f" ({errors[0]})" if errors else ""
        raise UsageError(
            f"transformers' generate_batch served {len(found) - len(errors)} of {len(queue)} prompts{reason}; to "
            "measure the other methods, give --skip continuous"
        )
    return [output.generated_tokens for output in found.values()]


def _continuous_of_lengths(setup: Setup, queue: Prompts, config: Any) -> dict[str, Any]:
    """What `generate_batch` does, with a length of its own for every request."""
    responses, ends = _responses(setup), set(eos_ids(setup.model))
    texts = [up_to_end([*responses[prompt.tobytes()].tolist(), setup.end_id], ends) for prompt in queue]
    lengths = [min(len(text), setup.max_new_tokens) for text in texts]
    with setup.model.continuous_batching_context_manager(continuous_batching_config=config, timeout=5) as manager:
        return serve_lengths(manager, queue, lengths)


def _engine(setup: Setup, name: str, queue: Prompts) -> Outputs:
    """A new engine, whose source has learnt nothing yet but what is remembered."""
    source = NoCandidates() if name == "none" else setup.new_source(name)
    engine = setup.new_engine(source, NoSpeculation() if name == "none" else None)
    outputs = engine.generate(queue, max_new_tokens=setup.max_new_tokens)
    return [output.generated_tokens for output in outputs]


def _responses(setup: Setup) -> dict[bytes, np.ndarray]:
    """What was recorded, by prompt; nothing where that is not replayed."""
    responses = setup.responses if setup.replays else None
    return {prompt.tobytes(): response for prompt, response in zip(setup.prompts, responses or ())}


def _summaries(seconds: dict[str, list[float]], outputs: dict[str, Outputs]) -> dict[str, dict[str, Any]]:
    reference = next(iter(outputs.values()), [])
    rows = {}
    for name, found in outputs.items():
        if not seconds[name]:
            continue
        num_tokens = sum(map(len, found))
        rows[name] = {
            "seconds": median(seconds[name]),
            "tokens": num_tokens,
            "tokens_per_second": num_tokens / median(seconds[name]),
            "same_outputs": sum(own == other for own, other in zip(found, reference)),
        }
    return rows


def _print(report: dict[str, Any], num_prompts: int, console: Console) -> None:
    if not report["methods"]:
        return
    system = report["environment"]
    console.print(
        f"[bold]benchmarks queue[/bold] {num_prompts} prompts, {report['parameters'] / 1e6:.0f} M parameters, "
        f"{system['dtype']}, {system['threads']} threads on {escape(str(system['device']))}",
        highlight=False,
    )
    first = next(iter(report["methods"].values()))
    lines = table("An offline queue", "method", "seconds", "tokens", "tokens / s", "speed-up", "same outputs")
    for name, row in report["methods"].items():
        lines.add_row(
            name,
            f"{row['seconds']:.1f}",
            str(row["tokens"]),
            f"{row['tokens_per_second']:.1f}",
            f"{row['tokens_per_second'] / first['tokens_per_second']:.2f}",
            f"{row['same_outputs']} / {num_prompts}",
        )
    console.print(lines)
    print_claims(_claims(report, num_prompts), console)
    if system["dtype"] != "float32":
        console.print(
            "[dim]In half precision, batches of different shapes round differently, and near-ties then go on with "
            "other tokens; in float32 all outputs are the same.[/dim]",
            highlight=False,
        )


def _plot(methods: dict[str, dict[str, Any]], path: Path) -> None:
    with saved_figure(path, 1, 1, (8, 1 + 0.5 * len(methods))) as (_, ((axes,),)):
        bars = axes.barh(list(methods), [row["tokens_per_second"] for row in methods.values()])
        axes.bar_label(bars, fmt="%.1f", padding=3)
        axes.invert_yaxis()
        axes.margins(x=0.1)
        axes.set_xlabel("tokens per second")
