"""Several engines as one service: routing of requests, and sharing of outputs and learnt drafters."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .sharing.checkpoints import SharedCheckpoints
    from .sharing.outputs import SharedOutputs

__all__ = ["SharedCheckpoints", "SharedOutputs"]


def __getattr__(name: str) -> Any:
    """Import on first use: routing of requests needs neither torch nor models."""
    if name == "SharedOutputs":
        from .sharing.outputs import SharedOutputs

        return SharedOutputs
    if name == "SharedCheckpoints":
        from .sharing.checkpoints import SharedCheckpoints

        return SharedCheckpoints
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
