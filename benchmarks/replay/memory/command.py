"""`python -m benchmarks memory`: what suffix trees and datastores cost as they grow."""

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.markup import escape

from hf_smartspec.commands.common.arguments import UsageError
from hf_smartspec.commands.common.console import make_console, table
from hf_smartspec.commands.common.demo import demo_folder
from hf_smartspec.commands.common.figures import draw, from_zero
from hf_smartspec.commands.common.outputs import check_outputs, write_json
from hf_smartspec.commands.common.progress import track
from hf_smartspec.commands.common.recordings import Fields, read_requests, tokenize, tokenizer_of
from hf_smartspec.commands.common.timing import environment

from .runs import (
    BATCH_SIZE,
    HELD_OUT_LEN,
    NUM_NODES,
    TextStream,
    TreeProbe,
    measure_datastore,
    measure_eviction,
)

_MAX_PROMPT = 512
_CHUNK = 1000  # texts tokenised at a time

# Heading, key, format.
_COLUMNS = (
    ("insert", "insert_us_per_token", ".2f"),
    ("bytes", "bytes_per_token", ".1f"),
    ("draft", "draft_us", ".1f"),
    ("drafted", "drafted", ".2f"),
    ("draft, {} rows", "batch_draft_us", ".0f"),
    ("per row", "batch_draft_us_per_row", ".2f"),
    ("drafted", "batch_drafted", ".2f"),
    ("remove", "remove_us_per_token", ".2f"),
)


def run(args: argparse.Namespace) -> int:
    check_outputs(args)
    stream = _stream(args)
    console, report = make_console(), _empty_report(stream)
    try:
        probe = TreeProbe(stream)
        for size in track(sorted(set(args.tokens)), desc="suffix tree"):
            report["suffix_tree"].append(probe.measure(size))
        report["eviction"] = measure_eviction(stream, args.max_bytes)
        if args.datastore_tokens:
            with tempfile.TemporaryDirectory() as folder, track(desc="building a datastore"):
                report["datastore"] = measure_datastore(stream, args.datastore_tokens, Path(folder) / "datastore")
    finally:  # interrupted, what was measured so far is still worth reading
        _print(report, console)
        if args.json:
            write_json(args.json, report)
        if args.plot and report["suffix_tree"]:
            plot(report["suffix_tree"], len(stream.held_out), args.plot)
    return 0 if report["eviction"]["holds"] else 1


def _empty_report(stream: TextStream) -> dict[str, Any]:
    system = environment(torch.device("cpu"), torch.float32)
    text = {"outputs": stream.num_outputs, "tokens": stream.num_tokens, "held_out": len(stream.held_out)}
    return {"environment": system, "text": text, "suffix_tree": [], "eviction": None, "datastore": None}


def _stream(args: argparse.Namespace) -> TextStream:
    """
    The responses of all files, but those of up to `BATCH_SIZE` requests from everywhere in them, which are held out: at
    most half of those that are long enough.

    Raises:
        UsageError: if there are fewer than two of these.
    """
    files = args.files or [demo_folder("FILE", *([] if args.tokenizer else ["--tokenizer"])) / "prompts.jsonl"]
    requests = [item for path in files for item in read_requests(path, Fields(), None)]
    tokenizer = tokenizer_of(args.tokenizer)
    responses: list[np.ndarray] = []
    for first in track(range(0, len(requests), _CHUNK), desc="tokenizing"):
        texts = [item.response for item in requests[first : first + _CHUNK]]
        encoded = tokenizer(texts, add_special_tokens=False, verbose=False).input_ids
        responses += [np.array(ids, np.int32) for ids in encoded]
    long = [index for index, response in enumerate(responses) if len(response) >= HELD_OUT_LEN]
    if len(long) < 2:
        raise UsageError(f"the files hold {len(long)} responses of at least {HELD_OUT_LEN} tokens; two are needed")
    num_held_out = min(BATCH_SIZE, len(long) // 2)
    held_out = {long[index * len(long) // num_held_out] for index in range(num_held_out)}
    rest = [response for index, response in enumerate(responses) if index not in held_out]
    return TextStream(rest, tokenize([requests[index] for index in sorted(held_out)], tokenizer, _MAX_PROMPT))


def _print(report: dict[str, Any], console: Console) -> None:
    text = report["text"]
    if rows := report["suffix_tree"]:
        lines = table(
            "Suffix tree, in microseconds; bytes per token",
            "tokens",
            *(name.format(text["held_out"]) for name, _, _ in _COLUMNS),
        )
        for row in rows:
            lines.add_row(f"{row['tokens']:,}", *(format(row[key], form) for _, key, form in _COLUMNS))
        if len(rows) > 1:
            ratios = {key: rows[-1][key] / rows[0][key] for _, key, _ in _COLUMNS}
            lines.add_section()
            lines.add_row("last / first", *(f"{ratio:.2f}" for ratio in ratios.values()))
        console.print(lines)
    if found := report["eviction"]:
        console.print(
            f"Full at {found['max_bytes']:,} bytes ({found['tokens']:,} tokens): {found['replace_us_per_token']:.2f} "
            "microseconds to add a token and to forget another; the most in use were "
            f"{found['largest_bytes']:,} bytes, so the bound {'holds' if found['holds'] else 'is BROKEN'}.",
            highlight=False,
        )
    if found := report["datastore"]:
        console.print(
            f"Datastore of {found['tokens']:,} tokens: built in {found['build_seconds']:.1f} s, "
            f"{found['bytes'] / 1e6:.1f} MB; microseconds per draft: {found['draft_us']:.1f} for one row, "
            f"{found['batch_draft_us_per_row']:.2f} per row of {text['held_out']}.",
            highlight=False,
        )
    console.print(
        f"[dim]{text['outputs']} real outputs of {text['tokens']:,} tokens, repeated with every tenth token replaced. "
        "Insert and remove: per token of the newest and oldest outputs. Draft: median call behind every token of "
        f"{text['held_out']} held-out requests, up to {NUM_NODES} nodes per row, the last token taken in. "
        f"{escape(str(report['environment']))}[/dim]",
        highlight=False,
    )


def plot(rows: Sequence[dict[str, Any]], num_rows: int, path: Path) -> None:
    """Every cost against the number of tokens."""
    panels = {
        "insert, µs per token": "insert_us_per_token",
        "remove, µs per token": "remove_us_per_token",
        "memory, bytes per token": "bytes_per_token",
        f"draft of {NUM_NODES} nodes, µs": "draft_us",
        f"draft for {num_rows} rows, µs per row": "batch_draft_us_per_row",
    }

    def paint(figure: Any, axes: list[Any]) -> None:
        for axis, (label, key) in zip(axes, panels.items()):
            axis.plot([row["tokens"] for row in rows], [row[key] for row in rows], marker="o")
            axis.set_xscale("log")
            from_zero(axis)
            axis.set_xlabel("tokens in the tree")
            axis.set_ylabel(label)
            axis.grid(alpha=0.3)

    draw(path, len(panels), paint)
