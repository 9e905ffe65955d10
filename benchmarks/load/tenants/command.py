"""`python -m benchmarks tenants`: what one tenant of a server can do to the others."""

import argparse
import asyncio
from importlib.util import find_spec
from typing import Any

import numpy as np

from hf_smartspec.commands.common.arguments import UsageError, command_of
from hf_smartspec.commands.common.console import make_console, table
from hf_smartspec.commands.common.demo import demo_folder
from hf_smartspec.commands.common.outputs import check_output, write_json
from hf_smartspec.commands.common.progress import track

from ...kit.claims import Claim, exit_status, print_claims

_ALL = "all"
_COLUMNS = ("requests", "p50 alone", "p99", "p50 attacked", "p99", "ratio")
_CAPTION = "ratio: p99 beside the attacker by p99 without it; all: of the other tenants' requests together"
_WARM_UP = 3  # requests of each tenant, beforehand


def run(args: argparse.Namespace) -> int:
    check_output(args.json)
    if args.tenants < 2:
        raise UsageError("--tenants: one attacks and the others are measured, so there must be at least 2")
    if missing := [name for name in ("fastapi", "uvicorn", "openai") if find_spec(name) is None]:
        raise UsageError(f'{", ".join(missing)} not installed: pip install "hf-smartspec[serve]"')
    if args.model is None:
        demo_folder("--model")
    found = asyncio.run(_measure(args))
    console = make_console()
    console.print(f"[bold]benchmarks tenants[/bold] {_about(args)}\n", highlight=False)
    lines = table("Seconds per request", "tenant", *_COLUMNS)
    for name, row in found["tenants"].items():
        lines.add_row(name, f"{row['requests']}", *(f"{row[key]:.3f}" for key in _KEYS), f"{row['ratio']:.2f}")
    console.print(lines)
    console.print(_CAPTION, highlight=False)
    console.print(f"Answers to the attacker by status: {found['statuses'] or 'none yet'}", highlight=False)
    ratio, num_wrong = found["tenants"][_ALL]["ratio"], found["num_wrong"]
    claims = [Claim(f"The others' p99 is at most {args.most:g} times that alone", ratio <= args.most, f"{ratio:.2f}")]
    if args.dtype == "float32":
        claims.append(Claim("Their answers are the same", not num_wrong, f"{num_wrong} differ"))
    print_claims(claims, console)
    if args.json:
        write_json(args.json, {"command": command_of(args), **found})
    return exit_status(claims)


def _about(args: argparse.Namespace) -> str:
    what = {"prompts": "one request with 1,024 prompts", "streams": "20 streams with n=4 and log-probabilities"}
    return (
        f"{args.tenants - 1} tenants with short requests, and one that sends "
        f"{' and '.join(what[name] for name in args.attack)}, of {args.attack_tokens} tokens each."
    )


async def _measure(args: argparse.Namespace) -> dict[str, Any]:
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


_KEYS = ("p50_alone", "p99_alone", "p50_attacked", "p99_attacked")


def _row(alone: Any, attacked: Any) -> dict[str, Any]:
    quantiles = [float(value) for part in (alone, attacked) for value in np.quantile(part, [0.5, 0.99])]
    return {"requests": len(alone), **dict(zip(_KEYS, quantiles)), "ratio": quantiles[3] / quantiles[1]}
