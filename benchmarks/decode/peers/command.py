"""`python -m benchmarks peers`: other engines with the same weights on the same prompts, on the CPU."""

import argparse
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel

from hf_smartspec.commands.common.arguments import PARAMETERS, UsageError, command_of
from hf_smartspec.commands.common.console import make_console
from hf_smartspec.commands.common.cost_matched import enlarge
from hf_smartspec.commands.common.demo import demo_folder
from hf_smartspec.commands.common.models import left_padded, load_draft, load_model, load_tokenizer
from hf_smartspec.commands.common.outputs import check_output, replace_json, resumed
from hf_smartspec.commands.common.progress import track
from hf_smartspec.commands.common.timing import environment

from .environments import cache_folder
from .files import write_files
from .known import PEERS, Peer
from .measuring import Measuring, finish
from .processes import PeerError, PeerProcess
from .showing import print_end, print_rows
from .texts import Group, Prompts

_MAX_PROMPT = 256  # tokens of a prompt, its end
_REFERENCE_ROWS = 8  # at once
_DEFAULTS = {
    "peers": list(PEERS),
    "parameters": PARAMETERS,
    "texts": ["sql", "chat"],
    "num_prompts": 4,
    "batch_sizes": [1, 16],
    "max_new_tokens": 64,
    "repeats": 3,
}
_SMOKE = {
    "peers": [name for name in PEERS if name != "compiled"],  # which takes a minute to compile
    "parameters": 0,
    "texts": ["sql", "chat"],
    "num_prompts": 1,
    "batch_sizes": [1, 3],
    "max_new_tokens": 16,
    "repeats": 1,
}


def run(args: argparse.Namespace) -> int:
    if args.model and args.parameters is None:
        args.parameters = 0
    for name, value in (_SMOKE if args.smoke else _DEFAULTS).items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    check_output(args.json)
    torch.set_num_threads(args.threads)
    prompts = _prompts(args)
    groups = prompts.groups(args.texts, args.batch_sizes, args.num_prompts)
    report = _new_report(args)
    if args.resume and args.json.exists():
        report = resumed(args.json, report)
    console = make_console()
    try:
        _measure(args, report, prompts, groups)
    finally:  # interrupted, what was measured so far is still worth reading
        for kind, rows in report["results"].items():
            finish(rows)
            print_rows(console, kind, rows, report)
        replace_json(args.json, report)
        print_end(console, report, args.json)
    return int(bool(report["failures"]))


def _new_report(args: argparse.Namespace) -> dict[str, Any]:
    """What has another environment cannot be gone on with."""
    names = ("model", "draft", "parameters", "max_new_tokens", "num_prompts", "repeats")
    conditions = {name: getattr(args, name) for name in names}
    files = [str(file) for file in args.prompts or ()]
    return {
        "command": command_of(args) | {"prompts": files, "python": [f"{name}={file}" for name, file in args.python]},
        "environment": environment(torch.device("cpu"), torch.float32) | conditions | {"prompts": files},
        "is_smoke": args.smoke,
        "results": {},
        "peers": {},
        "failures": {},
    }


def _prompts(args: argparse.Namespace) -> Prompts:
    name = _named(args, "model")
    tokenizer = load_tokenizer(name)
    if tokenizer is None:
        raise UsageError(f"--model: {name!r} has no tokenizer")
    files = args.prompts or [demo_folder() / "prompts.jsonl"]
    return Prompts.read([str(file) for file in files], tokenizer, _MAX_PROMPT)


def _named(args: argparse.Namespace, kind: str) -> str:
    """The folder or hub id of the "model" or the "draft"."""
    embedded = {"model": "target", "draft": "draft"}[kind]
    return getattr(args, kind) or str(demo_folder() / "models" / embedded)


def _models(args: argparse.Namespace, dtype: str) -> tuple[PreTrainedModel, PreTrainedModel]:
    """Target and draft model."""
    target = load_model(_named(args, "model"), dtype)
    draft = load_draft(_named(args, "draft"), target, dtype)
    try:
        return (enlarge(target, args.parameters) if args.parameters else target), draft
    except ValueError as error:
        raise UsageError(f"--parameters: {error}") from error


