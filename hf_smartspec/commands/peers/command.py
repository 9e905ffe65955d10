"""`smartspec bench peers`: other engines with the same weights on the same prompts, on the CPU."""

import argparse
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from transformers import PreTrainedModel

from ..common.arguments import PARAMETERS, command_of, number, positive, positive_number
from ..common.console import fold, make_console, table
from ..common.cost_matched import enlarge
from ..common.data_sets import DataSet
from ..common.demo import demo_folder
from ..common.models import UsageError, load_draft, load_model, load_tokenizer
from ..common.outputs import check_output, write_json
from ..common.progress import track
from ..common.recordings import Fields, read_requests
from ..common.timing import environment
from .environments import cache_folder
from .files import write_files
from .known import KINDS, PEERS, Peer
from .measuring import measure, rows_of
from .processes import PeerError, PeerProcess

_MAX_PROMPT = 256  # tokens of a prompt, its end
_REFERENCES = ("transformers", "smartspec")  # whose plain tokens the others' are compared with: the first that ran


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--peers", nargs="+", default=list(PEERS), choices=PEERS, metavar="NAME",
        help=f"of {', '.join(PEERS)} (default: all); llama.cpp is built from source the first time: minutes",
    )  # fmt: skip
    parser.add_argument(
        "--kinds", nargs="+", default=list(KINDS), choices=KINDS, metavar="KIND",
        help="of weights: float32, bfloat16, and int8, which is Q8_0 for those that read GGUF (default: all)",
    )  # fmt: skip
    parser.add_argument(
        "--parameters", type=number, default=PARAMETERS, metavar="N",
        help="of the embedded target, enlarged without a change of its output; 0 leaves it as it is (default: 2e+08)",
    )  # fmt: skip
    parser.add_argument("--prompts", type=Path, metavar="FILE", help="default: the demo's")
    parser.add_argument(
        "--num-prompts", type=positive, default=4, metavar="N", help="of these, decoded one by one (default: 4)"
    )
    parser.add_argument(
        "--batch-sizes", type=positive, nargs="+", default=[1, 16], metavar="B", help="rows at once (default: 1 16)"
    )
    parser.add_argument("--max-new-tokens", type=positive, default=64, metavar="N", help="of each (default: 64)")
    parser.add_argument(
        "--repeats", type=positive, default=3, metavar="N", help="turns, of which the median (default: 3)"
    )
    parser.add_argument("--threads", type=positive, default=2, metavar="N", help="everybody's (default: 2)")
    parser.add_argument(
        "--timeout", type=positive_number, default=600.0, metavar="S", help="for one answer of a peer (default: 600)"
    )
    parser.add_argument(
        "--cache", type=Path, metavar="FOLDER", help="for environments (default: ~/.cache/hf-smartspec/peers)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results to this file")


def run(args: argparse.Namespace) -> int:
    check_output(args.json)
    torch.set_num_threads(args.threads)
    console = make_console()
    models = {dtype: _models(args.parameters, dtype) for dtype in {_dtype(kind) for kind in args.kinds}}
    prompts = _prompts(args)
    failures: dict[str, str] = {}
    report: dict[str, Any] = {
        "command": command_of(args),
        "environment": environment(torch.device("cpu"), torch.float32),
        "parameters": next(iter(models.values()))[0].num_parameters(),
        "kinds": {},
        "failures": failures,
    }
    pythons = _interpreters(args, failures)
    try:
        for kind in args.kinds:
            with tempfile.TemporaryDirectory(prefix="smartspec-peers-") as folder:
                rows = _measure_kind(args, kind, models[_dtype(kind)], prompts, pythons, Path(folder), failures)
            report["kinds"][kind] = rows
            _print_kind(console, kind, rows, report["parameters"])
    finally:  # interrupted, what was measured so far is still worth reading
        if args.json:
            write_json(args.json, report)
    _print_end(console, report)
    return int(bool(failures))


def _dtype(kind: str) -> str:
    return "bfloat16" if kind == "int8" else kind


