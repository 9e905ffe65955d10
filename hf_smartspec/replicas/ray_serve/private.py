"""Changes to private parts of Ray Serve."""

from typing import Any

import ray
import ray.serve._private.replica as serve_replica

from ...log import get_logger

logger = get_logger(__name__)

_LOOPBACK = "127.0.0.1"


def listen_where_ray_does() -> None:
    """
    Let Ray Serve's own server in a deployment's process listen on loopback, if that is the address of Ray's node.
    Otherwise it would accept calls on all interfaces. It starts after the deployment has been made.
    """
    if ray.util.get_node_ip_address() != _LOOPBACK:
        return
    original = getattr(serve_replica, "add_port_to_grpc_server", None)
    if original is None:
        logger.warning("This release of Ray Serve may have replicas listen on all interfaces.")
        return

    def add_port(server: Any, address: str) -> Any:
        return original(server, address.replace("[::]", _LOOPBACK))

    serve_replica.add_port_to_grpc_server = add_port
