"""Draft models with encoders of their own learn what they read, too."""

import pytest
import torch

import hf_smartspec
from hf_smartspec import OnlineDistillation, SmartSpecConfig
from hf_smartspec.online.samples import Batch
from hf_smartspec.online.students import student_of

from ..models import new_model

TEXTS = torch.arange(3, 67).reshape(8, 8)
NEW = {"max_new_tokens": 12, "eos_token_id": None}


@pytest.mark.parametrize("architecture", ["t5", "bart"])
def test_a_draft_behind_an_encoder_learns_what_it_is_served(architecture):
    """Answers differ from text to text from the first token on: what the encoder reads is all there is to go by."""
    target, draft = new_model(architecture), new_model(architecture, seed=1, std=0.05)
    online = OnlineDistillation(
        background=False, every_requests=8, learning_rate=3e-3, passes=30, shadow=0, tolerance=1.0, eviction="newest"
    )
    config = SmartSpecConfig(draft, num_nodes=3, online=online)
    shares = []
    with hf_smartspec.enabled(target):
        plain = target.generate(TEXTS, **NEW)
        for _ in range(6):
            assert torch.equal(target.generate(TEXTS, **NEW, assistant=config), plain)
            shares.append(target.smartspec_statistics.last.acceptance_rate)
    assert shares[-1] > shares[0] + 0.2, shares
    online.close()


def test_samples_hold_what_the_encoder_has_read():
    target, draft = new_model("t5"), new_model("t5", seed=1)
    online = OnlineDistillation(background=False, every_requests=100, shadow=0)
    ids = torch.tensor([[5, 6, 7, 8], [0, 0, 9, 10]])
    config = SmartSpecConfig(draft, num_nodes=2, online=online)
    with hf_smartspec.enabled(target):
        output = target.generate(ids, attention_mask=(ids > 0).long(), **NEW, assistant=config)
    (learner,) = online._learners.values()
    samples = learner._buffer.new
    assert [item.encoded.tolist() for item in samples] == [[5, 6, 7, 8], [9, 10]]
    batch = Batch.of(samples, torch.device("cpu"))
    assert torch.equal(batch.ids, output)
    (found,) = student_of(target).predictions(batch)
    assert torch.equal(found.logits.argmax(-1), output[:, 1:].flatten())
    online.close()


def test_drafts_that_hear_cannot_learn():
    target, draft = new_model("whisper"), new_model("whisper", seed=1)
    online = OnlineDistillation(background=False)
    with hf_smartspec.enabled(target), pytest.raises(ValueError, match="hears, or looks at the target's encoder"):
        target.generate(torch.zeros(1, 8, 40), assistant=SmartSpecConfig(draft, online=online), max_new_tokens=2)
