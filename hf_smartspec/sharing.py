"""The old name of `hf_smartspec.replicas`."""

import sys
from typing import Any
from warnings import warn

from . import replicas
from .replicas import routing

warn("import what was in `hf_smartspec.sharing` from `hf_smartspec.replicas`", DeprecationWarning, stacklevel=2)
sys.modules[f"{__name__}.routing"] = routing


def __getattr__(name: str) -> Any:
    return getattr(replicas, name)
