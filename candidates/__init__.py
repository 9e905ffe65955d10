"""Candidate sources: everything that proposes draft trees."""

from .base import TreeCandidateGenerator
from .datastore import DatastoreCandidates
from .datastore_file import Datastore, build_datastore
from .draft_model import DraftModelCandidates
from .fused import FusedCandidates
from .prompt_lookup import PromptLookupCandidates
from .suffix_tree import SuffixTreeCandidates
from .wrapped import WrappedCandidates

__all__ = [
    "Datastore",
    "DatastoreCandidates",
    "DraftModelCandidates",
    "FusedCandidates",
    "PromptLookupCandidates",
    "SuffixTreeCandidates",
    "TreeCandidateGenerator",
    "WrappedCandidates",
    "build_datastore",
]
