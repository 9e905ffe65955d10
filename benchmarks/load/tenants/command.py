"""`python -m benchmarks tenants`: the effect of one tenant of a server on the others' latency."""

import argparse
import asyncio
from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from hf_smartspec.commands.common.arguments import UsageError
from hf_smartspec.commands.common.console import track
from hf_smartspec.commands.common.models import demo_folder, read_prompts

from ...kit.claims import Claim
from ...kit.models import choose_model
from ...kit.session import Case, Section, new_session, print_head
from ...kit.tables import Column, Row, Rows, lines_of, print_lines

_ALL = "all"
_KEYS = ("p50_alone", "p99_alone", "p50_attacked", "p99_attacked")
_TITLES = ("p50 alone", "p99", "p50 attacked", "p99")
_COLUMNS = (
    Column("requests", "requests"),
    *(Column(title, key, "{:.3f}") for title, key in zip(_TITLES, _KEYS)),
    Column("ratio", "ratio", "{:.2f}"),
)
_CAPTION = "ratio: p99 beside the attacker by p99 without it; all: of the other tenants' requests together"
_WARM_UP = 3  # requests of each tenant, beforehand


def run(args: argparse.Namespace) -> int:
    choose_model(args)
    session = new_session(args)
    if args.tenants < 2:
        raise UsageError("--tenants: one attacks and the others are measured, so there must be at least 2")
    if missing := [name for name in ("fastapi", "uvicorn", "openai") if find_spec(name) is None]:
        raise UsageError(f'{", ".join(missing)} not installed: pip install "hf-smartspec[serve]"')
    if args.model is None:
        demo_folder("--model")
    if args.prompts:
        read_prompts(args.prompts)  # refuses what cannot be read
    case = Case("tenants", lambda: asyncio.run(_measure(args)))
    section = Section("tenants", lambda: [case], show=_show, claims=partial(_claims, args), note=_CAPTION)
    return session.run([section], print_head(session, "tenants", _about(args)))


def _show(console: Console, rows: Rows) -> None:
    for row in rows.values():
        print_lines(console, lines_of("Seconds per request", "tenant", _COLUMNS, row["tenants"]))
        console.print(f"Answers to the attacker by status: {row['statuses'] or 'none yet'}", highlight=False)


def _claims(args: argparse.Namespace, rows: Rows) -> Iterator[Claim]:
    for row in rows.values():
        ratio, num_wrong = row["tenants"][_ALL]["ratio"], row["num_wrong"]
        yield Claim(f"The others' p99 is at most {args.most:g} times that alone", ratio <= args.most, f"{ratio:.2f}")
        if args.dtype == "float32":
            yield Claim("Their answers are the same", not num_wrong, f"{num_wrong} differ")


def _about(args: argparse.Namespace) -> str:
    what = {"prompts": "one request with 1,024 prompts", "streams": "20 streams with n=4 and log-probabilities"}
    model = "the embedded target" if args.model is None else Path(args.model).name
    return (
        f"{model}: {args.tenants - 1} tenants with short requests, and one that sends "
        f"{' and '.join(what[name] for name in args.attack)}, of {args.attack_tokens} tokens each."
    )


async def _measure(args: argparse.Namespace) -> Row:
    from .clients import ask_all, attacked
    from .server import tenant_server

    with tenant_server(args) as server, track(total=2, desc="asking", unit=" rounds") as progress:
        await ask_all(server, args, _WARM_UP)
        alone = await ask_all(server, args, args.requests)
        progress.update()
        async with attacked(server, args) as statuses:
            beside = await ask_all(server, args, args.requests)
            found = dict(statuses)
        progress.update()
    rows = {
        f"{number + 1}": _row(first.seconds, second.seconds)
        for number, (first, second) in enumerate(zip(alone, beside))
    }
    rows[_ALL] = _row(*(np.concatenate([item.seconds for item in part]) for part in (alone, beside)))
    num_wrong = sum(
        text != other for first, second in zip(alone, beside) for text, other in zip(first.texts, second.texts)
    )
    return {"tenants": rows, "statuses": found, "num_wrong": num_wrong}


def _row(alone: Any, attacked: Any) -> Row:
    quantiles = [float(value) for part in (alone, attacked) for value in np.quantile(part, [0.5, 0.99])]
    return {"requests": len(alone), **dict(zip(_KEYS, quantiles)), "ratio": quantiles[3] / quantiles[1]}
