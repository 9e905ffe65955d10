"""`python -m benchmarks NAME`: one measurement of the project. Only the bench that runs is imported."""

import argparse
import difflib
import sys
from collections.abc import Sequence

from hf_smartspec.commands.main import COMMANDS, USAGE_ERROR, Command, Parser, guarded, sentence


def _bench(module: str, about: str) -> Command:
    return Command(f"{module}.command", about, "benchmarks")


# By family: decoding, load, replay, one step, learning. The two that are installed are `smartspec bench` too.
BENCHES = {
    "generate": COMMANDS["bench", "generate"],
    "drafters": _bench("decode.drafters", "compare learned drafters: tokens per step, drafting, speed"),
    "batch": _bench("decode.batch", "measure seconds per token over batch size and draft length"),
    "queue": _bench("decode.queue", "serve a queue of prompts, against transformers' batches"),
    "batching": _bench("decode.batching", "measure transformers' continuous batching with speculation"),
    "gpu": _bench("decode.gpu", "measure on a GPU: exactness, bandwidth, transformers' own"),
    "peers": _bench("decode.peers", "measure other engines on the CPU, with the same weights"),
    "rollouts": _bench("decode.rollouts", "measure rollouts of reinforcement learning, by TRL's GRPO"),
    "load": COMMANDS["bench", "load"],
    "timeline": _bench("load.timeline", "measure latency while busy and quiet phases alternate"),
    "tenants": _bench("load.tenants", "measure what one tenant of a server can do to the others"),
    "replicas": _bench("load.replicas", "play a service of several replicas on simulated engines"),
    "simulate": _bench("load.simulate", "play the papers' loads, and traces, on a simulated engine"),
    "sources": _bench("replay.sources", "measure what each part of the model-free sources contributes"),
    "memory": _bench("replay.memory", "measure what suffix trees and datastores cost as they grow"),
    "overhead": _bench("step.overhead", "measure what the machinery costs by itself"),
    "online": _bench("learning.online", "measure what drafters learn from the requests that they draft for"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one bench and return its exit status: 0, 1 (a claim failed), 2 (bad arguments) or 130 (Ctrl-C)."""
    return guarded("benchmarks", _dispatch, list(sys.argv[1:] if argv is None else argv))


def _dispatch(arguments: list[str]) -> int:
    if not arguments or arguments[0] not in BENCHES:
        return _listing(arguments)
    name, *rest = arguments
    parser = load_parser(name)
    return BENCHES[name].run(parse(parser, rest), parser)


def load_parser(name: str) -> Parser:
    """Return the parser of a bench's arguments."""
    parser = Parser(prog=f"benchmarks {name}", description=sentence(BENCHES[name].help))
    BENCHES[name].add_arguments(parser)
    if (files := _files(parser)) and "--prompts" not in parser._option_string_actions:
        parser.add_argument(
            "--prompts", nargs="+", type=files.type or str, default=[], metavar=files.metavar, help=files.help
        )
    return parser


def parse(parser: Parser, words: Sequence[str]) -> argparse.Namespace:
    """Return the arguments of a bench; what --prompts names are files as those named without it."""
    args: argparse.Namespace = parser.parse_args(words)
    if _files(parser) and "prompts" in args:
        args.files = [*args.files, *args.prompts]
        del args.prompts
        if not args.files and parser.get_default("needs_files"):
            parser.fail("the following arguments are required: FILE or --prompts FILE")
    return args


def _files(parser: Parser) -> argparse.Action | None:
    return next((action for action in parser._actions if action.dest == "files"), None)


def _listing(arguments: Sequence[str]) -> int:
    """Print all benches on request; refuse words that name none."""
    if arguments and arguments[0] not in ("-h", "--help"):
        near = difflib.get_close_matches(arguments[0], BENCHES, n=1)
        meant = "".join(f", did you mean {name!r}?" for name in near)
        print(f"benchmarks: error: invalid choice: {arguments[0]!r}{meant} (see benchmarks --help)", file=sys.stderr)
        return USAGE_ERROR
    width = max(map(len, BENCHES)) + 2
    lines = [f"  {name:{width}}{bench.help}" for name, bench in BENCHES.items()]
    usage = [
        "usage: python -m benchmarks NAME ...",
        "",
        *lines,
        "",
        "python -m benchmarks NAME --help says what it takes.",
    ]
    print("\n".join(usage), file=sys.stdout if arguments else sys.stderr)
    return 0 if arguments else USAGE_ERROR


if __name__ == "__main__":
    sys.exit(main())