def _models(num_parameters: float, dtype: str) -> tuple[PreTrainedModel, PreTrainedModel]:
    """Target and draft model."""
    folder = demo_folder() / "models"
    target = load_model(str(folder / "target"), dtype)
    draft = load_draft(str(folder / "draft"), target, dtype)
    try:
        return (enlarge(target, num_parameters) if num_parameters else target), draft
    except ValueError as error:
        raise UsageError(f"--parameters: {error}") from error


def _prompts(args: argparse.Namespace) -> list[list[int]]:
    """As many as the largest batch has rows; where there are fewer, they come again."""
    folder = demo_folder()
    tokenizer, path = load_tokenizer(str(folder / "models" / "target")), args.prompts or folder / "prompts.jsonl"
    assert tokenizer is not None, "the demo's target has one"
    most = max(args.num_prompts, *args.batch_sizes)
    requests = read_requests(path, Fields(), None, needs_responses=False)
    found = DataSet.of(str(path), requests, tokenizer, most, 0, _MAX_PROMPT, args.max_new_tokens).prompts
    return [found[index % len(found)] for index in range(most)]


def _interpreters(args: argparse.Namespace, failures: dict[str, str]) -> dict[str, Path]:
    """Of every peer that can be had here."""
    found = {}
    for name in track(args.peers, desc="making environments"):
        try:
            found[name] = PEERS[name].python(name, (args.cache or cache_folder()).absolute())
        except (PeerError, OSError) as error:
            failures[name] = str(error)
    return found


def _measure_kind(
    args: argparse.Namespace,
    kind: str,
    models: tuple[PreTrainedModel, PreTrainedModel],
    prompts: list[list[int]],
    pythons: dict[str, Path],
    folder: Path,
    failures: dict[str, str],
) -> list[dict[str, Any]]:
    """Rows of the table of this kind of weights."""
    peers = {name: PEERS[name] for name in pythons if kind in PEERS[name].kinds}
    files = write_files(*models, {file for peer in peers.values() for file in peer.files}, kind, folder / "files")
    job = {
        "files": files,
        "kind": kind,
        "prompts": prompts,
        "num_tokens": args.max_new_tokens,
        "threads": args.threads,
        "batch_size": max(args.batch_sizes),
    }
    failed: dict[str, str] = {}
    with ExitStack() as stack:
        processes = {}
        for name, peer in track(list(peers.items()), desc=f"{kind}: loading"):
            with suppress(PeerError):
                processes[name] = _started(name, peer, pythons[name], job, folder / name, args.timeout, failed)
                stack.callback(processes[name].close)
        found = measure(processes, args.batch_sizes, args.num_prompts, args.max_new_tokens, args.repeats, failed)
    failures |= {f"{kind}, {name}": reason for name, reason in failed.items()}
    return rows_of(found, next((name for name in _REFERENCES if name in processes), ""))


def _started(
    name: str, peer: Peer, python: Path, job: dict[str, Any], folder: Path, timeout: float, failed: dict[str, str]
) -> PeerProcess:
    try:
        return PeerProcess(python, f"runners.{peer.runner}", job | {"settings": peer.settings}, folder, timeout)
    except PeerError as error:
        failed[name] = str(error)
        raise


def _print_kind(console: Console, kind: str, rows: Sequence[dict[str, Any]], num_parameters: int) -> None:
    title = f"Tokens per second, {kind}, {num_parameters / 1e6:.0f} M parameters"
    lines = table(title, "engine", "decoding", "batch", "tokens/s", "same tokens", num_text=2)
    for row in rows:
        same = "" if row["agreeing"] is None else f"{row['agreeing']} of {row['num_tokens']}"
        lines.add_row(row["peer"], row["way"], str(row["rows"]), f"{row['tokens_per_second']:.1f}", same)
    fold(lines, 1)
    console.print(lines)


def _print_end(console: Console, report: dict[str, Any]) -> None:
    for name, reason in report["failures"].items():
        console.print(f"[red]not measured[/red]: {escape(name)}: {escape(reason)}", highlight=False)
    console.print(f"[dim]{report['environment']}[/dim]", soft_wrap=True)
