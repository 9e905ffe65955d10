"""When a change of the model's weights is noticed."""

import pytest
import torch
from torch import nn

from hf_smartspec.serving.memory import weights
from hf_smartspec.serving.memory.weights import WeightsVersion


@pytest.fixture
def clock(monkeypatch):
    now = [1.0]
    monkeypatch.setattr(weights, "perf_counter", lambda: now[0])
    return now


def change(model):
    with torch.no_grad():
        model.weight.add_(1.0)


def test_a_look_that_may_wait_sees_a_change_after_fifty_milliseconds(clock):
    model = nn.Linear(3, 2)
    version = WeightsVersion(model)
    first = version.look(may_wait=True)
    change(model)
    assert version.look(may_wait=True) == first
    clock[0] += 0.051
    assert version.look(may_wait=True) != first


def test_a_look_that_may_not_wait_sees_it_at_once_and_the_next_one_agrees(clock):
    model = nn.Linear(3, 2)
    version = WeightsVersion(model)
    first = version.look(may_wait=True)
    change(model)
    changed = version.look(may_wait=False)
    assert changed != first and version.look(may_wait=True) == changed, "keys and values are discarded once"


def test_steps_of_optimizers_are_seen_at_once(clock):
    model = nn.Linear(3, 2)
    version, optimizer = WeightsVersion(model), torch.optim.SGD(model.parameters(), 0.1)
    first = version.look(may_wait=True)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    assert version.look(may_wait=True) != first
