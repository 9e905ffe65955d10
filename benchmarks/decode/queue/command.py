"""`python -m benchmarks queue`: an offline queue of prompts, against transformers' static and continuous batches."""

import argparse
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from hf_smartspec.commands.common.arguments import usage_errors
from hf_smartspec.commands.common.outputs import check_outputs
from hf_smartspec.commands.common.setup import Setup
from hf_smartspec.prepare.sources import resolve

from ...kit import ways
from ...kit.claims import Claim
from ...kit.models import described, new_setup
from ...kit.plots import plot_bars
from ...kit.session import Case, Section, new_session, print_head
from ...kit.sources import sources_by_name
from ...kit.tables import Rows
from ...kit.ways import Way

_NAME = "queue"


def run(args: argparse.Namespace) -> int:
    check_outputs(args)
    # In random order: one data set after the other would hide how ragged batches are.
    option = "--assistant, --static" if args.static else "--assistant"
    setup = new_setup(args, [*args.assistant, *args.static], option).shuffled()
    for source in args.static if "table" in args.lengths else ():
        with usage_errors("--lengths"):
            resolve(replace(sources_by_name([source], setup)[source](), policy="table"), setup.model)
    model, free = setup.model, ("assistant", "skip", "repetitions", "static", "lengths")
    session = new_session(args, model.device, model.dtype, {"parameters": model.num_parameters()}, free)
    console = print_head(session, _NAME, f"{described(args, model)}, {len(setup.prompts)} prompts")
    try:
        return session.run([_section(args, setup)], console)
    finally:
        if args.plot and (rows := session.rows(_NAME)):
            speed = {name: row["tokens_per_second"] for name, row in rows.items()}
            plot_bars(args.plot, speed, "tokens per second")


def _section(args: argparse.Namespace, setup: Setup) -> Section:
    found = _ways(args)

    def cases() -> Iterator[Case]:
        ways.warm_up(found, setup)
        for way in found:
            yield Case(way.name, partial(way.measure, setup))

    def claims(rows: Rows) -> list[Claim]:
        """Claim in float32 that all outputs are the same, except for `generate_batch`, which cannot replay."""
        if args.dtype != "float32" or (args.replay and next(iter(rows)) == ways.CONTINUOUS):
            return []
        different = {name: len(row["checksums"]) - ways.num_same(row, rows) for name, row in rows.items()}
        return [Claim(f"{name} gives the first one's outputs", not num, f"{num} differ" if num else "")
                for name, num in different.items() if name != ways.CONTINUOUS]  # fmt: skip

    note = "" if args.dtype == "float32" else ways.HALF_PRECISION
    return Section(
        _NAME, cases, ways.COLUMNS, "An offline queue", "way", turns=args.repetitions, summary=ways.summary,
        claims=claims, note=note,
    )  # fmt: skip


def _ways(args: argparse.Namespace) -> list[Way]:
    hint = "; to measure the other ways, give --skip continuous"
    own = {"static": ways.static(), "continuous": ways.continuous(hint)}
    drafted = [ways.static_with_drafts(source, length) for source in args.static for length in args.lengths]
    kept = [way for name, way in own.items() if name not in args.skip]
    return [*kept, *drafted, *map(ways.engine, args.assistant)]
