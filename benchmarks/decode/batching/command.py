"""`python -m benchmarks batching`: the arguments, `generate_batch` with and without an assistant, and the tables."""

import argparse
import time
from dataclasses import replace
from statistics import median
from typing import Any

from rich.console import Console

from hf_smartspec.candidates.base import NoCandidates
from hf_smartspec.commands.common.arguments import UsageError, command_of
from hf_smartspec.commands.common.console import make_console, table
from hf_smartspec.commands.common.names import WITH_DRAFT_MODEL
from hf_smartspec.commands.common.outputs import check_outputs, replace_json
from hf_smartspec.commands.common.progress import track
from hf_smartspec.commands.common.setup import Setup, load_setup
from hf_smartspec.commands.common.timing import environment
from hf_smartspec.generate import enabled

from ...kit.claims import Claim, exit_status, print_claims
from ...kit.continuous import continuous_config
from .serving import PLAIN, check_can_be_saved, measure_servers

_WARM_UP = 8  # new tokens

Report = dict[str, Any]


def run(args: argparse.Namespace) -> int:
    check_outputs(args)
    if args.plot:
        raise UsageError("--plot: there is nothing to be drawn")
    if args.replay:
        raise UsageError("--replay: transformers' continuous batching cannot be made to say what was recorded")
    if args.assistant in WITH_DRAFT_MODEL and args.serve:
        raise UsageError(f"--serve: the server drafts with presets, not with {args.assistant!r}")
    setup = load_setup(args).shuffled()
    if args.assistant in WITH_DRAFT_MODEL and setup.draft is None:
        raise UsageError(f"--assistant: {args.assistant} needs --draft, a draft model")
    if args.serve:
        check_can_be_saved(setup.model)
    report: Report = {"command": command_of(args), "parameters": setup.model.num_parameters()}
    report["environment"] = environment(setup.model.device, setup.model.dtype)
    console = make_console()
    try:
        report["generate_batch"] = _measure(setup, args.assistant, args.repetitions)
        if args.serve:
            report["serve"] = measure_servers(setup, args)
    finally:  # interrupted, what was measured so far is still worth reading
        _print(report, console)
        if args.json:
            replace_json(args.json, report)
    return exit_status(_claims(report))


def _measure(setup: Setup, assistant: str, repetitions: int) -> Report:
    """Both in turns, each prompt for the first time as far as suffix trees know."""
    names = [PLAIN, assistant]
    seconds: dict[str, list[float]] = {name: [] for name in names}
    outputs: dict[str, list[list[int]]] = {}
    with track(total=repetitions * len(names), desc="generate_batch") as progress:
        short = replace(setup, max_new_tokens=_WARM_UP)
        for name in names:
            _generate(short, name)
        for _ in range(repetitions):
            for name in names:
                progress.set_postfix_str(name)
                taken, outputs[name] = _generate(setup, name)
                seconds[name].append(taken)
                progress.update()
    reference = outputs[PLAIN]
    return {
        name: {
            "seconds": median(seconds[name]),
            "all_seconds": seconds[name],
            "tokens_per_second": sum(map(len, found)) / median(seconds[name]),
            "same_outputs": sum(own == other for own, other in zip(found, reference)),
            "num_outputs": len(found),
        }
        for name, found in outputs.items()
    }


def _generate(setup: Setup, name: str) -> tuple[float, list[list[int]]]:
    """Seconds, and the tokens of every prompt."""
    longest = max(map(len, setup.prompts)) + setup.max_new_tokens
    prompts: Any = [prompt.tolist() for prompt in setup.prompts]
    options: dict[str, Any] = {"max_new_tokens": setup.max_new_tokens}
    options["continuous_batching_config"] = continuous_config(
        setup.max_batch_size, longest, max_requests_per_batch=setup.max_batch_size
    )
    if name == PLAIN:
        start = time.perf_counter()
        found: Any = setup.model.generate_batch(prompts, **options)
        return time.perf_counter() - start, _tokens(found, len(prompts))
    source = NoCandidates() if name == "none" else setup.new_source(name)
    with enabled(setup.model, source):
        start = time.perf_counter()
        found = setup.model.generate_batch(prompts, **options)
        return time.perf_counter() - start, _tokens(found, len(prompts))


def _tokens(found: Any, num_prompts: int) -> list[list[int]]:
    """
    Raises:
        UsageError: if requests are missing or have failed, which `generate_batch` only logs.
    """
    errors = [output.error for output in found.values() if output.error is not None]
    if errors or len(found) != num_prompts:
        reason = f" ({errors[0]})" if errors else ""
        raise UsageError(f"generate_batch served {len(found) - len(errors)} of {num_prompts} prompts{reason}")
    return [output.generated_tokens for output in found.values()]


def _claims(report: Report) -> list[Claim]:
    if report["environment"]["dtype"] != "float32":
        return []
    claims = []
    if "generate_batch" in report:
        different = [row["num_outputs"] - row["same_outputs"] for row in report["generate_batch"].values()]
        text = "generate_batch returns the same tokens with an assistant"
        claims.append(Claim(text, not any(different), f"{max(different)} differ" if any(different) else ""))
    for name, row in report.get("serve", {}).items():
        if name != PLAIN:
            text = "the server answers every request as `generate` does with its own settings"
            claims.append(Claim(text, row["as_asked"] == row["num_checked"]))
    return claims


def _print(report: Report, console: Console) -> None:
    system = report["environment"]
    console.print(
        f"[bold]benchmarks batching[/bold] {report['parameters'] / 1e6:.0f} M parameters, {system['dtype']}, "
        f"{system['threads']} threads on {system['device']}; repetitions in turns, medians",
        highlight=False,
    )
    if "generate_batch" in report:
        rows = report["generate_batch"]
        lines = table("generate_batch", "assistant", "seconds", "tokens / s", "speed-up", "same outputs")
        for name, row in rows.items():
            lines.add_row(
                name,
                f"{row['seconds']:.1f}",
                f"{row['tokens_per_second']:.1f}",
                f"{rows[PLAIN]['seconds'] / row['seconds']:.2f}",
                f"{row['same_outputs']} / {row['num_outputs']}",
            )
        console.print(lines)
    if "serve" in report:
        rows = report["serve"]
        title = "transformers serve --continuous-batching"
        lines = table(title, "assistant", "seconds", "tokens / s", "speed-up", "median latency, s", "as asked")
        for name, row in rows.items():
            lines.add_row(
                name,
                f"{row['seconds']:.1f}",
                f"{row['tokens_per_second']:.1f}",
                f"{row['tokens_per_second'] / rows[PLAIN]['tokens_per_second']:.2f}",
                f"{row['median_latency']:.2f}",
                f"{row['as_asked']} / {row['num_checked']}",
            )
        console.print(lines)
        console.print(
            "[dim]as asked: answers that are those of `generate` with the request's own temperature, seed and stop "
            "strings. By itself, the server applies the first request's to all, and stops nowhere else, so that it "
            "generates other and more tokens: the speed-up is that of tokens per second.[/dim]",
            highlight=False,
        )
    print_claims(_claims(report), console)
