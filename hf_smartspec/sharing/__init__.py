"""What replicas of a service have learnt, shared through a folder that all of them reach."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .checkpoints import SharedCheckpoints
    from .outputs import SharedOutputs

__all__ = ["SharedCheckpoints", "SharedOutputs"]


def __getattr__(name: str) -> Any:
    """Imported when first asked for: whoever only routes requests loads neither torch nor models."""
    if name == "SharedOutputs":
        from .outputs import SharedOutputs

        return SharedOutputs
    if name == "SharedCheckpoints":
        from .checkpoints import SharedCheckpoints

        return SharedCheckpoints
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
