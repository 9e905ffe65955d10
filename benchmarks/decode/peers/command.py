"""`python -m benchmarks peers`: other engines with the same weights on the same prompts, on the CPU."""

import argparse
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from transformers import PreTrainedModel

from hf_smartspec.candidates.heads.kinds import kind_of
from hf_smartspec.commands.common.arguments import PARAMETERS, UsageError, usage_errors
from hf_smartspec.commands.common.cost_matched import enlarge
from hf_smartspec.commands.common.models import demo_folder, load_draft, load_model, load_tokenizer

from ...kit.models import choose_model
from ...kit.session import new_session, print_head
from .known import PEERS
from .measuring import PeerBench
from .texts import Prompts

_MAX_PROMPT = 256  # tokens of a prompt, its end
_DEFAULTS = {
    "peers": list(PEERS),
    "parameters": PARAMETERS,
    "num_prompts": 4,
    "batch_sizes": [1, 8, 16],
    "max_new_tokens": 64,
    "repeats": 3,
}
_SMOKE = {
    "peers": [name for name in PEERS if name != "compiled"],  # which takes a minute to compile
    "parameters": 0,
    "num_prompts": 1,
    "batch_sizes": [1, 3],
    "max_new_tokens": 16,
    "repeats": 1,
}
_FREE = ("peers", "kinds", "texts", "batch_sizes", "python", "cache", "timeout")
_LEGEND = (
    "x plain: plain generate's seconds in the same precision by these, turn by turn. Tokens as float32: up to the "
    "first that is not that of plain generate in float32; rows: without any such token."
)


def run(args: argparse.Namespace) -> int:
    if not args.smoke:
        choose_model(args)
    if args.model and args.parameters is None:
        args.parameters = 0
    args.heads = [_heads(name, args) for name in args.heads]
    for name, value in (_SMOKE if args.smoke else _DEFAULTS).items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    torch.set_num_threads(args.threads)
    session = new_session(args, free=_FREE, peers={})
    name = Path(args.model).name if args.model else "the embedded target"
    size = f"{name} at {args.parameters / 1e6:.0f} M parameters" if args.parameters else f"{name} as it is"
    console = print_head(session, "peers", f"{size}, {args.max_new_tokens} new tokens; each has the threads")
    with PeerBench(args, session, partial(_models, args), _prompts(args)) as bench:
        try:
            return session.run(bench.sections(), console)
        finally:
            _print_end(console, session.report)


def _print_end(console: Console, report: dict[str, Any]) -> None:
    lines = [_LEGEND, *(f"{name}: {about}" for name, about in report["peers"].items())]
    lines += ["A trial run: the figures mean nothing."] * report["is_smoke"]
    console.print("\n".join(lines), style="dim", markup=False, highlight=False)


def _prompts(args: argparse.Namespace) -> Prompts:
    name = args.model or _embedded("target")
    tokenizer = load_tokenizer(name)
    if tokenizer is None:
        raise UsageError(f"--model: {name!r} has no tokenizer")
    files = args.prompts or [demo_folder() / ("real_prompts.jsonl" if args.model else "prompts.jsonl")]
    return Prompts.read([str(file) for file in files], tokenizer, _MAX_PROMPT)


def _heads(name: str, args: argparse.Namespace) -> str:
    """Return a learned drafter's hub id, or the path of its folder, which processes in other folders find."""
    if args.parameters:
        raise UsageError("--heads: they draft for a target as it is; leave it so with --parameters 0")
    with usage_errors("--heads"):
        if kind_of(name) is None:
            raise ValueError(f"{name!r} holds no learned drafter")
    return str(Path(name).absolute()) if Path(name).exists() else name


def _embedded(name: str) -> str:
    return str(demo_folder() / "models" / name)


def _models(args: argparse.Namespace, dtype: str) -> tuple[PreTrainedModel, PreTrainedModel | None]:
    """Return target and draft model; models that are not embedded have none but that of `--draft`."""
    target = load_model(args.model or _embedded("target"), dtype)
    name = args.draft or (None if args.model else _embedded("draft"))
    draft = load_draft(name, target, dtype) if name else None
    with usage_errors("--parameters", ValueError):
        return (enlarge(target, args.parameters) if args.parameters else target), draft
