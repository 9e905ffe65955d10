"""Sources that draft from what the target leaves behind: what they cannot know yet is not held against them."""

import hf_smartspec
from hf_smartspec import EarlyExitCandidates
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


def test_nobody_is_asked_before_the_prompt_has_been_run(monkeypatch):
    counted = []
    count = GuardedSources.count
    monkeypatch.setattr(
        GuardedSources, "count", lambda self, drafted: counted.extend(drafted.values()) or count(self, drafted)
    )
    model = tiny_llama(num_hidden_layers=2, eos_token_id=None)
    source = Spied(model, 1)
    with hf_smartspec.enabled(model):
        model.generate(
            **prompts([1, 7, 12]), max_new_tokens=12, assistant=hf_smartspec.SmartSpecConfig(source, num_nodes=2)
        )
    asked = sorted(source.asked.values())
    assert [steps[0][0] for steps in asked] == [0, 1, 1], "one token is no prompt to be run before"
    assert all(size for steps in asked for _, size in steps[:-1])
    assert len(counted) == sum(map(len, asked)), "a step in which it could not draft is none in which it would not"
