"""`benchmarks sources`: the contribution of each part of the model-free sources, as in the papers' ablations."""

import argparse
import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.markup import escape

from benchmarks.kit.plots import check_folder
from hf_smartspec.commands.common.arguments import UsageError
from hf_smartspec.commands.common.models import find_demo

from ...kit.claims import Claim
from ...kit.models import choose_model, tokenizer_of
from ...kit.session import Case, Section, new_session, print_head
from ...kit.tables import Lines, Rows, print_lines
from . import claims, plots, runs, sources
from .claims import Figures, Numbers

_YIELD = {"tokens per step, share of drafts accepted": "{tokens_per_step:.2f} {acceptance_rate:.0%}"}


class Ablation(NamedTuple):
    """One comparison."""

    title: str
    cases: Callable[[runs.Workload], Iterator[Case]]
    cells: Mapping[str, str]  # what the tables show: heading, and the format of one setting's numbers
    claims: Callable[[Figures], list[Claim]]
    plot: Callable[[Figures, Path], None]
    note: str = ""


ABLATIONS = {
    "trees": Ablation(
        "Global tree of earlier outputs, tree of the request, both",
        partial(runs.replay_settings, sources.tree_settings),
        _YIELD,
        claims.tree_claims,
        plots.plot_trees,
        "`global` begins every draft anew with the tokens it looks up, `neither` shows what these alone find.",
    ),
    "length": Ablation(
        "Draft length: alpha times the match length, fixed, down to a learnt probability",
        partial(runs.replay_settings, sources.length_settings),
        {"accepted / drafted tokens per step": "{accepted_per_step:.2f}/{drafted_per_step:.1f}"},
        claims.length_claims,
        plots.plot_lengths,
        "`alpha`, `published` and `fixed` score by counts: `published` with matches of up to 64 tokens and no further "
        "bound, the others with 16 tokens and 64 nodes.",
    ),
    "size": Ablation(
        "Number of earlier outputs in the global tree",
        partial(runs.replay_settings, sources.size_settings),
        {**_YIELD, "microseconds per drafted token": "{us_per_node:.2f}"},
        claims.size_claims,
        plots.plot_sizes,
        "Each set of outputs lies within the next; nothing is added while replaying.",
    ),
    "shift": Ablation(
        "A sudden shift of the workload, from one data set to the next",
        runs.shifts,
        {"tokens per step": "{tokens_per_step:.2f}"},
        claims.shift_claims,
        plots.plot_shifts,
        "After the shift: `kept` goes on adding outputs, `frozen` adds none, `fresh` begins with nothing.",
    ),
    "datastore": Ablation(
        "SSSD's sources: the request's own text, a datastore of the earlier outputs, both; as published; REST, PIA",
        partial(runs.replay_settings, sources.datastore_settings),
        _YIELD,
        claims.datastore_claims,
        plots.plot_datastore,
        "The same 16 nodes at most for all; the first three are calibrated. All know the same earlier outputs.",
    ),
    "hybrid": Ablation(
        "Hybrid: a draft model speaks where suffix trees promise no more than tau tokens",
        runs.hybrids,
        {"tokens per step": "{tokens_per_step:.2f}", "speed-up": "{speed_up:.2f}"},
        claims.hybrid_claims,
        plots.plot_hybrids,
        "Answers that the target of --models gave itself to a few prompts; trees begin empty. `published`: algorithm "
        "1, whose drafts the draft model's replace. Speed-up: measured seconds of drafting, verification taken as one "
        "forward over one token, at batch 1.",
    ),
    "temperature": Ablation(
        "Accepted tokens over the temperature that answers are sampled at",
        runs.temperatures,
        {"accepted tokens per step": "{accepted_per_step:.3f}", "tokens per step": "{tokens_per_step:.3f}"},
        claims.temperature_claims,
        plots.plot_temperatures,
        "Answers that the target of --models gave itself, with top k 50 and top p 0.7; a draft is accepted as far as "
        "it holds the sampled tokens. 16 nodes at most.",
    ),
    "confidence": Ablation(
        "Confidence of the draft model in tokens that are accepted, and in those that are rejected",
        runs.confidences,
        {"share of all accepted, or of all rejected tokens": "{share:.0%}"},
        claims.confidence_claims,
        plots.plot_confidences,
        "Answers that the target of --models gave itself, drafted 5 tokens at a time by the draft model; tokens after "
        "the first rejected one do not count.",
    ),
}


