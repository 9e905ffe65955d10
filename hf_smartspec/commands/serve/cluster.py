"""`smartspec serve --replicas`, and the same service for a configuration file of Ray Serve."""

import argparse
import logging
import socket
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import fields
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from ..common.arguments import UsageError, usage_errors
from ..common.ray_cluster import keep_private, last_line, ray_cluster
from .arguments import add_arguments
from .checks import api_keys, check_arguments, name_models

if TYPE_CHECKING:
    from ray.serve import Application

    from ...replicas.ray_serve.service import ServiceOptions
    from ...serving.server.app import Server
    from ...serving.server.guard.keys import ApiKeys

_MIB = 2**20
_NAME = "smartspec"
_CLOSE_SECONDS = 5.0


def _options(args: argparse.Namespace) -> "ServiceOptions":
    from ...replicas.ray_serve.service import ServiceOptions

    num_gpus = float(torch.device(args.device).type == "cuda")
    names = [field.name for field in fields(ServiceOptions) if not field.name.startswith("num_")]
    return ServiceOptions(
        **{name: getattr(args, name) for name in names}, num_cpus=args.threads or 1, num_gpus=num_gpus
    )


@contextmanager
def _server(
    args: argparse.Namespace, names: Mapping[str, str], keys: "ApiKeys", hosts: Collection[str] | None
) -> Iterator["Server"]:
    """Load the server in a replica's process."""
    from .serving import loaded_server

    if args.threads:
        torch.set_num_threads(args.threads)
    with loaded_server(args, names, keys, hosts) as server:
        yield server


def serve_replicas(
    args: argparse.Namespace,
    names: Mapping[str, str],
    keys: "ApiKeys",
    listener: socket.socket,
    on_start: Callable[[], None],
) -> None:
    """Serve until SIGTERM or Ctrl-C; running requests are then finished within `--drain-seconds`."""
    keep_private(args.ray_address)
    from ray import serve
    from ray.exceptions import RayError

    from ...replicas.ray_serve.front import guarded
    from ...replicas.ray_serve.service import make_replicas, turns_of
    from ...serving.server.running import DrainingServer
    from .serving import hosts_of

    logging.getLogger("ray.serve").setLevel(args.log_level.upper())
    num_cpus = (args.max_replicas or args.replicas) * (args.threads or 1)
    # What fails in a replica is in the text.
    failed = usage_errors("the replicas could not be started", RuntimeError, RayError, reason=last_line)
    with ray_cluster(args.ray_address, num_cpus) as is_own, failed:
        hosts = hosts_of(args.host, keys)
        load = partial(_server, args, dict(names), keys, hosts)
        serve.start(proxy_location="Disabled")  # clients connect to this process
        options = _options(args)
        replicas = serve.run(make_replicas(load, options), name=_NAME, route_prefix=None)
        front = guarded(replicas, keys, args.max_body_mib * _MIB, hosts, turns_of(options, keys))
        DrainingServer(front, args.drain_seconds, on_start, args.log_level).serve_until_signal(listener)
        if is_own:  # Ray ends with this process: it is enough to close the replicas
            with suppress(RayError, TimeoutError):  # of replicas that have died
                replicas.broadcast("close").results(timeout_s=_CLOSE_SECONDS, return_exceptions=True)
        else:
            serve.delete(_NAME)


def application(options: Mapping[str, Any]) -> "Application":
    """
    Return the service, for `import_path` in a configuration file of Ray Serve. Its `args` are the options of `smartspec
    serve` with underscores, and `models`.

    Example:

        >>> application({"models": ["name=folder"], "replicas": 2, "max_batch_size": 8})

    Raises:
        ValueError: for options that the command would refuse.
    """
    from ...replicas.ray_serve.service import make_service

    parser = _RaisingParser(prog="smartspec serve", add_help=False)
    add_arguments(parser)
    try:
        args = parser.parse_args(_command_line({"replicas": 1} | dict(options)))
        check_arguments(args)
        keys = api_keys(args)
        load = partial(_server, args, name_models(args.models), keys, None)
        return make_service(load, _options(args), keys, args.max_body_mib * _MIB)
    except UsageError as error:
        raise ValueError(str(error)) from error


class _RaisingParser(argparse.ArgumentParser):
    def error(self, message: str) -> Any:
        raise UsageError(message)


def _command_line(options: dict[str, Any]) -> list[str]:
    """Return the options as words of a command line."""
    models = options.pop("models", [])
    words = [models] if isinstance(models, str) else list(models)
    for name, value in options.items():
        values = value if isinstance(value, list) else [value]
        words += [f"--{name.replace('_', '-')}", *(str(item) for item in values)]
    return words
