"""`python -m benchmarks drafters`: what learned drafters yield on each kind of text, alone and with suffix trees."""

import argparse
import copy
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

from rich.console import Console
from transformers import PreTrainedModel

from hf_smartspec.candidates import MedusaHeads
from hf_smartspec.commands.common.arguments import UsageError, command_of
from hf_smartspec.commands.common.console import make_console
from hf_smartspec.commands.common.data_sets import DataSet
from hf_smartspec.commands.common.demo import demo_folder, find_demo
from hf_smartspec.commands.common.drafters import Drafter, DrafterFiles, load_drafters
from hf_smartspec.commands.common.models import load_model, read_prompts
from hf_smartspec.commands.common.names import JOINT, check_distinct
from hf_smartspec.commands.common.outputs import check_output, replace_json, resumed
from hf_smartspec.commands.common.progress import track
from hf_smartspec.commands.common.recordings import Fields, Texts, read_requests
from hf_smartspec.commands.common.setup import load_target, max_prompt_len, missing_arguments, num_parameters
from hf_smartspec.commands.common.timing import environment

from ...kit.tables import as_markdown, print_lines
from .arguments import SPEED, STEPS, TREES
from .report import notes, tables
from .runs import DrafterBench, Rows

_REFERENCE = "draft"  # what others are compared with comes before them


def run(args: argparse.Namespace) -> int:
    check_output(args.json)
    check_output(args.markdown)
    if args.resume and args.json is None:
        raise UsageError("--resume goes with --json")
    check_distinct(args.drafters or (), "--drafters")
    texts = _texts(args)
    larger, tokenizer = load_target(args)
    name = args.model or str(demo_folder("--model") / "models" / "target")
    names = args.drafters or default_names()
    sizes = (args.limit, 0, max_prompt_len(args, larger), args.max_new_tokens)
    data = [DataSet.of(kind, requests, tokenizer, *sizes) for kind, requests in texts.items()]
    report = _new_report(args, larger, list(texts))
    if args.resume and args.json.exists():
        report = resumed(args.json, report)
    console = make_console()
    try:
        _measure(args, name, names, larger, data, report)
    finally:  # interrupted, what was measured so far is still worth reading
        _show(args, report, console)
    return 1 if any(row["num_different"] for row in report["rows"]) else 0


def _texts(args: argparse.Namespace) -> dict[str, list[Texts]]:
    """Requests by kind: the demo's categories, or files."""
    if args.files:
        return _chosen(
            args, {path.name.partition(".")[0]: read_requests(path, Fields(), None, False) for path in args.files}
        )
    texts: dict[str, list[Texts]] = {}
    for row in read_prompts(demo_folder(*missing_arguments(args)) / "prompts.jsonl"):
        texts.setdefault(row["category"], []).append(Texts([row["prompt"]], ""))
    return _chosen(args, texts)


def _chosen(args: argparse.Namespace, texts: dict[str, list[Texts]]) -> dict[str, list[Texts]]:
    if unknown := set(args.kinds or ()) - set(texts):
        raise UsageError(f"--kinds: no {sorted(unknown)} among {sorted(texts)}")
    return {kind: texts[kind] for kind in args.kinds or texts}


def default_names() -> list[str]:
    """Suffix trees, the demo's trained drafters, and lists of suffix trees and each of these."""
    demo = find_demo()
    folders = sorted((demo / "models").iterdir()) if demo else []
    found = [folder for folder in folders if (folder / "config.json").is_file() and folder.name != "target"]
    trained = [str(folder) for folder in sorted(found, key=lambda folder: folder.name != _REFERENCE)]
    return ["suffix", *trained, *(f"suffix{JOINT}{name}" for name in trained)]


def _new_report(args: argparse.Namespace, larger: PreTrainedModel, kinds: list[str]) -> dict[str, Any]:
    """What has another environment cannot be gone on with."""
    names = ("nodes", "width", "limit", "max_new_tokens", "max_prompt", "repetitions", "quantize", "model")
    conditions = {name: getattr(args, name) for name in names} | {"files": [str(path) for path in args.files]}
    sizes = {"parameters": larger.num_parameters(), "is_enlarged": bool(num_parameters(args))}
    return {
        "command": command_of(args) | {"markdown": str(args.markdown), "kinds": kinds},
        "environment": environment(larger.device, larger.dtype) | conditions | sizes,
        "is_smoke": False,
        "drafters": {},
        "reference": "",
        "rows": [],
    }


def _measure(
    args: argparse.Namespace,
    name: str,
    names: Sequence[str],
    larger: PreTrainedModel,
    data: Sequence[DataSet],
    report: dict[str, Any],
) -> None:
    """Fills in the report, which is written after each kind of text."""
    bench = DrafterBench(Rows(report["rows"]), args.max_new_tokens, args.nodes, args.width, args.repetitions)
    small = _as_it_is(larger, load_model(name, "float32", args.device))
    drafters = load_drafters(names, DrafterFiles(small))
    report["drafters"] |= {item.name: item.num_parameters for item in drafters}
    models = [item.name for item in drafters if isinstance(item.assistant, PreTrainedModel)]
    report["reference"] = report["reference"] or next(iter(models), "")
    parts: list[Iterable[None]] = []
    if STEPS in args.parts:
        parts.append(bench.steps(small, drafters, data))
    if TREES in args.parts:
        heads = {item.name: item.assistant for item in drafters if isinstance(item.assistant, MedusaHeads)}
        parts.append(bench.trees(small, heads, data))
    if SPEED in args.parts:
        own = _as_it_is(larger, load_model(name, args.dtype, args.device))
        parts.append(bench.speed(larger, _for_larger(args, names, own, larger), data, args.batch_size))
    with track(desc="measuring", unit=" parts") as progress:
        for _ in chain.from_iterable(parts):
            progress.update()
            if args.json:
                replace_json(args.json, report)


def _for_larger(
    args: argparse.Namespace, names: Sequence[str], own: PreTrainedModel, larger: PreTrainedModel
) -> list[Drafter]:
    return load_drafters(names, DrafterFiles(own, larger if num_parameters(args) else None))


def _as_it_is(larger: PreTrainedModel, small: PreTrainedModel) -> PreTrainedModel:
    """Greedy and nothing else, as the larger one has been made."""
    small.generation_config = copy.deepcopy(larger.generation_config)
    return small


def _show(args: argparse.Namespace, report: dict[str, Any], console: Console) -> None:
    if not report["rows"]:
        return
    found = tables(report["rows"], report)
    for lines in found:
        print_lines(console, lines)
    console.print(notes(report), style="dim", markup=False, highlight=False)
    if args.json:
        replace_json(args.json, report)
    if args.markdown:
        args.markdown.write_text(f"{as_markdown(found)}\n{notes(report)}\n", encoding="utf-8")