def run(args: argparse.Namespace) -> int:
    choose_model(args)
    session = new_session(args, free=["only"])
    if args.plots:
        check_folder(args.plots)
    models = _models(args)
    names = _names(args, models)
    splits = sources.read_splits(args.files, args.limit, args.earlier, tokenizer_of(args))
    sizes = {split.name: {"earlier": len(split.earlier), "replayed": len(split.replayed)} for split in splits}
    session.report["data_sets"] = sizes
    workload = runs.Workload(splits, models)
    try:
        return session.run([_section(name, workload) for name in names], print_head(session, "sources"))
    finally:
        for name in names if args.plots else ():
            if rows := session.rows(name):
                ABLATIONS[name].plot(_figures(rows), args.plots / f"{name}.png")


def _section(name: str, workload: runs.Workload) -> Section:
    ablation = ABLATIONS[name]
    return Section(
        name, partial(ablation.cases, workload), claims=lambda rows: ablation.claims(_figures(rows)),
        show=lambda console, rows: _show(name, _figures(rows), console), note=ablation.note,
    )  # fmt: skip


def _figures(rows: Rows) -> Figures:
    return {name: row["figures"] for name, row in rows.items()}


def _models(args: argparse.Namespace) -> Path | None:
    """Return the folder of the hybrid's models; None where there are none."""
    if args.models is None:
        demo = find_demo()
        return None if demo is None else demo / "models"
    for name in ("target", "draft"):
        if not (args.models / name / "config.json").is_file():
            raise UsageError(f"--models: {str(args.models / name)!r} holds no model")
    return args.models


def _names(args: argparse.Namespace, models: Path | None) -> list[str]:
    """Return the ablations that can be run. Raise `UsageError` if one was asked for that cannot."""
    missing = {}
    if len(args.files) < 2:
        missing["shift"] = "a shift needs two files: from one to the next"
    if models is None:
        for name in ("hybrid", "temperature", "confidence"):
            missing[name] = f"{name} needs --models FOLDER: the demo's are not here"
    for name in args.only or ():
        if name in missing:
            raise UsageError(f"--only {name}: {missing[name]}")
    return list(dict.fromkeys(args.only)) if args.only else [name for name in ABLATIONS if name not in missing]


def _show(name: str, figures: Figures, console: Console) -> None:
    ablation = ABLATIONS[name]
    console.print(f"[bold]{name}: {escape(ablation.title)}[/bold]", highlight=False)
    for heading, form in ablation.cells.items():
        for series, settings in _series(figures, form):
            cells = {name: [_cell(groups[series].get(setting), form) for setting in settings]
                     for name, groups in figures.items()}  # fmt: skip
            rows = [[name, *texts] for name, texts in cells.items()]
            print_lines(console, Lines(f"{series}: {heading}", ["data set", *settings], rows))


def _series(figures: Figures, form: str) -> Iterator[tuple[str, list[str]]]:
    """Yield the series that have these numbers, with all settings that occur in any data set."""
    for series in next(iter(figures.values()), {}):
        settings = dict.fromkeys(setting for groups in figures.values() for setting in groups[series])
        if any(_cell(numbers, form) for numbers in next(iter(figures.values()))[series].values()):
            yield series, list(settings)


def _cell(numbers: Numbers | None, form: str) -> str:
    """Return one setting's numbers as text, empty where it was not measured."""
    try:
        known = {key: math.nan if value is None else value for key, value in (numbers or {}).items()}
        return form.format(**known).replace("nan%", "-").replace("nan", "-")
    except KeyError:
        return ""
