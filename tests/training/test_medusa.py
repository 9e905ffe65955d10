"""Heads learn what they are shown, and the target stays as it is."""

import shutil

import numpy as np
import pytest
import torch

from hf_smartspec import MedusaHeads
from hf_smartspec.training import loop
from hf_smartspec.training.checkpoints import newest_checkpoint
from hf_smartspec.training.loop import Schedule, train
from hf_smartspec.training.medusa import MedusaTraining, last_hidden_states
from hf_smartspec.training.texts import IGNORED, Text, collate, split

from ..models import new_model

MAX_LENGTH = 32


@pytest.fixture
def target():
    return new_model("llama")


def texts_of(num, seed=0):
    """Responses that go round in a circle, from anywhere on."""
    rng = np.random.default_rng(seed)
    circle = rng.permutation(np.arange(10, 40))
    starts = rng.integers(0, len(circle), num)
    return [
        Text(rng.integers(50, 90, 4), np.take(circle, np.arange(start, start + 20), mode="wrap")) for start in starts
    ]


def test_examples_learn_responses_only():
    (text,) = texts_of(1)
    example = text.example(MAX_LENGTH)
    assert example["input_ids"].tolist() == [*text.prompt, *text.response]
    assert example["labels"].tolist() == [IGNORED] * 4 + text.response.tolist()
    short = text.example(22)
    assert short["input_ids"].tolist() == [*text.prompt[2:], *text.response]
    batch = collate([example, short])
    assert batch["input_ids"].shape == (2, 24) and batch["labels"][1, 22:].tolist() == [IGNORED] * 2


def test_texts_of_one_prompt_stay_together():
    texts = [Text(np.array([number // 2]), np.array([number])) for number in range(40)]
    learnt, held_out = split(texts, 0.1)
    assert len(held_out) == 4 and len(learnt) == 36
    assert not {int(item.prompt[0]) for item in learnt} & {int(item.prompt[0]) for item in held_out}
    assert split(texts[:4], 0.01)[1] and split(texts[:4], 0.99)[0]
    with pytest.raises(ValueError, match="two different prompts"):
        split(texts[:2], 0.1)


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "gemma2"])
def test_the_loss_is_that_of_the_tokens_so_many_places_later(architecture):
    """The paper's Eq. 1, written out: weights 0.8 ** k, from the prompt's last token on."""
    target = new_model(architecture)
    module = MedusaTraining(target, num_heads=2)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(generator=torch.Generator().manual_seed(0), std=0.1)
    texts = texts_of(3)
    batch = collate([item.example(MAX_LENGTH) for item in texts])
    losses: list[list[torch.Tensor]] = [[], []]
    for row, text in enumerate(texts):
        ids = torch.tensor([*text.prompt, *text.response])
        states = target(ids[None], output_hidden_states=True).hidden_states[-1][0]
        torch.testing.assert_close(last_hidden_states(target, batch["input_ids"])[row, : len(ids)], states)
        for head in range(2):
            for place in range(len(text.prompt) - 1, len(ids) - head - 2):
                weight, bias = module.heads.blocks[head][0].weight, module.heads.blocks[head][0].bias
                x = states[place]
                x = x + torch.nn.functional.silu(weight @ x + bias)
                logits = target.get_output_embeddings().weight @ x
                losses[head].append(-logits.log_softmax(-1)[ids[place + head + 2]])
    expected = sum(0.8**head * torch.stack(own).mean() for head, own in enumerate(losses))
    torch.testing.assert_close(module(**batch)["loss"], expected)


def test_what_is_learnt_is_saved_loaded_and_resumed(target, tmp_path):
    before = {name: item.clone() for name, item in target.state_dict().items()}
    schedule = Schedule(steps=60, batch_size=8, max_length=MAX_LENGTH, learning_rate=3e-2)
    texts = texts_of(64)
    module = MedusaTraining(target, num_heads=2)
    begun = module.accuracy(texts_of(16), MAX_LENGTH)
    train(module, texts, tmp_path / "checkpoints", schedule)
    accuracy = module.accuracy(texts_of(16), MAX_LENGTH)
    for head in range(2):
        assert accuracy[head][1] > begun[head][1] + 0.15 and accuracy[head][1] <= accuracy[head][3] <= accuracy[head][8]
    assert all(torch.equal(item, before[name]) for name, item in target.state_dict().items())

    module.heads.save_pretrained(tmp_path, base_model_name_or_path="mine")
    heads = MedusaHeads.from_pretrained(tmp_path, target)
    states = torch.randn(3, target.config.hidden_size)
    torch.testing.assert_close(heads(states), module.heads(states))
    assert heads.outputs[0].data_ptr() == target.get_output_embeddings().weight.data_ptr()

    resumed = MedusaTraining(target, num_heads=2)
    train(resumed, texts, tmp_path / "checkpoints", schedule, newest_checkpoint(tmp_path / "checkpoints"))
    assert torch.equal(resumed.heads(states), module.heads(states)), "there is nothing left to do"


def test_training_goes_on_where_it_was_interrupted(target, tmp_path, monkeypatch):
    schedule = Schedule(steps=12, batch_size=4, max_length=MAX_LENGTH)
    texts, states = texts_of(32), torch.randn(3, target.config.hidden_size)
    whole = MedusaTraining(target, num_heads=2)
    train(whole, texts, tmp_path / "whole", schedule)

    forward, calls = MedusaTraining.forward, []

    def failing(self, input_ids, labels):
        calls.append(1)
        if len(calls) == 8:
            raise KeyboardInterrupt
        return forward(self, input_ids, labels)

    monkeypatch.setattr(loop, "SAVE_SECONDS", 0)
    with monkeypatch.context() as patch:
        patch.setattr(MedusaTraining, "forward", failing)
        with pytest.raises(KeyboardInterrupt):
            train(MedusaTraining(target, num_heads=2), texts, tmp_path / "parts", schedule)
    shutil.copytree(tmp_path / "parts", tmp_path / "others")
    resumed, newest = MedusaTraining(target, num_heads=2), newest_checkpoint(tmp_path / "parts")
    assert newest.step == 7
    train(resumed, texts, tmp_path / "parts", schedule, newest)
    torch.testing.assert_close(resumed.heads(states), whole.heads(states))
    other = new_model("llama", seed=1)
    found = newest_checkpoint(tmp_path / "others")
    before = other.get_output_embeddings().weight.clone()
    train(MedusaTraining(other, num_heads=2), texts, tmp_path / "others", schedule, found)
    assert torch.equal(other.get_output_embeddings().weight, before), "checkpoints hold nothing of the target"


def test_texts_that_are_too_short_teach_nothing(target):
    module = MedusaTraining(target, num_heads=2)
    loss = module(**collate([Text(np.array([3, 4]), np.array([5])).example(MAX_LENGTH)]))["loss"]
    loss.backward()
    assert float(loss) == 0.0
