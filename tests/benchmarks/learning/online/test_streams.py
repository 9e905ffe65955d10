"""Acceptance as Online Speculative Decoding measures it."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.learning.online.parts import blended
from benchmarks.learning.online.streams import Task, proposed, served
from benchmarks.learning.online.tokens import most_improved
from hf_smartspec.candidates.committed import LAST
from hf_smartspec.online.students import student_of
from tests.online.helpers import new_drafter, new_target, samples_of


@given(st.lists(st.booleans(), max_size=30), st.integers(1, 6))
def test_proposals_of_algorithm_1(is_accepted, k):
    """Lines 10-16, step by step: of k proposals, those up to the first wrong one are looked at; one token is added."""
    looked_at, done = [], 0
    while done < len(is_accepted):
        for place in range(done, min(done + k, len(is_accepted))):
            looked_at.append(place)
            if not is_accepted[place]:
                break
            done += 1
        done += 1
    assert np.flatnonzero(proposed(np.array(is_accepted, bool), k)).tolist() == looked_at


@pytest.mark.parametrize("is_greedy", [True, False])
def test_alpha_is_the_mean_over_proposals(is_greedy):
    """It is a share of proposals of greedy texts, and the mean of sum min(p, q) of sampled ones."""
    target = new_target()
    draft = new_drafter("draft", target)
    (sample,) = samples_of(target, 1)
    object.__setattr__(sample, "is_greedy", is_greedy)
    (found,) = served(student_of(draft), [sample], 3, np.random.default_rng(0))
    text = torch.tensor([[*sample.prompt, *sample.response]])
    with torch.no_grad():
        q = draft(text).logits[0, len(sample.prompt) - 1 : -1].float().softmax(-1)
    if is_greedy:
        chances = (q.argmax(-1).numpy() == sample.response).astype(float)
    else:
        chances = torch.minimum(q.gather(1, sample.top_ids.long()), sample.top_probs.float()).sum(-1).numpy()
    is_accepted = np.random.default_rng(0).random(len(chances)) < chances
    wanted = proposed(is_accepted, 3)
    assert found.rate == pytest.approx(chances.mean(), abs=1e-5)
    assert found.alpha == pytest.approx(chances[wanted].mean(), abs=1e-5)
    assert found.errors.tolist() == (wanted & ~is_accepted).tolist()


def test_errors_of_heads_stand_at_their_tokens():
    """Heads have no draft in the place of a response's first token."""
    target = new_target()
    heads = new_drafter("medusa", target)
    samples = samples_of(target, 3, layers=student_of(heads).hidden_layers)
    for sample, found in zip(samples, served(student_of(heads), samples, 5, np.random.default_rng(0))):
        assert found.errors.shape == sample.errors.shape and not found.errors[0]
        text = torch.from_numpy(np.concatenate([sample.prompt, sample.response]).astype(np.int64))
        first, num = len(sample.prompt) - 1, len(sample.response) - 1
        with torch.no_grad():
            drafted = heads.best(sample.hidden[LAST][first : first + num], 1)[0][:, 0, 0]
        is_right = np.array([False, *(drafted == text[first + 2 :]).tolist()])
        assert found.errors.any() and not (found.errors & is_right).any()


def test_tasks_give_way_to_one_another_linearly():
    """Appendix A.8: of two tasks, the probability of the first falls from 1 to 0."""
    tasks = [Task(name, [object() for _ in range(400)], [], []) for name in ("first", "second")]
    order = blended(tasks, 0)
    assert len(order) == len({id(sample) for _, sample in order}) == 800
    is_first = np.array([name == "first" for name, _ in order], float)
    shares = is_first.reshape(8, 100).mean(axis=1)
    assert shares[:6] == pytest.approx(1 - (np.arange(6) + 0.5) / 8, abs=0.15)  # at the end, one may have none left
    several = blended([*tasks, Task("third", [object() for _ in range(400)], [], [])], 0)
    assert several[0][0] == "first" and several[-1][0] == "third"


def test_tokens_that_gain_most_are_named():
    """Table 6, by rank of the gain; those that gain nothing are left out."""
    row = {
        "texts": ["a", "b", "c", "d"],
        "original": {"precision": [0.5, None, 0.1, 0.4]},
        "online": {"precision": [0.6, 0.9, 0.3, 0.2]},
    }
    assert most_improved(row, "precision", 15) == ["b", "c", "a"] and most_improved(row, "precision", 1) == ["b"]
