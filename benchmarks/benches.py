"""The benches by name, and their arguments."""

import argparse
from collections.abc import Sequence

from hf_smartspec.commands.main import COMMANDS, Command, Parser, sentence


def _bench(module: str, about: str) -> Command:
    return Command(f"{module}.command", about, "benchmarks")


# By family: decoding, load, replay, one step, learning, papers. The two that are installed are `smartspec bench` too.
BENCHES = {
    "generate": COMMANDS["bench", "generate"],
    "drafters": _bench("decode.drafters", "compare learned drafters: tokens per step, drafting, speed"),
    "batch": _bench("decode.batch", "measure seconds per token over batch size and draft length"),
    "published": _bench("decode.published", "compare methods as published with the default, by batch size"),
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
    "papers": _bench("papers", "measure the figures of the five papers, each beside what its paper found"),
}


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
