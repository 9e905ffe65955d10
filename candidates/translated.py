"""The old name of `hf_smartspec.candidates.models.translated`."""

import sys
from warnings import warn

from .models.translated import source

warn("import `TranslatedDraftCandidates` from `hf_smartspec.candidates`", DeprecationWarning, stacklevel=2)
sys.modules[f"{__name__}.source"] = source