def _measure(args: argparse.Namespace, report: dict[str, Any], prompts: Prompts, groups: list[Group]) -> None:
    asked = sorted({number for group in groups for call in group.calls for number in call})
    reference = _reference(args, [prompts.ids[number] for number in asked])
    numbers = {number: index for index, number in enumerate(asked)}  # only what is asked is handed on
    groups = [group._replace(calls=[[numbers[row] for row in call] for call in group.calls]) for group in groups]
    job = {
        "prompts": [prompts.ids[number] for number in asked],
        "num_tokens": args.max_new_tokens,
        "threads": args.threads,
    }
    pythons = _interpreters(args, report["failures"])
    for kind in args.kinds:
        with tempfile.TemporaryDirectory(prefix="smartspec-peers-") as folder, ExitStack() as stack:
            peers = {name: PEERS[name] for name in pythons if kind in PEERS[name].kinds}
            job |= {"kind": kind, "files": _files(args, kind, peers, Path(folder))}
            processes = {}
            for name, peer in track(list(peers.items()), desc=f"{kind}: loading"):
                process = _started(name, peer, pythons[name], job, Path(folder) / name, args.timeout, report)
                if process:
                    processes[name] = process
                    stack.callback(process.close)
            _measure_kind(args, kind, processes, reference, groups, report)


def _measure_kind(
    args: argparse.Namespace,
    kind: str,
    processes: dict[str, PeerProcess],
    reference: list[list[int]],
    groups: list[Group],
    report: dict[str, Any],
) -> None:
    failed: dict[str, str] = {}
    rows = report["results"].setdefault(kind, {})

    def done(name: str) -> None:
        progress.update()
        report["failures"].pop(f"{kind}: {name}", None)  # of an earlier run
        report["failures"] |= {f"{kind}: {name}": reason for name, reason in failed.items()}
        replace_json(args.json, report)

    measuring = Measuring(processes, reference, args.repeats, rows, failed, done)
    with track(total=measuring.num_calls(groups), desc=f"{kind}: measuring") as progress:
        measuring.run(groups)


@torch.no_grad()
def _reference(args: argparse.Namespace, prompts: list[list[int]]) -> list[list[int]]:
    """New tokens of every prompt by transformers' plain `generate` in float32, beyond ends of sequence."""
    model, _ = _models(args, "float32")
    model.generation_config = GenerationConfig(pad_token_id=0)
    found = []
    for first in track(range(0, len(prompts), _REFERENCE_ROWS), desc="the tokens to compare with"):
        inputs = left_padded(prompts[first : first + _REFERENCE_ROWS], 0, model.device)
        output: Any = model.generate(**inputs, max_new_tokens=args.max_new_tokens, do_sample=False)
        found += output[:, inputs["input_ids"].shape[1] :].tolist()
    return found


def _interpreters(args: argparse.Namespace, failures: dict[str, str]) -> dict[str, Path]:
    """Of every peer that can be had here."""
    found, given = {}, dict(args.python)
    for name in track(args.peers, desc="making environments"):
        failures.pop(name, None)
        try:
            found[name] = given.get(name) or PEERS[name].python(name, (args.cache or cache_folder()).absolute())
        except (PeerError, OSError) as error:
            failures[name] = str(error)
    return found


def _files(args: argparse.Namespace, kind: str, peers: dict[str, Peer], folder: Path) -> dict[str, str]:
    models = _models(args, "bfloat16" if kind == "int8" else kind)
    return write_files(*models, {file for peer in peers.values() for file in peer.files}, kind, folder / "files")


def _started(
    name: str, peer: Peer, python: Path, job: dict[str, Any], folder: Path, timeout: float, report: dict[str, Any]
) -> PeerProcess | None:
    """None if it cannot load the model: the others go on."""
    key = f"{job['kind']}: {name}"
    report["failures"].pop(key, None)
    try:
        process = PeerProcess(python, f"runners.{peer.runner}", job | {"settings": peer.settings}, folder, timeout)
    except PeerError as error:
        report["failures"][key] = str(error)
        return None
    report["peers"][name] = process.about
    return process
