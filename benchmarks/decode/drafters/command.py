"""`python -m benchmarks drafters`: what learned drafters yield on each kind of text, alone and with suffix trees."""

import argparse
import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from rich.console import Console
from transformers import PreTrainedModel

from hf_smartspec.candidates import BlockDrafter, MedusaHeads
from hf_smartspec.commands.common.arguments import UsageError
from hf_smartspec.commands.common.drafters import DrafterFiles, load_drafters
from hf_smartspec.commands.common.models import demo_folder, find_demo, load_model, read_prompts
from hf_smartspec.commands.common.names import JOINT, check_distinct
from hf_smartspec.commands.common.outputs import check_output
from hf_smartspec.commands.common.recordings import DataSet, Fields, Texts, read_requests
from hf_smartspec.commands.common.setup import load_target, max_prompt_len, missing_arguments, num_parameters

from ...kit.claims import Claim
from ...kit.models import described
from ...kit.session import Case, Section, new_session, print_head
from ...kit.tables import Rows, as_markdown, print_lines
from .arguments import BLOCKS, PARTS, SPEED, STEPS, TREES
from .report import block_claims, notes, tables
from .runs import DrafterBench

_REFERENCE = "draft"  # what others are compared with comes before them


def run(args: argparse.Namespace) -> int:
    check_output(args.json)
    check_output(args.markdown)
    check_distinct(args.drafters or (), "--drafters")
    texts = _texts(args)
    larger, tokenizer = load_target(args)
    sizes = (args.limit, 0, max_prompt_len(args, larger), args.max_new_tokens)
    data = [DataSet.of(kind, requests, tokenizer, *sizes) for kind, requests in texts.items()]
    about = {"parameters": larger.num_parameters(), "is_enlarged": bool(num_parameters(args))}
    session = new_session(args, larger.device, larger.dtype, about, ("kinds", "parts", "batch_size"), drafters={})
    sections = _sections(args, larger, data, session.report)
    console = print_head(session, "drafters", described(args, larger))
    try:
        return session.run(sections, console)
    finally:  # all tables at once: some compare with what another part has measured
        _show(args, session.report, console)


def _sections(
    args: argparse.Namespace, larger: PreTrainedModel, data: Sequence[DataSet], report: dict[str, Any]
) -> list[Section]:
    bench = DrafterBench(args.max_new_tokens, args.nodes, args.width, args.repetitions)
    name, names = args.model or str(demo_folder("--model") / "models" / "target"), args.drafters or default_names()
    small = _as_it_is(larger, load_model(name, "float32", args.device))
    drafters = load_drafters(names, DrafterFiles(small))
    report["drafters"] |= {item.name: item.num_parameters for item in drafters}
    models = [item.name for item in drafters if isinstance(item.assistant, PreTrainedModel)]
    report["reference"] = next(iter(models), "")
    heads = {item.name: item.assistant for item in drafters if isinstance(item.assistant, MedusaHeads)}
    has_blocks = any(isinstance(item.assistant, BlockDrafter) for item in drafters)

    def blocks() -> Iterator[Case]:
        own = _as_it_is(larger, load_model(name, args.dtype, args.device))
        return bench.blocks(own, load_drafters(names, DrafterFiles(own)), data, args.batch_size, args.levels)

    def speed() -> Iterator[Case]:
        own = _as_it_is(larger, load_model(name, args.dtype, args.device))
        files = DrafterFiles(own, larger if num_parameters(args) else None)
        return bench.speed(larger, load_drafters(names, files), data, args.batch_size)

    cases: dict[str, Callable[[], Iterable[Case]]] = {
        STEPS: lambda: bench.steps(small, drafters, data),
        TREES: lambda: bench.trees(small, heads, data),
        BLOCKS: blocks,
        SPEED: speed,
    }
    parts = [part for part in PARTS if part in args.parts and (has_blocks or part != BLOCKS)]
    if not parts:
        raise UsageError(f"--parts {BLOCKS}: no block drafter is among --drafters")
    return [Section(part, cases[part], claims=claims, show=lambda *_: None) for part in parts]


def claims(rows: Rows) -> list[Claim]:
    items = [item for row in rows.values() for item in row["rows"]]
    different = sum(item["num_different"] for item in items)
    same = Claim("all outputs are those of plain generate", not different, f"{different} differ" if different else "")
    return [same, *block_claims(items)]


def _texts(args: argparse.Namespace) -> dict[str, list[Texts]]:
    """Return the requests by kind: the demo's categories, or files."""
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
    """Return suffix trees, the demo's trained drafters, and lists of suffix trees and each of these."""
    demo = find_demo()
    folders = sorted((demo / "models").iterdir()) if demo else []
    found = [folder for folder in folders if (folder / "config.json").is_file() and folder.name != "target"]
    trained = [str(folder) for folder in sorted(found, key=lambda folder: folder.name != _REFERENCE)]
    return ["suffix", *trained, *(f"suffix{JOINT}{name}" for name in trained)]


def _as_it_is(larger: PreTrainedModel, small: PreTrainedModel) -> PreTrainedModel:
    """Return the model with the generation config of the larger one, which is greedy."""
    small.generation_config = copy.deepcopy(larger.generation_config)
    return small


def _show(args: argparse.Namespace, report: dict[str, Any], console: Console) -> None:
    if not (found := tables(report)):
        return
    for lines in found:
        print_lines(console, lines)
    below = notes(report)
    console.print(below, style="dim", markup=False, highlight=False)
    if args.markdown:
        args.markdown.write_text(f"{as_markdown(found)}\n{below}\n", encoding="utf-8")
