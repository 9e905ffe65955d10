"""The methods that a source implements, and those that one in front of another passes on."""

import numpy as np
import pytest

from hf_smartspec.candidates import ForwardingSource, PromptLookupCandidates, TreeCandidateGenerator


def test_start_is_overridden_only_where_it_is_called():
    """A source whose parent begins requests by `begin` would never get the call."""
    with pytest.raises(TypeError, match="overrides `start`, which its parent does not call: override `begin`"):
        type("Own", (PromptLookupCandidates,), {"start": lambda self, request_id, prompt: None})
    without = type("Without", (TreeCandidateGenerator,), {})()
    with pytest.raises(NotImplementedError, match="Without must implement `start`"):
        without.start("a", np.array([1]))


def test_a_source_in_front_of_another_passes_every_call_on():
    calls = {name for name in vars(TreeCandidateGenerator) if callable(getattr(TreeCandidateGenerator, name))}
    own = {"choose", "start"}  # made of the others
    assert {name for name in calls - own if not name.startswith("_")} <= vars(ForwardingSource).keys()
