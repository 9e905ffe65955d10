"""What `python -m benchmarks rollouts` found: figures, tables and claims."""

from collections.abc import Sequence
from statistics import mean, median
from typing import Any

from rich.console import Console
from rich.markup import escape

from hf_smartspec.commands.common.console import fold, table
from hf_smartspec.decoding.statistics import GenerationStatistics

from ...kit.claims import Claim, print_claims
from .runs import PLAIN, Rollout, Run

Summary = dict[str, Any]


def summary(run: Run, reference: Run, num_epochs: int) -> Summary:
    """
    Args:
        reference (`Run`): The one without speculation.
    """
    per_epoch = max(len(run.rollouts) // num_epochs, 1)
    parts = [run.rollouts[first : first + per_epoch] for first in range(0, len(run.rollouts), per_epoch)]
    return {
        **_figures(run.rollouts),
        "epochs": [_figures(part) for part in parts],
        "same_completions": all(item.is_same for item in run.rollouts),
        "same_training": run.is_same_training(reference),
        "losses": run.losses,
        "rewards": run.rewards,
        "entropies": run.entropies,
        "lengths": [item.lengths for item in run.rollouts],
        "seconds": [item.seconds for item in run.rollouts],
        "plain_seconds": [item.plain_seconds for item in run.rollouts],
        "own_seconds": [item.own_seconds for item in run.rollouts],
    }


def _figures(rollouts: Sequence[Rollout]) -> Summary:
    total = sum((item.statistics for item in rollouts), GenerationStatistics())
    seconds = median(item.seconds for item in rollouts)
    return {
        "median_seconds": seconds,
        "ratio": seconds / median(item.plain_seconds for item in rollouts),
        "ratio_to_own": seconds / median(item.own_seconds for item in rollouts),
        "tokens_per_step": total.mean_accepted_length,
        "acceptance_rate": total.acceptance_rate,
        "statistics": total.as_dict(),
    }


def claims(report: Summary) -> list[Claim]:
    """In float32, speculation changes nothing."""
    if report["environment"]["dtype"] != "float32":
        return []
    rows = {name: row for name, row in report["assistants"].items() if name != PLAIN}
    return [
        Claim(f"{name}: completions, losses and weights are those without speculation", _is_same(row))
        for name, row in rows.items()
    ]


def _is_same(row: Summary) -> bool:
    return row["same_completions"] and row["same_training"]


def print_report(report: Summary, console: Console) -> None:
    console.print(_title(report), highlight=False, markup=False)
    rows: dict[str, Summary] = report["assistants"]
    lines = table(
        "Rollouts",
        "assistant",
        "s",
        "/ none",
        "/ own",
        "tokens/step",
        "accepted",
        "learning s",
        "completions",
        "losses",
    )
    for name, row in rows.items():
        learning = sum(item["seconds"] for item in row.get("learning", {}).values())
        lines.add_row(
            escape(name),
            f"{row['median_seconds']:.2f}",
            "1" if name == PLAIN else f"{row['ratio']:.2f}",
            f"{row['ratio_to_own']:.2f}",
            f"{row['tokens_per_step']:.2f}",
            f"{row['acceptance_rate']:.0%}",
            f"{learning:.1f}" if learning else "-",
            "same" if row["same_completions"] else "OTHERS",
            "same" if row["same_training"] else "OTHERS",
        )
    fold(lines)
    console.print(lines)
    _print_epochs(rows, console)
    console.print(_notes(report), style="dim", markup=False, highlight=False)
    print_claims(claims(report), console)


def _print_epochs(rows: dict[str, Summary], console: Console) -> None:
    num = len(next(iter(rows.values()))["epochs"])
    lines = table("Epoch by epoch: / own, tokens per step", "assistant", *(str(at + 1) for at in range(num)))
    for name, row in rows.items():
        if name != PLAIN:
            cells = [f"{item['ratio_to_own']:.2f}, {item['tokens_per_step']:.2f}" for item in row["epochs"]]
            lines.add_row(escape(name), *cells)
    fold(lines)
    if lines.row_count:
        console.print(lines)


def _title(report: Summary) -> str:
    command, size = report["command"], report["rollout_parameters"]
    is_enlarged = size != report["parameters"]
    policy = f"policy of {report['parameters'] / 1e6:.1f} M parameters in {report['environment']['dtype']}"
    cost = f"; rollouts cost-matched to {size / 1e6:.0f} M" if is_enlarged else ""
    return (
        f"GRPO by TRL: {policy}{cost}; {report['num_prompts']} prompts, {command['generations']} completions each, "
        f"{command['prompts_per_step']} prompts a step, {command['epochs']} epochs, up to {command['max_new_tokens']} "
        f"tokens, temperature {command['temperature']:g}"
    )


def _notes(report: Summary) -> str:
    system, rows = report["environment"], report["assistants"]
    first = next(iter(rows.values()))
    lengths = [length for item in first["lengths"] for length in item]
    return (
        f"{system['device']}, {system['threads']} threads, torch {system['torch']}, transformers "
        f"{system['transformers']}. s: median seconds of a rollout, what online distillation takes within it included; "
        "/ none: by the median of the same rollouts without drafts; / own: by that of transformers' own sampling, "
        "as TRL has it without this library, for as many forwards. All are made in turns, rollout by rollout.\n"
        f"Completions: mean length {mean(lengths):.0f}, longest of a rollout "
        f"{mean(max(item) for item in first['lengths']):.0f}; the policy's entropy {mean(first['entropies']):.2f} "
        f"nats; mean reward {first['rewards'][0]:.2f} at first, {first['rewards'][-1]:.2f} at last.\n"
        "losses: those of a whole training with this assistant against one without any, and its final weights, bit by "
        "bit."
    )
