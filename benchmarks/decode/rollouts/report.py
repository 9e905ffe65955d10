"""Results of `python -m benchmarks rollouts`: figures, tables and claims."""

from collections.abc import Sequence
from statistics import mean, median

from rich.console import Console

from hf_smartspec.decoding.statistics import GenerationStatistics

from ...kit.claims import Claim
from ...kit.tables import Column, Lines, Row, Rows, lines_of, print_lines
from .runs import PLAIN, Rollout, Run


def summary(run: Run, num_epochs: int) -> Row:
    """Return what is kept of a run; its digest tells whether another one was the same to the last bit."""
    per_epoch = max(len(run.rollouts) // num_epochs, 1)
    parts = [run.rollouts[first : first + per_epoch] for first in range(0, len(run.rollouts), per_epoch)]
    return {
        **_figures(run.rollouts),
        "epochs": [_figures(part) for part in parts],
        "same_completions": all(item.is_same for item in run.rollouts),
        "digest": run.digest(),
        "losses": run.losses,
        "rewards": run.rewards,
        "entropies": run.entropies,
        "lengths": [item.lengths for item in run.rollouts],
        "seconds": [item.seconds for item in run.rollouts],
        "plain_seconds": [item.plain_seconds for item in run.rollouts],
        "own_seconds": [item.own_seconds for item in run.rollouts],
    }


def _figures(rollouts: Sequence[Rollout]) -> Row:
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


def same_training(row: Row, rows: Rows) -> bool:
    """Return whether completions, losses and final weights equal those without speculation, to the last bit."""
    return bool(row["digest"] == next(iter(rows.values()))["digest"])


def claims(rows: Rows) -> list[Claim]:
    """Claim for float32 that speculation changes nothing."""
    return [
        Claim(
            f"{name}: completions, losses and weights are those without speculation",
            row["same_completions"] and same_training(row, rows),
        )
        for name, row in rows.items()
        if name != PLAIN
    ]


def _is_plain(row: Row, rows: Rows) -> bool:
    return row is rows.get(PLAIN)


def _learning(row: Row, _: Rows) -> str:
    seconds = sum(item["seconds"] for item in row.get("learning", {}).values())
    return f"{seconds:.1f}" if seconds else "-"


_SAME = {True: "same", False: "OTHERS"}
_COLUMNS = (
    Column("s", "median_seconds", "{:.2f}"),
    Column("/ none", lambda row, rows: "1" if _is_plain(row, rows) else f"{row['ratio']:.2f}"),
    Column("/ own", "ratio_to_own", "{:.2f}"),
    Column("tokens/step", "tokens_per_step", "{:.2f}"),
    Column("accepted", "acceptance_rate", "{:.0%}"),
    Column("learning s", _learning),
    Column("completions", lambda row, _: _SAME[row["same_completions"]]),
    Column("losses", lambda row, rows: _SAME[same_training(row, rows)]),
)


def print_report(report: Row, console: Console, rows: Rows) -> None:
    console.print(_title(report), highlight=False, markup=False)
    print_lines(console, lines_of("Rollouts", "assistant", _COLUMNS, rows))
    print_lines(console, _epochs(rows))
    console.print(_notes(report, rows), style="dim", markup=False, highlight=False)


def _epochs(rows: Rows) -> Lines:
    num = len(next(iter(rows.values()))["epochs"])
    cells = [
        [name, *(f"{item['ratio_to_own']:.2f}, {item['tokens_per_step']:.2f}" for item in row["epochs"])]
        for name, row in rows.items()
        if name != PLAIN
    ]
    title = "Epoch by epoch: / own, tokens per step"
    return Lines(title, ["assistant", *(str(at + 1) for at in range(num))], cells)


def _title(report: Row) -> str:
    command, system = report["command"], report["environment"]
    size = system["rollout_parameters"]
    is_enlarged = size != system["parameters"]
    policy = f"policy of {system['parameters'] / 1e6:.1f} M parameters in {system['dtype']}"
    cost = f"; rollouts cost-matched to {size / 1e6:.0f} M" if is_enlarged else ""
    return (
        f"GRPO by TRL: {policy}{cost}; {system['num_prompts']} prompts, {command['generations']} completions each, "
        f"{command['prompts_per_step']} prompts a step, {command['epochs']} epochs, up to {command['max_new_tokens']} "
        f"tokens, temperature {command['temperature']:g}"
    )


def _notes(report: Row, rows: Rows) -> str:
    system = report["environment"]
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
