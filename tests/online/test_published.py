"""The preset "published" is algorithm 1 of Online Speculative Decoding, held against a plain, slow form of it."""

import pytest
import torch
from torch.nn.functional import kl_div

from hf_smartspec import Engine, OnlineDistillation, SmartSpecConfig, enable
from hf_smartspec.online.learner import Learner

from .helpers import are_equal, new_drafter, new_target, weights_of

K, NUM_TOKENS, INTERVAL = 5, 12, 8


@pytest.fixture
def target():
    return enable(new_target())


@torch.no_grad()
def answer(target, prompt):
    return target.generate(torch.tensor([prompt]), max_new_tokens=NUM_TOKENS, do_sample=False)[
        0, len(prompt) :
    ].tolist()


@torch.no_grad()
def errors_of(draft, prompt, response) -> list[int]:
    """Algorithm 1, lines 9-17: places where the first wrong one of up to k proposals stood."""
    found, done = [], 0
    while done < len(response):
        text = [*prompt, *response[:done]]
        for place in range(done, min(done + K, len(response), NUM_TOKENS - 1)):  # the last one is the target's own
            proposal = int(draft(torch.tensor([text])).logits[0, -1].argmax())
            if proposal != response[place]:
                found.append(place)
                break
            text.append(proposal)
            done += 1
        done += 1  # the target's own token
    return found


def test_algorithm_1(target, monkeypatch):
    """I = 8 requests: each is learnt where its proposals were wrong, by KL over all tokens, and Q is released."""
    draft = new_drafter("draft", target)
    online = OnlineDistillation("published", learning_rate=1e-3)
    kept = []
    keep = Learner._keep
    monkeypatch.setattr(Learner, "_keep", lambda learner, sample: (kept.append(sample), keep(learner, sample)))
    before, losses = weights_of(draft), []
    prompts = [[5 + number, 6, 7, 20 + number] for number in range(INTERVAL)]
    wanted = {tuple(prompt): answer(target, prompt) for prompt in prompts}
    places = {prompt: errors_of(draft, prompt, response) for prompt, response in wanted.items()}
    with torch.no_grad():
        for prompt, response in wanted.items():  # equation 3, "KL"
            text = torch.tensor([[*prompt, *response]])
            p, q = (model(text).logits[0, len(prompt) - 1 : -1].log_softmax(-1) for model in (target, draft))
            losses += kl_div(q, p, log_target=True, reduction="none").sum(-1)[places[prompt]].tolist()
    assistant = SmartSpecConfig(draft, num_nodes=K, width=1)
    with Engine(target, assistant, max_batch_size=1, online=online) as engine:
        for number, prompt in enumerate(prompts, 1):
            output = engine.get_result(engine.add_request(prompt, max_new_tokens=NUM_TOKENS))
            assert output.generated_tokens == wanted[tuple(prompt)]
            assert are_equal(before, weights_of(draft)) == (number < INTERVAL)
    assert [sample.errors.nonzero()[0].tolist() for sample in kept] == list(places.values()) != [[]] * INTERVAL
    assert all(sample.top_probs.shape[1] == target.config.vocab_size for sample in kept)
    (counts,) = online.statistics.values()
    assert (counts.requests, counts.updates, counts.swaps, counts.buffer_bytes) == (INTERVAL, 1, 1, 0)
    assert counts.steps == 1 and counts.loss == pytest.approx(sum(losses) / len(losses), rel=1e-3)


def test_other_options_change_a_preset():
    online = OnlineDistillation("published", every_requests=2, top_k=8)
    assert (online.options.every_requests, online.options.top_k, online.options.positions) == (2, 8, "errors")
    with pytest.raises(ValueError, match="`preset` must be one of"):
        OnlineDistillation("osd")
