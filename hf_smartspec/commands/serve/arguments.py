"""Arguments of `smartspec serve`."""

import argparse
import json
from pathlib import Path
from typing import Any

from ..common.arguments import (
    QUANTIZATIONS,
    add_dtype_argument,
    add_machine_arguments,
    host,
    not_empty,
    not_negative,
    not_negative_number,
    port,
    positive,
    positive_number,
)
from ..common.ray_cluster import add_cluster_arguments

ROUTERS = ("affinity", "least_loaded", "power_of_two", "round_robin")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "models", nargs="*", metavar="MODEL",
        help="folder or hub id, which is its name for clients, or NAME=MODEL (default: demo=, the demo's target)",
    )  # fmt: skip
    _add_speculation(parser)
    _add_learning(parser)
    add_dtype_argument(parser)
    parser.add_argument("--quantize", choices=QUANTIZATIONS, help="run linear maps in it, on the CPU")
    add_machine_arguments(parser)
    parser.add_argument(
        "--chat-template-kwargs", type=_json_object, default={}, metavar="JSON",
        help="""defaults for the chat template, such as '{"enable_thinking": false}'""",
    )  # fmt: skip
    _add_limits(parser)
    parser.add_argument(
        "--host", type=host, default="127.0.0.1", metavar="ADDRESS",
        help="where to listen (default: 127.0.0.1, this machine only)",
    )  # fmt: skip
    parser.add_argument("--port", type=port, default=8000, metavar="N", help="0: a free one (default: 8000)")
    parser.add_argument(
        "--api-key", action="append", default=[], metavar="KEY",
        help="clients must send it; may be repeated, each is a tenant whose texts stay apart. Other users of this "
        "machine see it in the list of processes: better in a file",
    )  # fmt: skip
    parser.add_argument("--api-key-file", type=Path, metavar="FILE", help="the same, one key per line")
    parser.add_argument(
        "--admin-key-file", type=Path, metavar="FILE",
        help="keys, one per line, with which /metrics can be read, too; without any keys, all clients can read it",
    )  # fmt: skip
    parser.add_argument(
        "--drain-seconds", type=not_negative, default=60, metavar="N",
        help="for running requests, after SIGTERM or Ctrl-C (default: 60)",
    )  # fmt: skip
    parser.add_argument("--log-level", choices=["error", "warning", "info", "debug"], default="warning")
    _add_replicas(parser)


def _add_speculation(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--assistant", nargs="+", default=["auto"], metavar="SOURCE",
        help="what drafts: names as in `assistant=`, folders or hub ids; several are fused, also joined by plus signs; "
        "none drafts nothing (default: auto)",
    )  # fmt: skip
    parser.add_argument("--draft", metavar="MODEL", help="a draft model, or a learned drafter, beside it")
    parser.add_argument(
        "--shared", type=not_empty, metavar="URL",
        help="folder, on any file system of fsspec, through which suffix trees learn from other servers' outputs",
    )  # fmt: skip
    parser.add_argument(
        "--shared-interval", type=positive_number, default=30.0, metavar="SECONDS", help="of exchanges (default: 30)"
    )


def _add_learning(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--learn", type=not_empty, metavar="FOLDER",
        help="drafters learn from the requests that they draft for; what they have learnt is saved there, and taken up "
        "again at the next start",
    )  # fmt: skip
    parser.add_argument(
        "--learn-options", type=_json_object, default={}, metavar="JSON",
        help="""options of `OnlineDistillation`, such as '{"every_requests": 32}'""",
    )  # fmt: skip
    parser.add_argument(
        "--learn-tenants", choices=("apart", "together"), default="apart",
        help="whether each key has a copy of the draft model that learns from its requests alone, or all have one "
        "(default: apart)",
    )  # fmt: skip
    parser.add_argument(
        "--no-learn-key-file", type=Path, metavar="FILE",
        help="keys, one per line, from whose requests nothing is learnt; they are drafted for by the draft model as it "
        "was loaded",
    )  # fmt: skip


def _add_limits(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--max-batch-size", type=positive, default=32, metavar="N", help="requests that run at once (default: 32)"
    )
    parser.add_argument(
        "--max-kv-mib", type=positive, metavar="N",
        help="memory of keys and values, of each model and replica (default: a part of half of a GPU's free memory, a "
        "quarter of a CPU's, but no more than twice what a full batch of the longest texts takes)",
    )  # fmt: skip
    parser.add_argument(
        "--max-prefill-tokens",
        type=positive,
        metavar="N",
        help="prompt tokens per step (default: 512 on a CPU, else 2,048)",
    )
    parser.add_argument(
        "--max-model-len", type=positive, metavar="N", help="tokens of prompt and answer (default: the model's)"
    )
    parser.add_argument(
        "--max-new-tokens", type=positive, default=1024, metavar="N",
        help="of an answer in a chat whose request has no limit (default: 1024)",
    )  # fmt: skip
    parser.add_argument(
        "--max-queue", type=not_negative, default=1024, metavar="N",
        help="requests that may wait; further ones are refused, 429, unless they are of a key that has less than its "
        "part (default: 1024)",
    )  # fmt: skip
    parser.add_argument(
        "--max-requests-per-key", type=positive, metavar="N",
        help="answers to one key that may wait and run, of each model; further ones are refused, 429 (default: "
        "--max-batch-size and --max-queue together)",
    )  # fmt: skip
    parser.add_argument("--max-body-mib", type=positive, default=8, metavar="N", help="of a request (default: 8)")
    parser.add_argument(
        "--timeout", type=positive_number, metavar="SECONDS", help="after which a request is ended (default: never)"
    )


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"no JSON: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError("must be a JSON object")
    return value


def _add_replicas(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("several replicas, on Ray Serve")
    add_cluster_arguments(group, "N engines of each model, as one service")
    group.add_argument(
        "--max-replicas", type=positive, metavar="N", help="up to N replicas, as the load grows (default: --replicas)"
    )
    group.add_argument(
        "--target-requests", type=positive_number, metavar="N",
        help="running and waiting requests of a replica, above which replicas are added (default: --max-batch-size)",
    )  # fmt: skip
    group.add_argument(
        "--min-goodput", type=not_negative_number, default=0.0, metavar="R",
        help="tokens per second and request, below which replicas are added (default: 0, the queue alone decides)",
    )  # fmt: skip
    group.add_argument("--router", choices=ROUTERS, default="affinity", help="of requests (default: affinity)")
