"""Sources are told apart by their names, and with them what is learnt about them."""

import numpy as np
import pytest

import hf_smartspec
from hf_smartspec.candidates import (
    Datastore,
    DatastoreCandidates,
    DraftModelCandidates,
    FusedCandidates,
    PromptLookupCandidates,
    StagedCandidates,
    SuffixTreeCandidates,
)
from hf_smartspec.target_model.model_state import state_of

from ..generate.helpers import noisy_copy, prompts, tiny_llama


@pytest.fixture
def model():
    return tiny_llama()


def datastore(length):
    return DatastoreCandidates(Datastore.from_documents([np.arange(length) % 40]))


def test_sources_that_draft_from_something_else_have_other_names(model):
    drafts = [DraftModelCandidates(noisy_copy(model, seed=seed)) for seed in (1, 2)]
    stores = [datastore(30), datastore(50)]
    lists = [FusedCandidates([SuffixTreeCandidates(), other]) for other in (*stores, PromptLookupCandidates())]
    lists += [StagedCandidates([SuffixTreeCandidates(), draft]) for draft in drafts]
    names = [source.name for source in (*drafts, *stores, *lists, PromptLookupCandidates(), SuffixTreeCandidates())]
    assert len(set(names)) == len(names)
    assert DraftModelCandidates(drafts[0].model).name == drafts[0].name, "the same model, in another call"
    assert all(type(source).__name__ in source.name for source in (*drafts, *stores, *lists))


@pytest.mark.adaptive
def test_lists_learn_apart(model):
    """What two lists cost and are worth is not one another's."""
    hf_smartspec.enable(model)
    drafts = noisy_copy(model, seed=1), noisy_copy(model, seed=2)
    for assistant in (["prompt_lookup", drafts[0]], ["prompt_lookup", drafts[1]], ["prompt_lookup", drafts[0]]):
        model.generate(**prompts([5, 6]), max_new_tokens=8, assistant=assistant)
    policies = state_of(model).policies
    assert len(policies) == 2 and all(len(found) == 1 for found in policies.values())
    (names, others) = ({cost.source for cost in found[0].records} for found in policies.values())
    assert names & others == {"PromptLookupCandidates"} and names - others and others - names
