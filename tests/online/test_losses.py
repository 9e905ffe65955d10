"""Losses are the divergences that they are named after, as far as the target's distribution is known."""

import pytest
import torch
from torch.nn.functional import cross_entropy, kl_div

from hf_smartspec.online.losses import LOSSES, divergence, overlap

V, N = 23, 7


@pytest.fixture
def logits():
    return torch.randn(2, N, V, generator=torch.Generator().manual_seed(0)).double() * 2


def top(logits, k):
    best = logits.softmax(-1).topk(k)
    return best.indices, best.values


def exact(p, q, loss, beta):
    """Equation 3, over the whole vocabulary."""
    kl = lambda p, q: kl_div(q.log(), p, reduction="none").sum(-1)  # noqa: E731
    if loss == "kl":
        return kl(p, q)
    if loss == "reverse_kl":
        return kl(q, p)
    mixed = beta * p + (1 - beta) * q
    return beta * kl(p, mixed) + (1 - beta) * kl(q, mixed)


@pytest.mark.parametrize("beta", [0.5, 0.2])
@pytest.mark.parametrize("temperature", [1.0, 2.0])
@pytest.mark.parametrize("loss", ["kl", "reverse_kl", "jsd"])
def test_with_all_tokens_it_is_the_divergence_itself(logits, loss, temperature, beta):
    target, drafter = logits
    ids, probs = top(target, V)
    found = divergence(drafter, ids, probs, ids[:, 0], loss, beta, temperature)
    p, q = (target / temperature).softmax(-1), (drafter / temperature).softmax(-1)
    torch.testing.assert_close(found, exact(p, q, loss, beta), rtol=0, atol=2e-5, check_dtype=False)


@pytest.mark.parametrize("k", [1, 4, 20])
@pytest.mark.parametrize("loss", ["kl", "reverse_kl", "jsd"])
def test_other_tokens_count_as_one(logits, loss, k):
    target, drafter = logits
    ids, probs = top(target, k)
    p, q = target.softmax(-1), drafter.softmax(-1)
    coarse = [torch.cat([x.gather(1, ids), 1 - x.gather(1, ids).sum(-1, keepdim=True)], dim=-1) for x in (p, q)]
    found = divergence(drafter, ids, probs, ids[:, 0], loss)
    torch.testing.assert_close(found, exact(*coarse, loss, 0.5), rtol=0, atol=2e-5, check_dtype=False)
    assert (found <= exact(p, q, loss, 0.5) + 1e-4).all()  # data processing


def test_labels_are_learnt_by_cross_entropy(logits):
    target, drafter = logits
    tokens = target.argmax(-1)
    found = divergence(drafter, *top(target, 3), tokens, "labels")
    torch.testing.assert_close(found.mean(), cross_entropy(drafter.float(), tokens))


@pytest.mark.parametrize("loss", LOSSES)
def test_tokens_that_a_drafter_does_not_know_count_nowhere(logits, loss):
    target, drafter = logits
    ids, probs = top(target, 6)
    unknown = ids.clone()
    unknown[:, 2] = -1
    drafter = drafter.clone().requires_grad_(True)
    losses = divergence(drafter, unknown, probs, unknown[:, 2], loss)
    losses.sum().backward()
    assert losses.isfinite().all() and drafter.grad.isfinite().all()
    if loss == "labels":
        assert not losses.any() and not drafter.grad.any()


@pytest.mark.parametrize("loss", LOSSES)
def test_a_drafter_that_is_certain_has_finite_losses_and_gradients(loss):
    logits = torch.tensor([[200.0, -200.0, 0.0], [-200.0, 200.0, 0.0]], requires_grad=True)
    ids, probs = torch.tensor([[0, 1], [0, 1]]), torch.tensor([[1.0, 0.0], [1.0, 0.0]])
    losses = divergence(logits, ids, probs, ids[:, 0], loss)
    losses.sum().backward()
    assert losses.isfinite().all() and logits.grad.isfinite().all()
    assert losses[0] < losses[1]


def test_the_overlap_is_how_often_samples_are_accepted(logits):
    target, drafter = logits
    p, q = target.softmax(-1), drafter.softmax(-1)
    torch.testing.assert_close(overlap(drafter, *top(target, V)), torch.minimum(p, q).sum(-1), check_dtype=False)
