"""The default bound on the memory of keys and values."""

import numpy as np
import pytest

from hf_smartspec import DraftModelCandidates, Engine, SuffixTreeCandidates
from hf_smartspec.candidates.request import SourceRequest
from hf_smartspec.serving.memory import budget
from hf_smartspec.serving.memory.budget import Budget

from ...generate.helpers import tiny_llama
from ...models import new_model

MIB = 2**20


@pytest.fixture
def machine(monkeypatch):
    """A machine with 8 GiB of free memory."""
    monkeypatch.setattr(budget, "free_bytes", lambda device: 8192 * MIB)


@pytest.fixture
def model():
    return tiny_llama()


def test_the_default_is_a_part_of_what_is_free_and_no_more_than_is_of_use(machine, model, monkeypatch):
    longest = model.config.max_position_embeddings
    assert Budget().bytes_for(model, 1, MIB) == min(2048 * MIB, 2 * longest * MIB)
    assert Budget().bytes_for(model, 64, MIB) == 2048 * MIB
    assert Budget(num_sharing=8).bytes_for(model, 64, MIB) == 256 * MIB
    assert Budget().bytes_for(model, 1, 1) == 256 * MIB, "enough, even of short texts"
    assert Budget(num_sharing=64).bytes_for(model, 1, 1) == 32 * MIB
    model.config.max_position_embeddings = 500
    assert Budget().bytes_for(model, 4, 2**18) == 2 * 4 * 500 * 2**18
    assert Budget(max_bytes=5, num_sharing=3).bytes_for(model, 64, MIB) == 5
    assert Budget(max_tokens=100, drafting=2).bytes_for(model, 4, 3) == 500
    assert Budget(max_tokens=100, drafting=2).bytes_for(model, 4, 0) == 256 * MIB, "states do not grow with the text"
    monkeypatch.setattr(budget, "num_positions", lambda config: None)
    assert Budget().bytes_for(model, 1, 1) == 2048 * MIB, "there is no end to its texts"


def test_engines_are_bound_by_it(machine, model):
    engine = Engine(model, "none")
    assert engine._memory.max_bytes == 256 * MIB
    assert engine._memory.scheduler.max_tokens == 256 * MIB // engine._memory.bytes_per_token
    assert Engine(model, "none", max_kv_bytes=MIB)._memory.max_bytes == MIB


def test_draft_models_have_a_slot_for_every_token_of_the_target(machine, model):
    """SmartSpec, section 6: the bound holds for both models' keys and values together."""
    draft = tiny_llama(num_hidden_layers=1)
    alone, bound = Engine(model, "none", max_kv_bytes=MIB)._memory, 2**18
    source = DraftModelCandidates(draft)
    source.begin(SourceRequest("a", np.array([5, 9])))
    source.propose(["a"], [2])
    per_token = source._forward.cache.bytes_per_line
    assert source.bytes_per_token() == per_token > 0
    for assistant in (draft, ["suffix", draft], SuffixTreeCandidates()):
        memory = Engine(model, assistant, max_kv_bytes=bound)._memory
        more = 0 if isinstance(assistant, SuffixTreeCandidates) else per_token
        assert memory.scheduler.max_tokens == bound // (alone.bytes_per_token + more)
        assert memory.max_bytes == bound
    draft = new_model("llama")
    plain, drafted = (Engine(new_model("falcon"), assistant)._memory for assistant in ("none", draft))
    assert drafted._drafting == DraftModelCandidates(draft).bytes_per_token() > plain._drafting == 0
