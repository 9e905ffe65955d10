"""The example of reinforcement learning: the same training with speculation and without."""

import pytest
import torch

from .examples import load_example

pytest.importorskip("trl")

SHORT = ["--prompts", "2", "--generations", "2", "--epochs", "2", "--max-new-tokens", "16"]


@pytest.fixture(scope="module")
def example():
    return load_example("grpo")


def losses_of(trainer):
    return [item["loss"] for item in trainer.state.log_history if "loss" in item]


@pytest.mark.end_to_end
@pytest.mark.filterwarnings("ignore::FutureWarning")  # of names that TRL still uses
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_training_does_not_depend_on_what_drafts(example):
    plain, fast = (example.main(["--assistant", name, *SHORT]) for name in ("none", "online"))
    assert losses_of(plain) == losses_of(fast) and len(losses_of(fast)) == 4
    weights = zip(plain.model.parameters(), fast.model.parameters())
    assert all(torch.equal(*pair) for pair in weights)
    assert plain.model.smartspec_statistics.total.accepted_tokens == 0
    assert fast.model.smartspec_statistics.total.accepted_tokens > 0


def test_short_answers_in_form_earn_most(example):
    texts = ["#### 12", "It is 12.\n#### 12", "It is 12."]
    values = example.reward([[{"role": "assistant", "content": text}] for text in texts])
    assert values == sorted(values, reverse=True) and values[1] > 0.9 > values[2]
