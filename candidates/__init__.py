"""Candidate sources: everything that proposes draft trees."""

from .base import TreeCandidateGenerator
from .draft_model import DraftModelCandidates
from .prompt_lookup import PromptLookupCandidates
from .wrapped import WrappedCandidates

__all__ = ["DraftModelCandidates", "PromptLookupCandidates", "TreeCandidateGenerator", "WrappedCandidates"]
