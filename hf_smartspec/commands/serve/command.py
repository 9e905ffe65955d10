"""`smartspec serve`: models with OpenAI's interface."""

import argparse
import atexit
import gc
import sys
from functools import partial

from ..common.arguments import listen_at
from .checks import api_keys, check_arguments, name_models
from .cluster import serve_replicas


def run(args: argparse.Namespace) -> int:
    atexit.register(gc.freeze)  # else Python's last garbage collection goes through a million objects: over a second
    names = name_models(args.models)
    check_arguments(args)
    keys = api_keys(args)
    listener = listen_at(args.host, args.port)
    address, number = listener.getsockname()[:2]
    on_start = partial(_announce, address, number, names)
    with listener:
        if args.replicas:
            serve_replicas(args, names, keys, listener, on_start)
        else:
            from .serving import serve

            serve(args, names, keys, listener, on_start)
    return 0


def _announce(host: str, port: int, names: dict[str, str]) -> None:
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    print(f"smartspec serve: {', '.join(names)} at http://{address}/v1", file=sys.stderr, flush=True)
