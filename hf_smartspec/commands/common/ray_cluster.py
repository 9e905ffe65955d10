"""Ray, for commands that run on several machines."""

import argparse
import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

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
    """Raises `UsageError` where Ray, with all that its libraries need, is not installed."""
    if any(find_spec(name) is None for name in ("ray", "grpc", "pyarrow")):
        raise UsageError('--replicas: Ray is not installed: pip install "hf-smartspec[ray]"')


@contextmanager
def ray_cluster(address: str | None, num_cpus: float) -> Iterator[bool]:
    """
    Connects to a cluster, or starts Ray on this machine until the end of the context.

    Args:
        address (`str`, *optional*): Of the cluster; by default what `RAY_ADDRESS` says.
        num_cpus (`float`): That are to be used: of this machine, so many are given out even if it has fewer.

    Returns:
        `bool`: Whether it was started here.

    Raises:
        UsageError: if there is none at the address.
    """
    import ray

    is_own = not (address or os.environ.get("RAY_ADDRESS"))
    given_out = max(os.cpu_count() or 1, int(num_cpus) + 1) if is_own else None
    try:
        ray.init(address=address, num_cpus=given_out, log_to_driver=False, configure_logging=False)
    except Exception as error:  # of many kinds: nobody there, another version, a machine that is too slow
        where = "Ray cannot be started" if is_own else "--ray-address"
        raise UsageError(f"{where}: {last_line(error)}") from error
    try:
        yield is_own
    finally:
        ray.shutdown()


def last_line(error: Exception) -> str:
    """What has gone wrong, at the end of what Ray makes of it."""
    return (str(error).strip().splitlines() or [repr(error)])[-1]
