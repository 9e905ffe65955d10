"""`python -m benchmarks memory`: costs of suffix trees and datastores as they grow."""

import argparse
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from hf_smartspec.candidates.text.suffix.source import MOST_BYTES
from hf_smartspec.commands.common.arguments import UsageError
from hf_smartspec.commands.common.console import track
from hf_smartspec.commands.common.outputs import check_outputs
from hf_smartspec.commands.common.recordings import Fields, read_requests, tokenize

from ...kit.claims import Claim
from ...kit.models import choose_model, files_of, tokenizer_of
from ...kit.plots import Panel, plot_lines
from ...kit.session import Case, Section, new_session, print_head
from ...kit.tables import Column, Row, Rows, lines_of, print_lines
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

_TREE, _EVICTION, _DATASTORE = "suffix tree", "eviction", "datastore"


def run(args: argparse.Namespace) -> int:
    check_outputs(args)
    choose_model(args)
    session = new_session(args, free=["tokens"])
    stream = _stream(args)
    text = {"outputs": stream.num_outputs, "tokens": stream.num_tokens, "held_out": len(stream.held_out)}
    session.report["text"] = text
    num_rows, console = len(stream.held_out), print_head(session, "memory")
    sections = [
        Section(
            _TREE, partial(_sizes, stream, args.tokens), _columns(num_rows),
            show=partial(_show_tree, num_rows, args.project),
        ),
        Section(
            _EVICTION, lambda: [Case(_EVICTION, partial(measure_eviction, stream, args.max_bytes))],
            show=_show_eviction, claims=_claims,
        ),
    ]  # fmt: skip
    if args.datastore_tokens:
        case = Case(_DATASTORE, partial(_datastore, stream, args.datastore_tokens))
        sections.append(Section(_DATASTORE, lambda: [case], show=partial(_show_datastore, num_rows)))
    try:
        return session.run(sections, console)
    finally:
        console.print(
            f"[dim]{text['outputs']} real outputs of {text['tokens']:,} tokens, repeated with every tenth token "
            "replaced. Insert and remove: per token of the newest and oldest outputs. Draft: median call after every "
            f"token of {num_rows} held-out requests, up to {NUM_NODES} nodes per row, the last token taken in.[/dim]",
            highlight=False,
        )
        if args.plot and session.rows(_TREE):
            plot(list(session.rows(_TREE).values()), num_rows, args.plot)


def _sizes(stream: TextStream, sizes: Iterable[int]) -> Iterator[Case]:
    """Yield the sizes of one tree, which grows from case to case."""
    in_order = sorted(set(sizes))
    probe = TreeProbe(stream, in_order[-1])
    for size in in_order:
        yield Case(f"{size:,}", partial(probe.measure, size))


def _datastore(stream: TextStream, num_tokens: int) -> Row:
    with tempfile.TemporaryDirectory() as folder:
        return measure_datastore(stream, num_tokens, Path(folder) / "datastore")


def _columns(num_rows: int) -> list[Column]:
    return [
        Column("insert", "insert_us_per_token", "{:.2f}"),
        Column("bytes", "bytes_per_token", "{:.1f}"),
        Column("draft", "draft_us", "{:.1f}"),
        Column("drafted", "drafted", "{:.2f}"),
        Column(f"draft, {num_rows} rows", "batch_draft_us", "{:.0f}"),
        Column("per row", "batch_draft_us_per_row", "{:.2f}"),
        Column("drafted", "batch_drafted", "{:.2f}"),
        Column("remove", "remove_us_per_token", "{:.2f}"),
    ]


def _show_tree(num_rows: int, projected: int, console: Console, rows: Rows) -> None:
    columns, found = _columns(num_rows), list(rows.values())
    lines = lines_of("Suffix tree, in microseconds; bytes per token", "tokens", columns, rows)
    ratios = [f"{found[-1][str(column.value)] / found[0][str(column.value)]:.2f}" for column in columns]
    last = [["last / first", *ratios]] if len(found) > 1 else []
    print_lines(console, lines._replace(rows=[*lines.rows, *last]))
    if found:
        console.print(
            f"The largest tree: {found[-1]['tokens']:,} tokens in {found[-1]['bytes']:,} bytes, added in "
            f"{found[-1]['fill_seconds']:.1f} s.",
            highlight=False,
        )
    if projected and found:
        num_bytes = projected * float(found[-1]["bytes_per_token"])
        console.print(
            f"Calculated: {projected:,} tokens take {num_bytes / 1e9:,.1f} GB; one source holds up to "
            f"{MOST_BYTES / 1e9:,.1f} GB.",
            highlight=False,
        )


def _show_eviction(console: Console, rows: Rows) -> None:
    for row in rows.values():
        console.print(
            f"Full at {row['max_bytes']:,} bytes ({row['tokens']:,} tokens): {row['replace_us_per_token']:.2f} "
            f"microseconds to add a token and to forget another; the most in use were {row['largest_bytes']:,} bytes.",
            highlight=False,
        )


def _claims(rows: Rows) -> list[Claim]:
    return [Claim(f"the bound of {row['max_bytes']:,} bytes holds", row["holds"]) for row in rows.values()]


def _show_datastore(num_rows: int, console: Console, rows: Rows) -> None:
    for row in rows.values():
        console.print(
            f"Datastore of {row['tokens']:,} tokens: built in {row['build_seconds']:.1f} s, "
            f"{row['bytes'] / 1e6:.1f} MB; microseconds per draft: {row['draft_us']:.1f} for one row, "
            f"{row['batch_draft_us_per_row']:.2f} per row of {num_rows}.",
            highlight=False,
        )


def _stream(args: argparse.Namespace) -> TextStream:
    """
    Return the responses of all files, except for up to `BATCH_SIZE` requests from all parts of them, which are held
    out: at most half of those that are long enough.

    Raises:
        UsageError: if there are fewer than two of these.
    """
    tokenizer = tokenizer_of(args)
    requests = [item for path in files_of(args) for item in read_requests(path, Fields(), None)]
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


def plot(rows: Sequence[dict[str, Any]], num_rows: int, path: Path) -> None:
    """Draw every cost against the number of tokens."""
    panels = {
        "insert, µs per token": "insert_us_per_token",
        "remove, µs per token": "remove_us_per_token",
        "memory, bytes per token": "bytes_per_token",
        f"draft of {NUM_NODES} nodes, µs": "draft_us",
        f"draft for {num_rows} rows, µs per row": "batch_draft_us_per_row",
    }

    found = [
        Panel("", "tokens in the tree", label, {label: {row["tokens"]: row[key] for row in rows}}, is_log=True)
        for label, key in panels.items()
    ]
    plot_lines(path, found)
