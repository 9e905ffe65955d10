"""Sources that have others draft for some requests: the loop asks each for its own, in one call for all of them."""

import torch

import hf_smartspec
from hf_smartspec import DraftModelCandidates, PromptLookupCandidates

from ..generate.helpers import noisy_copy, prompts, tiny_llama


class Spied(DraftModelCandidates):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.asked, self.stopped = [], []

    def propose(self, request_ids, max_nodes, price=None):
        self.asked.append(list(request_ids))
        return super().propose(request_ids, max_nodes, price)

    def stop(self, request_id):
        self.stopped.append(request_id)
        super().stop(request_id)


class ByLength(PromptLookupCandidates):
    """Long prompts are drafted for by others."""

    def __init__(self, long, fails=False):
        super().__init__()
        self.long, self.fails, self.tags, self.own = long, fails, [], set()

    def choose(self, requests):
        self.tags.append([request.tag for request in requests])
        if self.fails:
            return []
        return [self.long if len(request.prompt) > 8 else self for request in requests]

    def begin(self, request):
        self.own.add(len(request.prompt))
        super().begin(request)


def test_every_request_is_drafted_for_by_those_that_were_chosen_for_it():
    model = tiny_llama(eos_token_id=None)
    long = Spied(noisy_copy(model))
    source = ByLength(long)
    inputs = prompts([5, 12, 6, 14])
    plain = model.generate(**inputs, max_new_tokens=24)
    with hf_smartspec.enabled(model):
        fast = model.generate(**inputs, max_new_tokens=24, assistant=hf_smartspec.SmartSpecConfig(source, num_nodes=3))
    assert torch.equal(plain, fast)
    assert source.tags == [[None] * 4] and source.own == {5, 6}
    assert max(map(len, long.asked)) == 2 and len(set().union(*long.asked)) == 2, "both in one call"
    assert sorted(map(id, long.stopped)) == sorted(map(id, set().union(*long.asked))), "each once"


def test_a_source_that_fails_to_choose_drafts_itself():
    model = tiny_llama(eos_token_id=None)
    source = ByLength(None, fails=True)
    inputs = prompts([5, 12])
    plain = model.generate(**inputs, max_new_tokens=12)
    with hf_smartspec.enabled(model):
        assert torch.equal(plain, model.generate(**inputs, max_new_tokens=12, assistant=source))
    assert source.own == {5, 12}
