"""Sources that draft from what the target leaves behind: what they cannot know yet is not held against them."""

import pytest

import hf_smartspec
from hf_smartspec import EarlyExitCandidates, PromptLookupCandidates, RoutedCandidates
from hf_smartspec.candidates import FusedCandidates
from hf_smartspec.decoding.source_guard import GuardedSources

from ..generate.helpers import prompts, tiny_llama


class Spied(EarlyExitCandidates):
    """Notes how many tokens each request had generated when it was asked, and how deep its drafts were."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.asked = {}

    def propose(self, request_ids, max_nodes, price=None):
        generated = [self._states[name].num_generated for name in request_ids]
        trees = super().propose(request_ids, max_nodes, price)
        for name, num, tree in zip(request_ids, generated, trees):
            self.asked.setdefault(name, []).append((num, len(tree)))
        return trees


@pytest.fixture
def counted(monkeypatch):
    """Tokens that rows had generated in the steps by which sources are judged."""
    found, count = [], GuardedSources.count

    def watch(self, drafted):
        found.extend(request.num_generated for request in drafted)
        count(self, drafted)

    monkeypatch.setattr(GuardedSources, "count", watch)
    return found


def test_nobody_is_asked_before_the_prompt_has_been_run(counted):
    model = tiny_llama(num_hidden_layers=2, eos_token_id=None)
    source = Spied(model, 1)
    with hf_smartspec.enabled(model):
        model.generate(
            **prompts([1, 7, 12]), max_new_tokens=12, assistant=hf_smartspec.SmartSpecConfig(source, num_nodes=2)
        )
    assert [steps[0][0] for steps in source.asked.values()] == [1, 1, 1]
    assert all(size for steps in source.asked.values() for _, size in steps[:-1])
    assert min(counted) == 1, "a step in which it could not draft is none in which it would not"


def test_where_nobody_may_draft_prompts_are_not_read_for_nothing(counted):
    """Such steps count, whatever the source: a draft model's forwards over prompts are saved."""
    model = tiny_llama(num_hidden_layers=2, eos_token_id=None)
    with hf_smartspec.enabled(model):
        model.generate(**prompts([7, 12]), max_new_tokens=1, assistant=EarlyExitCandidates(model, 1))
    assert counted == [0, 0]


@pytest.mark.parametrize("num_others", [0, 1])
def test_sources_of_sources_follow_the_target_if_all_of_them_do(num_others):
    model = tiny_llama(num_hidden_layers=3)
    sources = [EarlyExitCandidates(model, 1), EarlyExitCandidates(model, 2)]
    sources[num_others:num_others] = [PromptLookupCandidates()] * num_others
    drafters = {str(number): source for number, source in enumerate(sources)}
    for source in (FusedCandidates(sources), RoutedCandidates(drafters)):
        assert source.follows_target == (not num_others)
