"""Ray, for commands that run on several machines."""

import argparse
import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

from .arguments import UsageError, positive


def add_cluster_arguments(parser: argparse._ArgumentGroup, replicas_help: str) -> None:
    parser.add_argument("--replicas", type=positive, metavar="N", help=replicas_help)
    parser.add_argument(
        "--ray-address",
        default=os.environ.get("RAY_ADDRESS"),
        metavar="ADDRESS",
        help="of a cluster (default: RAY_ADDRESS, else this machine alone)",
    )


def check_ray() -> None:
    """Raise `UsageError` if Ray, or a package that its libraries need, is not installed."""
    if any(find_spec(name) is None for name in ("ray", "grpc", "pyarrow")):
        raise UsageError('--replicas: Ray is not installed: pip install "hf-smartspec[ray]"')


# Of a Ray that is started here, unless the operator has set them: it reports nothing, asks for its token, listens on
# loopback only (that name, and no other switch, has Ray take 127.0.0.1 for the node's address), and exports no metrics.
_PRIVATE = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "token",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_enable_metrics_collection": "0",
}


def is_own(address: str | None) -> bool:
    """Return whether Ray is to be started on this machine, since no cluster is named."""
    return not (address or os.environ.get("RAY_ADDRESS"))


def keep_private(address: str | None) -> None:
    """Set the environment of a Ray that is started here. Call this before Ray is imported, which then reads it."""
    if is_own(address):
        for name, value in _PRIVATE.items():
            os.environ.setdefault(name, value)


@contextmanager
def ray_cluster(address: str | None, num_cpus: float) -> Iterator[bool]:
    """
    Connect to a cluster, or start Ray on this machine, on loopback, until the end of the context.

    Args:
        address (`str`, *optional*): Address of the cluster; by default that of `RAY_ADDRESS`.
        num_cpus (`float`): CPUs that will be used; a Ray that is started here offers as many, even if there are fewer.

    Returns:
        `bool`: Whether it was started here.

    Raises:
        UsageError: if there is no cluster at the address, or Ray cannot be started.
    """
    keep_private(address)
    import ray

    own: dict[str, Any] = {}
    if is_own(address):
        address = "local"  # else Ray joins a cluster that `ray start` has left running on this machine
        own = {"num_cpus": max(os.cpu_count() or 1, int(num_cpus) + 1), "include_dashboard": False}
    try:
        ray.init(address=address, log_to_driver=False, configure_logging=False, **own)
    except Exception as error:  # of many kinds: no answer, another version, a machine that is too slow
        where = "Ray cannot be started" if own else "--ray-address"
        raise UsageError(f"{where}: {last_line(error)}") from error
    try:
        yield bool(own)
    finally:
        ray.shutdown()


def last_line(error: Exception) -> str:
    """Return the last line of an error, where Ray puts its cause."""
    return (str(error).strip().splitlines() or [repr(error)])[-1]
