"""The old name of `hf_smartspec.candidates.models.growing`."""

from warnings import warn

from .models.growing import GrowingCandidates as GrowingCandidates

warn("import `GrowingCandidates` from `hf_smartspec.candidates`", DeprecationWarning, stacklevel=2)
