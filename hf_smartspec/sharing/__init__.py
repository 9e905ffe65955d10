"""What replicas of a service have learnt, shared through a folder that all of them reach."""

from .checkpoints import SharedCheckpoints
from .outputs import SharedOutputs

__all__ = ["SharedCheckpoints", "SharedOutputs"]
