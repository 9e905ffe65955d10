"""`python -m benchmarks online`: what drafters learn from the requests that they draft for."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn
from transformers import PreTrainedModel

from hf_smartspec.candidates import MedusaHeads
from hf_smartspec.candidates.committed import LAST
from hf_smartspec.commands.common.arguments import UsageError, command_of
from hf_smartspec.commands.common.console import make_console
from hf_smartspec.commands.common.data_sets import DataSet
from hf_smartspec.commands.common.demo import demo_folder
from hf_smartspec.commands.common.figures import check_folder
from hf_smartspec.commands.common.models import load_draft, load_model
from hf_smartspec.commands.common.outputs import check_output, replace_json, resumed
from hf_smartspec.commands.common.recordings import Fields, Texts, read_requests, read_rows
from hf_smartspec.commands.common.setup import load_target, max_prompt_len
from hf_smartspec.commands.common.timing import environment

from ...kit.tables import as_markdown, print_lines
from .answers import Answers
from .arguments import LIVE, LIVE_PARTS, LOAD, SPEED
from .live import live, random_drafter, speed
from .load import load
from .parts import Experiments
from .report import plot, tables
from .streams import Task, answer, distilled, options_of

_BASE_EPOCHS = 8


def run(args: argparse.Namespace) -> int:
    for path in (args.json, args.markdown):
        check_output(path)
    if args.plots:
        check_folder(args.plots)
    if args.resume and args.json is None:
        raise UsageError("--resume goes with --json")
    texts = _texts(args)
    if not set(args.parts) & set(LIVE_PARTS):
        args.parameters = 0  # what is replayed costs nothing
    larger, tokenizer = load_target(args)
    if larger.config.is_encoder_decoder and set(args.parts) & set(LIVE_PARTS):
        raise UsageError("--parts: behind an encoder, what is replayed is measured only")
    report: dict[str, Any] = {
        "command": command_of(args),
        "environment": environment(larger.device, larger.dtype) | _conditions(args, larger),
        "is_smoke": False,
        "parts": {},
    }
    if args.resume and args.json.exists():
        report = resumed(args.json, report)
    small = load_model(args.model or str(demo_folder("--model") / "models" / "target"), args.dtype, args.device)
    sizes = (args.requests + args.test, 0, max_prompt_len(args, small), args.max_new_tokens)
    data = [DataSet.of(name, requests, tokenizer, *sizes) for name, requests in texts.items()]
    try:
        _measure(args, small, larger, data, tokenizer, report)
    finally:  # interrupted, what was measured so far is still worth reading
        _show(args, report)
    return 1 if _num_different(report) else 0


def _texts(args: argparse.Namespace) -> dict[str, list[Texts]]:
    """Requests by task."""
    texts: dict[str, list[Texts]] = {}
    for word in args.files:
        name, _, field = word.partition(":")
        path = Path(name)
        if not field:
            texts[path.name.partition(".")[0]] = read_requests(path, Fields(turns="none"), None, False)
            continue
        for row in read_rows(path):
            if isinstance(row, dict) and isinstance(row.get("prompt"), str) and row.get(field) is not None:
                texts.setdefault(str(row[field]), []).append(Texts([row["prompt"]], ""))
    if not texts:
        raise UsageError(f"no prompts in {args.files}")
    generator = np.random.default_rng(args.seed)
    return {name: [items[index] for index in generator.permutation(len(items))] for name, items in texts.items()}


def _conditions(args: argparse.Namespace, larger: PreTrainedModel) -> dict[str, Any]:
    names = ("files", "requests", "test", "interval", "learning_rate", "max_new_tokens", "max_prompt", "model", "draft")
    found = {name: getattr(args, name) for name in names}
    return found | {"base": str(args.base) if args.base else None, "parameters": larger.num_parameters()}


def _measure(
    args: argparse.Namespace,
    small: PreTrainedModel,
    larger: PreTrainedModel,
    data: Sequence[DataSet],
    tokenizer: Any,
    report: dict[str, Any],
) -> None:
    missing = [part for part in args.parts if part not in report["parts"]]
    if not missing:
        return
    draft = load_draft(args.draft or str(demo_folder("--draft") / "models" / "draft"), small, args.dtype)
    layers = (LAST,) if SPEED in missing else ()
    answers = Answers(small, _beside(args.json), args.resume)
    tasks = [answer(answers, item, args.test, args.max_new_tokens, layers) for item in data]
    drafter: nn.Module = draft if args.base is None else _based(args, answers, draft, tokenizer)
    experiments = Experiments(small, drafter, tasks, args)
    for part in missing:
        if part == SPEED:
            report["parts"][part] = speed(larger, _drafters(small, larger, drafter), tasks, args)
        elif part == LIVE:
            report["parts"][part] = live(larger, random_drafter(args.random, larger, draft, args.seed), tasks, args)
        elif part == LOAD:
            report["parts"][part] = load(larger, drafter, tasks, args)
        else:
            report["parts"][part] = experiments.run(part)
        if args.json:
            replace_json(args.json, report)


def _beside(path: Path | None) -> Path | None:
    """Where answers are kept: results.answers.json beside results.json."""
    return None if path is None else path.with_suffix(".answers.json")


def _based(args: argparse.Namespace, answers: Answers, draft: PreTrainedModel, tokenizer: Any) -> nn.Module:
    """A draft model that knows other texts only."""
    requests = read_requests(args.base, Fields(turns="none"), None, False)
    data = DataSet.of("base", requests, tokenizer, args.requests + 1, 0, args.max_prompt, args.max_new_tokens)
    base: Task = answer(answers, data, 1, args.max_new_tokens)
    drafter = random_drafter("draft", answers.target, draft, args.seed)
    return distilled(drafter, base.stream, options_of(args), _BASE_EPOCHS, f"distilling {args.base}")


def _drafters(small: PreTrainedModel, larger: PreTrainedModel, drafter: nn.Module) -> dict[str, nn.Module]:
    """The draft model, and the demo's Medusa heads where they fit what is measured."""
    found = {"draft": drafter}
    folder = demo_folder("--draft") / "models" / "medusa"
    if larger.config.hidden_size == small.config.hidden_size and folder.is_dir():
        try:
            found["medusa"] = MedusaHeads.from_pretrained(str(folder), larger)
        except ValueError:  # of another target
            return found
    return found


def _num_different(report: dict[str, Any]) -> int:
    parts = report["parts"]
    rows = [row for methods in parts.get(SPEED, {}).get("rows", {}).values() for row in methods.values()]
    exact = report["environment"]["dtype"] == "float32"  # else ties may be broken otherwise
    return int(exact and sum(row["different"] for row in rows) + parts.get(LIVE, {}).get("different", 0))


def _show(args: argparse.Namespace, report: dict[str, Any]) -> None:
    found = tables(report)
    console = make_console()
    for lines in found:
        print_lines(console, lines)
    if args.markdown and found:
        args.markdown.write_text(as_markdown(found), encoding="utf-8")
    if args.plots and found:
        plot(report, args.plots)
