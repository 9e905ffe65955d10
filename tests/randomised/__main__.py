"""
Many rounds, as `python -m tests.randomised --requests 10000 --output rounds.jsonl`: every difference is shown as it is
found, with the seed of its round, which `--round SEED` plays again. Started again with the same file, it goes on from
there. Ends with 1 if anything differs, or a kind of drafter was never right.
"""

import argparse
import json
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import torch

from . import kinds, targets
from .outcome import Outcome
from .rounds import play

_SECONDS = 20.0  # between two lines


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.randomised", description=__doc__)
    parser.add_argument("--requests", type=int, default=1000, metavar="N", help="default: 1000")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the first round (default: 0)")
    parser.add_argument("--round", type=int, metavar="SEED", help="play this round only")
    for option, whose in (("--kinds", "drafters"), ("--targets", "models")):
        help_ = f"names of {whose}, or of groups of them (default: all; an unknown name shows them)"
        parser.add_argument(option, metavar="NAME,...", help=help_)
    parser.add_argument("--output", type=Path, metavar="FILE", help="one line of JSON per round; gone on from")
    args = parser.parse_args()
    models = _named(parser, args.targets, targets.ARCHITECTURES, targets.GROUPS)
    asked = _named(parser, args.kinds, kinds.KINDS, kinds.GROUPS)
    drafters = [name for name in asked if not set(kinds.KINDS[name].architectures).isdisjoint(models)]
    if not drafters:
        parser.error("none of these drafters drafts for one of these models")
    torch.set_num_threads(1)
    total = play(args.round, drafters, models) if args.round is not None else _many(args, drafters, models)
    print(total, *total.ties, *total.faults, sep="\n")
    idle = total.idle(drafters) if args.round is None else []
    if idle:
        print(f"never right: {', '.join(idle)}")
    return 1 if total.faults or idle else 0


def _named(
    parser: argparse.ArgumentParser, asked: str | None, known: Collection[str], groups: Mapping[str, Sequence[str]]
) -> list[str]:
    """Return the names that are asked for, those of groups one by one; all names where none is."""
    if asked is None:
        return list(known)
    found = [name for item in asked.split(",") for name in groups.get(item, [item])]
    if unknown := set(found) - set(known):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; known are {', '.join([*known, *groups])}")
    return list(dict.fromkeys(found))


def _many(args: argparse.Namespace, drafters: list[str], models: list[str]) -> Outcome:
    total, seed = Outcome(args.seed), args.seed
    if args.output is not None and args.output.exists():
        for line in args.output.read_text().splitlines():
            known = Outcome.of_dict(json.loads(line))
            total, seed = total + known, max(seed, known.seed + 1)
    shown = time.monotonic()
    while total.counts["requests"] < args.requests:
        outcome = play(seed, drafters, models)
        total, seed = total + outcome, seed + 1
        if args.output is not None:
            with args.output.open("a") as file:
                file.write(json.dumps(outcome.as_dict()) + "\n")
        for line in outcome.ties + outcome.faults:
            print(line, flush=True)
        if time.monotonic() - shown > _SECONDS:
            shown = time.monotonic()
            print(f"{total.counts['requests']:,} of {args.requests:,} requests", flush=True)
    return total


if __name__ == "__main__":
    raise SystemExit(main())
