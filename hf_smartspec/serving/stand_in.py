"""The old name of `hf_smartspec.serving.transformers_batching`."""

import sys
from warnings import warn

from .transformers_batching import server

warn("import `own_settings` from `hf_smartspec.serving.transformers_batching.server`", DeprecationWarning, stacklevel=2)
sys.modules[f"{__name__}.server"] = server
