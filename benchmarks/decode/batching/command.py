"""`python -m benchmarks batching`: `generate_batch`, and transformers' server, by themselves and with an assistant."""

import argparse
from collections.abc import Iterator
from functools import partial
from typing import Any

from hf_smartspec.commands.common.arguments import UsageError
from hf_smartspec.commands.common.names import WITH_DRAFT_MODEL
from hf_smartspec.commands.common.outputs import check_outputs
from hf_smartspec.commands.common.setup import Setup

from ...kit import ways
from ...kit.claims import Claim
from ...kit.models import described, new_setup
from ...kit.session import Case, Section, new_session, print_head
from ...kit.tables import Column, Rows
from .serving import PLAIN, check_can_be_saved, servers

_SERVER_COLUMNS = (
    Column("seconds", "seconds", "{:.1f}"),
    Column("tokens / s", "tokens_per_second", "{:.1f}"),
    Column("speed-up", ways.speed_up, "{:.2f}"),
    Column("median latency, s", "median_latency", "{:.2f}"),
    Column("as asked", lambda row, _: f"{row['as_asked']} / {row['num_checked']}"),
)
_AS_ASKED = (
    "as asked: answers that are those of `generate` with the request's own temperature, seed and stop strings. By "
    "itself, the server applies the first request's to all, and stops nowhere else: it generates other and more "
    "tokens: the speed-up is that of tokens per second."
)


def run(args: argparse.Namespace) -> int:
    check_outputs(args)
    if args.plot:
        raise UsageError("--plot: there is nothing to be drawn")
    if args.replay:
        raise UsageError("--replay: transformers' continuous batching cannot be made to say what was recorded")
    if args.assistant in WITH_DRAFT_MODEL and args.serve:
        raise UsageError(f"--serve: the server drafts with presets, not with {args.assistant!r}")
    setup = new_setup(args, [args.assistant], "--assistant").shuffled()
    if args.serve:
        check_can_be_saved(setup.model)
    model = setup.model
    session = new_session(args, model.device, model.dtype, {"parameters": model.num_parameters()}, ("serve",))
    sections = [_generate_batch(args, setup)]
    if args.serve:
        sections.append(_serve(args, setup))
    about = f"{described(args, model)}; repetitions in turns, medians"
    return session.run(sections, print_head(session, "batching", about))


def _generate_batch(args: argparse.Namespace, setup: Setup) -> Section:
    """Return `generate_batch` without and with an assistant, in turns; suffix trees know no prompt beforehand."""
    options: dict[str, Any] = {"max_requests_per_batch": setup.max_batch_size}
    found = [ways.continuous(**options), ways.assisted(args.assistant, **options)]

    def cases() -> Iterator[Case]:
        ways.warm_up(found, setup)
        for way in found:
            yield Case(way.name, partial(way.measure, setup))

    def claims(rows: Rows) -> list[Claim]:
        different = max(len(row["checksums"]) - ways.num_same(row, rows) for row in rows.values())
        text = "generate_batch returns the same tokens with an assistant"
        return [Claim(text, not different, f"{different} differ" if different else "")]

    return Section(
        "generate_batch", cases, ways.COLUMNS, "generate_batch", "assistant", turns=args.repetitions,
        summary=ways.summary, claims=claims if args.dtype == "float32" else lambda rows: (),
    )  # fmt: skip


def _serve(args: argparse.Namespace, setup: Setup) -> Section:
    def claims(rows: Rows) -> list[Claim]:
        text = "the server answers every request as `generate` does with its own settings"
        own = [row for name, row in rows.items() if name != PLAIN]
        return [Claim(text, row["as_asked"] == row["num_checked"]) for row in own]

    return Section(
        "serve", lambda: servers(setup, args), _SERVER_COLUMNS, "transformers serve --continuous-batching", "assistant",
        claims=claims if args.dtype == "float32" else lambda rows: (), note=_AS_ASKED,
    )  # fmt: skip
