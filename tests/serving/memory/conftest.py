"""Sharing of short beginnings, which are copied otherwise."""

import pytest

from hf_smartspec.serving.memory import prefix_cache
from hf_smartspec.target_model.attention import tree_attention as attention
from hf_smartspec.target_model.written.compiled import CompiledDecoder


@pytest.fixture
def together(monkeypatch):
    """Short beginnings are shared, too; what is shared in every call of attention: how many of columns and tokens."""
    monkeypatch.setattr(prefix_cache, "LEAST_SHARED", 24)
    monkeypatch.setattr(prefix_cache, "LEAST_SAVED", 0)
    monkeypatch.setattr(prefix_cache, "_STEP", 8)
    seen, attend = [], attention.shared_attention

    def noting(packed, key, value, layout, *args):
        seen.append([(part.num_columns, len(part.tokens)) for part in layout.shared])
        return attend(packed, key, value, layout, *args)

    def run(compiled, given, *args):
        if given.layout.shared:
            seen.append([(part.num_columns, len(part.tokens)) for part in given.layout.shared])
        return run_program(compiled, given, *args)

    run_program = CompiledDecoder.run
    monkeypatch.setattr(attention, "shared_attention", noting)
    monkeypatch.setattr(CompiledDecoder, "run", run)
    return seen
