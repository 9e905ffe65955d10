"""Texts of the target, of the drafter and of both."""

import numpy as np
import pytest
import torch

from hf_smartspec.online.sampling import MixedWithTarget, sampled, taught

from ..models import new_model
from .helpers import new_drafter, new_target, sample_of

PROMPTS = [np.array([5, 6, 7, 8]), np.array([9, 10])]


@pytest.mark.parametrize(
    "make", [new_target, lambda: new_model("gemma2", final_logit_softcapping=2.0)], ids=["plain", "capped"]
)
def test_what_the_target_thinks_of_texts(make):
    target = make()
    texts = [(PROMPTS[0], np.array([11, 12, 13])), (PROMPTS[1], np.array([14, 15, 16, 17, 18]))]
    for sample, (prompt, response) in zip(taught(target, texts, 8, (0, 1, -1)), texts):
        wanted = sample_of(target, prompt, response, (0, 1, -1))
        assert sample.response.tolist() == response.tolist() and sample.prompt.tolist() == prompt.tolist()
        torch.testing.assert_close(sample.top_probs, wanted.top_probs, rtol=0, atol=2e-3)
        assert torch.equal(sample.top_ids[:, 0], wanted.top_ids[:, 0])
        for layer in (0, 1, -1):
            torch.testing.assert_close(sample.hidden[layer], wanted.hidden[layer], rtol=0, atol=1e-4)


def test_distributions_are_mixed_as_they_should_be():
    """Step by step, behind padding, against forwards over whole texts."""
    target, draft = new_target(), new_drafter("draft", new_target())
    ids = torch.tensor([[5, 6, 7, 8], [0, 0, 9, 10]])
    mask = torch.tensor([[1, 1, 1, 1], [0, 0, 1, 1]])
    processor = MixedWithTarget(target, mask, 0.3)
    for _ in range(4):
        rows = [ids[0], ids[1][2:]]
        p, q = (torch.cat([model(row[None]).logits[:, -1] for row in rows]).softmax(-1) for model in (target, draft))
        found = processor(ids, q.log())
        torch.testing.assert_close(found.exp(), 0.3 * p + 0.7 * q, rtol=0, atol=1e-5)
        ids = torch.cat([ids, found.argmax(-1, keepdim=True)], dim=1)


def test_the_share_decides_who_speaks():
    target, draft = new_target(), new_drafter("draft", new_target())
    torch.manual_seed(0)
    by_share = {share: sampled(draft, target, PROMPTS * 8, share, 12) for share in (0.0, 0.5, 1.0)}

    def likelihood(model, texts):
        samples = [torch.tensor([*prompt, *text]) for prompt, text in zip(PROMPTS * 8, texts)]
        lines = [model(ids[None]).logits[0, :-1].log_softmax(-1) for ids in samples]
        return float(sum(line[torch.arange(len(ids) - 1), ids[1:]].sum() for line, ids in zip(lines, samples)))

    of_target = [likelihood(target, by_share[share]) for share in (0.0, 0.5, 1.0)]
    of_draft = [likelihood(draft, by_share[share]) for share in (0.0, 0.5, 1.0)]
    assert of_target == sorted(of_target) and of_draft == sorted(of_draft, reverse=True)
    assert all(1 <= len(text) <= 12 for texts in by_share.values() for text in texts)
