"""
Many rounds, as `python -m tests.randomised --requests 10000 --output rounds.jsonl`: every difference is shown as it is
found, with the seed of its round, which `--round SEED` plays again. Started again with the same file, it goes on from
there. Ends with 1 if anything differs, or a kind of drafter was never right.
"""

import argparse
import json
import time
from pathlib import Path

import torch

from .kinds import KINDS
from .outcome import Outcome
from .rounds import play

_SECONDS = 20.0  # between two lines


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.randomised", description=__doc__)
    parser.add_argument("--requests", type=int, default=1000, metavar="N", help="default: 1000")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the first round (default: 0)")
    parser.add_argument("--round", type=int, metavar="SEED", help="play this round only")
    parser.add_argument("--kinds", default=",".join(KINDS), metavar="KIND,...", help="default: %(default)s")
    parser.add_argument("--output", type=Path, metavar="FILE", help="one line of JSON per round; gone on from")
    args = parser.parse_args()
    kinds = args.kinds.split(",")
    if unknown := set(kinds) - set(KINDS):
        parser.error(f"unknown kinds {sorted(unknown)}; known are {list(KINDS)}")
    torch.set_num_threads(1)
    total = play(args.round, kinds) if args.round is not None else _many(args, kinds)
    print(total, *total.ties, *total.faults, sep="\n")
    idle = total.idle(kinds) if args.round is None else []
    if idle:
        print(f"never right: {', '.join(idle)}")
    return 1 if total.faults or idle else 0


def _many(args: argparse.Namespace, kinds: list[str]) -> Outcome:
    total, seed = Outcome(args.seed), args.seed
    if args.output is not None and args.output.exists():
        for line in args.output.read_text().splitlines():
            known = Outcome.of_dict(json.loads(line))
            total, seed = total + known, max(seed, known.seed + 1)
    shown = time.monotonic()
    while total.counts["requests"] < args.requests:
        outcome = play(seed, kinds)
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
