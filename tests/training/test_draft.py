"""Draft models learn what the target thinks, not only what it says."""

import pytest
import torch
from torch.nn.functional import kl_div

from hf_smartspec.commands.train.kinds import shortened
from hf_smartspec.training.draft import DraftTraining
from hf_smartspec.training.texts import Text, collate

from ..models import new_model

MAX_LENGTH = 40


@pytest.fixture
def target():
    return new_model("llama")


@pytest.fixture
def texts():
    generator = torch.Generator().manual_seed(0)
    draw = lambda num: torch.randint(3, 40, (num,), generator=generator).numpy()  # noqa: E731
    return [Text(draw(prompt), draw(response)) for prompt, response in ((5, 9), (3, 14), (8, 6))]


def positions_of(batch):
    """Of each row, those whose next token belongs to the response."""
    return [
        (row, place)
        for row, labels in enumerate(batch["labels"])
        for place in range(len(labels) - 1)
        if labels[place + 1] != -100
    ]


def test_the_loss_is_the_divergence_from_the_target_where_it_decodes(target, texts):
    draft = new_model("llama", num_hidden_layers=1)
    batch = collate([item.example(MAX_LENGTH) for item in texts])
    own, others = (model(batch["input_ids"]).logits.log_softmax(-1) for model in (draft, target))
    where = positions_of(batch)
    own, others = (torch.stack([lines[place] for place in where]) for lines in (own, others))
    entropy = -(others.exp() * others).sum(-1).mean()
    expected = kl_div(own, others, reduction="none", log_target=True).sum(-1).mean() + entropy
    loss = DraftTraining(target, draft)(**batch)["loss"]
    assert torch.allclose(loss, expected, atol=1e-5)
    assert len(where) == 9 + 14 + 6


def test_learning_changes_the_draft_alone_and_brings_it_to_the_target(target, texts):
    module = DraftTraining(target, shortened(target, 1))
    kept = {name: item.clone() for name, item in target.state_dict().items()}
    batch = collate([item.example(MAX_LENGTH) for item in texts])
    optimizer = torch.optim.AdamW(module.parameters(), lr=3e-3)
    losses = []
    for _ in range(30):
        losses.append(module(**batch)["loss"])
        optimizer.zero_grad()
        losses[-1].backward()
        optimizer.step()
    assert losses[-1] < losses[0] - 0.02
    assert all(torch.equal(item, kept[name]) for name, item in target.state_dict().items())


@pytest.mark.parametrize("architecture", ["llama", "gemma2"])
def test_a_shortened_model_with_all_layers_is_the_target(architecture):
    target = new_model(architecture)
    ids = torch.arange(3, 20)[None]
    num_layers = target.config.num_hidden_layers
    assert torch.equal(shortened(target, num_layers)(ids).logits, target(ids).logits)
    short = shortened(target, 1)
    assert short.config.num_hidden_layers == 1 and target.config.num_hidden_layers == num_layers > 1
    states = target(ids, output_hidden_states=True).hidden_states[1]
    assert torch.allclose(short.get_decoder().norm(states), short.get_decoder()(ids).last_hidden_state, atol=1e-6)


def test_accuracy_is_how_often_the_response_goes_on_as_the_draft_says(target, texts):
    module = DraftTraining(target, shortened(target, 1))
    hits = total = 0
    for item in texts:
        batch = collate([item.example(MAX_LENGTH)])
        best = module.draft(batch["input_ids"]).logits[0].topk(3).indices
        for _, place in positions_of(batch):
            hits += int(batch["input_ids"][0, place + 1] in best[place])
            total += 1
    (shares,) = module.accuracy(texts, MAX_LENGTH, batch_size=2)
    assert shares[3] == pytest.approx(hits / total) and shares[1] <= shares[3] <= shares[8]


def test_texts_without_a_response_teach_nothing(target):
    module = DraftTraining(target, shortened(target, 1))
    ids = torch.arange(3, 9)[None]
    loss = module(ids, torch.full_like(ids, -100))["loss"]
    loss.backward()
    gradients = [item.grad for item in module.parameters() if item.grad is not None]
    assert float(loss.detach()) == 0 and not any(item.any() for item in gradients)
