"""`smartspec serve`: models behind OpenAI's interface."""

import argparse
import json
import sys
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...prepare.resolve import check_assistant
from ...target.quantized import KINDS
from ..common.addresses import host, listen_at, port
from ..common.arguments import add_machine_arguments, not_negative, positive, positive_number, use_machine
from ..common.demo import demo_folder
from ..common.drafters import parts_of
from ..common.models import DTYPES, UsageError
from . import cluster

if TYPE_CHECKING:
    from ...serving.server.guard.keys import ApiKeys

EXTRAS = ("fastapi", "uvicorn", "openai", "prometheus_client", "llguidance")
_MIB = 2**20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "models", nargs="*", metavar="MODEL",
        help="folder or hub id, by which clients ask for it, or NAME=MODEL (default: demo=, the demo's target)",
    )  # fmt: skip
    _add_speculation(parser)
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="default: bfloat16")
    parser.add_argument("--quantize", choices=KINDS, help="run linear maps in it, on the CPU")
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
        help="clients must bring it; may be repeated, each is a tenant whose texts stay apart. Others on this machine "
        "see it in the list of processes: better in a file",
    )  # fmt: skip
    parser.add_argument("--api-key-file", type=Path, metavar="FILE", help="the same, one key per line")
    parser.add_argument(
        "--drain-seconds", type=not_negative, default=60, metavar="N",
        help="for what still runs on SIGTERM or Ctrl-C (default: 60)",
    )  # fmt: skip
    parser.add_argument("--log-level", choices=["error", "warning", "info", "debug"], default="warning")
    cluster.add_arguments(parser)


def _add_speculation(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--assistant", nargs="+", default=["auto"], metavar="SOURCE",
        help="what drafts: names as in `assistant=`, folders or hub ids; several are fused, also joined by plus signs; "
        "none drafts nothing (default: auto)",
    )  # fmt: skip
    parser.add_argument("--draft", metavar="MODEL", help="a draft model beside it")
    parser.add_argument(
        "--shared", metavar="URL",
        help="folder, on any file system of fsspec, through which suffix trees learn from other servers' outputs",
    )  # fmt: skip
    parser.add_argument(
        "--shared-interval", type=positive_number, default=30.0, metavar="SECONDS", help="of exchanges (default: 30)"
    )


def _add_limits(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--max-batch-size", type=positive, default=32, metavar="N", help="requests that run at once (default: 32)"
    )
    parser.add_argument(
        "--max-kv-mib", type=positive, metavar="N",
        help="memory of keys and values, of each model (default: half of a GPU's free memory, a quarter of a CPU's)",
    )  # fmt: skip
    parser.add_argument(
        "--max-prefill-tokens", type=positive, default=512, metavar="N", help="prompt tokens per step (default: 512)"
    )
    parser.add_argument(
        "--max-model-len", type=positive, metavar="N", help="tokens of prompt and answer (default: the model's)"
    )
    parser.add_argument(
        "--max-new-tokens", type=positive, default=1024, metavar="N",
        help="of an answer in a chat whose request does not say (default: 1024)",
    )  # fmt: skip
    parser.add_argument(
        "--max-queue", type=not_negative, default=1024, metavar="N",
        help="requests that may wait; further ones are refused, 429 (default: 1024)",
    )  # fmt: skip
    parser.add_argument("--max-body-mib", type=positive, default=8, metavar="N", help="of a request (default: 8)")
    parser.add_argument(
        "--timeout", type=positive_number, metavar="SECONDS", help="after which a request is given up (default: never)"
    )


def run(args: argparse.Namespace) -> int:
    names = name_models(args.models)
    check_arguments(args)
    keys = api_keys(args)
    listener = listen_at(args.host, args.port)
    address, number = listener.getsockname()[:2]
    on_start = partial(_announce, address, number, names)
    if args.replicas:
        listener.close()  # Ray Serve's own process will listen there
        cluster.serve_replicas(args, names, keys, number, on_start)
        return 0
    with listener:
        from .serving import serve

        serve(args, names, keys, listener, on_start)
    return 0


def check_arguments(args: argparse.Namespace) -> None:
    """
    Raises:
        UsageError: for what is known to fail before anything is loaded.
    """
    check_extras()
    use_machine(args)
    args.assistant = [item for name in args.assistant for item in parts_of(name)]
    try:
        check_assistant(args.assistant)
    except (TypeError, ValueError) as error:
        raise UsageError(f"--assistant: {error}") from error
    if args.replicas:
        cluster.check(args)


def check_extras() -> None:
    missing = [name for name in EXTRAS if find_spec(name) is None]
    if missing:
        raise UsageError(f'{", ".join(missing)} not installed: pip install "hf-smartspec[serve]"')
    if find_spec("transformers.cli.serving") is None:
        raise UsageError('transformers is too old to serve: pip install "hf-smartspec[serve]"')


def name_models(models: list[str]) -> dict[str, str]:
    """Folders and hub ids by the names that clients use."""
    names: dict[str, str] = {}
    for text in models:
        name, sign, path = text.partition("=")
        if not sign or Path(text).exists():
            name, path = text, text
        if not name or not path:
            raise UsageError(f"{text!r} must be a folder, a hub id or NAME=MODEL")
        if name in names:
            raise UsageError(f"two models are named {name!r}: say NAME=MODEL")
        names[name] = path
    return names or {"demo": str(demo_folder("MODEL") / "models/target")}


def api_keys(args: argparse.Namespace) -> "ApiKeys":
    from ...serving.server.guard.keys import ApiKeys, read_keys

    try:
        return ApiKeys([*args.api_key, *(read_keys(args.api_key_file) if args.api_key_file else [])])
    except (OSError, ValueError) as error:
        raise UsageError(f"--api-key or --api-key-file: {error}") from error


def _announce(host: str, port: int, names: dict[str, str]) -> None:
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    print(f"smartspec serve: {', '.join(names)} at http://{address}/v1", file=sys.stderr, flush=True)


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"no JSON: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError("must be a JSON object")
    return value
