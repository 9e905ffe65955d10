"""Draft models with encoders of their own learn what they read, too."""

import numpy as np
import pytest
import torch

import hf_smartspec
from hf_smartspec import OnlineDistillation, SmartSpecConfig
from hf_smartspec.online.samples import Batch
from hf_smartspec.online.sampling import MixedWithEncodedTarget, sampled, taught

from ..covering import exhaustive
from ..models import new_model
from .helpers import student_with

TEXTS = torch.arange(3, 67).reshape(8, 8)
NEW = {"max_new_tokens": 12, "eos_token_id": None}


@pytest.mark.parametrize("architecture", ["t5", *exhaustive(["bart"])])
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
    (found,) = student_with(target).predictions(batch)
    assert torch.equal(found.logits.argmax(-1), output[:, 1:].flatten())
    online.close()


def test_drafts_that_hear_cannot_learn():
    target, draft = new_model("whisper"), new_model("whisper", seed=1)
    online = OnlineDistillation(background=False)
    with hf_smartspec.enabled(target), pytest.raises(ValueError, match="hears, or reads the target's encoder"):
        target.generate(torch.zeros(1, 8, 40), assistant=SmartSpecConfig(draft, online=online), max_new_tokens=2)


def test_what_a_target_thinks_of_texts_behind_its_encoder():
    target = new_model("t5")
    texts = [(np.array([5, 6, 7, 8]), np.array([11, 12, 13])), (np.array([9, 10]), np.array([14, 15]))]
    start = target.config.decoder_start_token_id
    for sample, (read, said) in zip(taught(target, texts, 4), texts):
        logits = target(
            input_ids=torch.tensor(read)[None], decoder_input_ids=torch.tensor([[start, *said[:-1]]])
        ).logits[0]
        wanted = logits.softmax(-1).topk(4)
        assert sample.prompt.tolist() == [start] and sample.encoded.tolist() == read.tolist()
        assert torch.equal(sample.top_ids[:, 0].long(), wanted.indices[:, 0])
        torch.testing.assert_close(sample.top_probs.float(), wanted.values, rtol=0, atol=2e-3)


def test_distributions_are_mixed_behind_encoders():
    target, draft = new_model("t5"), new_model("t5", seed=1)
    ids, mask = torch.tensor([[5, 6, 7, 8], [0, 0, 9, 10]]), torch.tensor([[1, 1, 1, 1], [0, 0, 1, 1]])
    processor = MixedWithEncodedTarget(target, ids, mask, 0.3)
    said = torch.tensor([[0], [0]])
    for _ in range(3):
        read = {"input_ids": ids, "attention_mask": mask, "decoder_input_ids": said}
        p, q = (model(**read).logits[:, -1].softmax(-1) for model in (target, draft))
        found = processor(said, q.log())
        torch.testing.assert_close(found.exp(), 0.3 * p + 0.7 * q, rtol=0, atol=1e-5)
        said = torch.cat([said, found.argmax(-1, keepdim=True)], dim=1)


def test_drafts_behind_encoders_speak_without_their_first_token():
    target, draft = new_model("t5"), new_model("t5", seed=1)
    for share in (0.0, 0.5):
        said = sampled(draft, target, [np.array([5, 6, 7, 8]), np.array([9, 10])], share, 6)
        assert len(said) == 2 and all(1 <= len(text) <= 6 for text in said)
