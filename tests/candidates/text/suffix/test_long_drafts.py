"""Drafts of hundreds of nodes, of which a step accepts a hundred and more: the tokens of plain decoding."""

import numpy as np
import pytest
import torch

import hf_smartspec
from hf_smartspec import FixedLength, SmartSpecConfig, SuffixTreeCandidates
from hf_smartspec.cpu.few_tokens import ANY, most_tokens

from ....covering import exhaustive
from ....generate.helpers import VOCAB_SIZE, prompts, tiny_llama

NUM_NODES, NEW_TOKENS = 256, 240
SOURCES = {
    "published": lambda: SuffixTreeCandidates.published(max_bytes=2**22),
    "learned": lambda: SuffixTreeCandidates(
        max_bytes=2**22, max_match=64, max_depth=256, num_nodes=NUM_NODES, min_probability=0.0
    ),
}


class Watched(FixedLength):
    """Notes the largest draft that is verified, whether it branches, and the most nodes that one step accepts."""

    largest = deepest = 0
    branches = False

    def observe(self, outcome):
        self.deepest = max(self.deepest, *outcome.accepted)
        for tree in outcome.verified:
            self.largest = max(self.largest, len(tree))
            self.branches |= not tree.is_chain


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", SOURCES)
@pytest.mark.parametrize("sampling", [{}, *exhaustive([{"do_sample": True, "seed": 3}])])
def test_tokens_are_the_plain_ones(name, dtype, sampling):
    """SuffixDecoding, section 4.2 (figure 5): trees that branch, with a path of dozens of tokens that is accepted."""
    if dtype == torch.bfloat16 and most_tokens(dtype) != ANY:
        pytest.skip("rounds by the number of tokens here")
    model = tiny_llama(head_dim=16).to(dtype)
    arguments = prompts([70, 66]) | sampling | {"max_new_tokens": NEW_TOKENS, "eos_token_id": None}
    source, rng, policy = SOURCES[name](), np.random.default_rng(0), Watched(NUM_NODES)
    with hf_smartspec.enabled(model):
        plain = model.generate(**arguments, assistant="none")
        for row, mask in zip(plain.numpy(), arguments["attention_mask"].numpy()):
            text = row[np.append(mask, np.ones(NEW_TOKENS, mask.dtype)) > 0][-NEW_TOKENS - 66 :]
            others = [np.append(text[:at], rng.integers(0, VOCAB_SIZE, 60)) for at in rng.integers(70, 300, 8)]
            source.add_outputs([text] * 8 + others, progress=False)
        found = model.generate(**arguments, assistant=SmartSpecConfig(source, policy=policy))
    if not sampling and dtype == torch.float32:
        assert torch.equal(plain, model.generate(**arguments))
    assert torch.equal(found, plain)
    assert policy.largest > 200 and policy.branches and policy.deepest > 100
