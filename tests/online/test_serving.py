"""Learning while requests are served: outputs stay, weights change between steps, and only spare capacity is used."""

import gc
import weakref

import pytest
import torch
from transformers import GenerationMixin

from hf_smartspec import (
    DraftModelCandidates,
    Engine,
    OnlineDistillation,
    RoutedCandidates,
    SmartSpecConfig,
    enable,
)
from hf_smartspec.goodput import FixedLength
from hf_smartspec.online.learner import Learner
from hf_smartspec.target_model.written import written_decoder

from ..covering import part_of
from ..serving.helpers import check_all, random_requests
from .helpers import EAGER, KINDS, TIMEOUT, are_equal, generate, new_drafter, new_target, weights_of


@pytest.fixture
def target():
    return enable(new_target(head_dim=16))  # for which heads have compiled code


@pytest.fixture
def swaps(monkeypatch):
    """Every step begins with other weights, as long as anything has been learnt."""
    count = []
    original = OnlineDistillation.between_steps

    def between_steps(self, loop, num_running, num_waiting):
        for learner in self._learners.values():
            weights = learner.student.weights()
            sign = 1 if len(count) % 2 else -1
            learner._pending = [item * (1 + 0.05 * sign) for item in weights]
        before = sum(item.swaps for item in self.statistics.values())
        original(self, loop, num_running, num_waiting)
        count.append(sum(item.swaps for item in self.statistics.values()) - before)

    monkeypatch.setattr(OnlineDistillation, "between_steps", between_steps)
    return count


@pytest.mark.parametrize("kind", part_of(KINDS, "draft", "medusa"))
def test_outputs_with_other_weights_at_every_step(target, kind, swaps):
    online = OnlineDistillation(background=False, **EAGER)
    assistant = SmartSpecConfig(new_drafter(kind, target), num_nodes=4)
    with Engine(target, assistant, max_batch_size=4, max_prefill_tokens=8, online=online) as engine:
        outputs = check_all(engine, target, random_requests(14, seed=3))
    assert sum(output.statistics.drafted_tokens for output in outputs) > 0
    assert swaps.count(1) > 20
    assert sum(item.updates for item in online.statistics.values()) > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_drafts_are_of_the_new_weights(target, dtype):
    """Also what a source has laid out, or computed, of the old ones."""
    draft = new_drafter("draft", target).to(dtype)
    online = OnlineDistillation(background=False, **EAGER)
    online.recorders([source := DraftModelCandidates(draft, num_nodes=4)])
    prompt = torch.tensor([5, 6, 7]).numpy()
    source.start("a", prompt)
    first = source.propose(["a"], [4])[0]
    (learner,) = online._learners.values()
    assert source._forward is not None and written_decoder(draft) is not None
    other = new_drafter("draft", target).to(dtype)
    for item in other.parameters():
        item.mul_(-1)
    learner._pending = [dict(other.named_parameters())[name].clone() for name, _ in learner.student.parameters]
    online.between_steps(object.__new__(_Loop), 1, 0)
    second = source.propose(["a"], [4])[0]
    wanted = DraftModelCandidates(other, num_nodes=4)
    wanted.start("b", prompt)
    assert second.tokens.tolist() == wanted.propose(["b"], [4])[0].tokens.tolist() != first.tokens.tolist()


class _Loop:
    pass


@pytest.mark.parametrize("kind", KINDS)
def test_calls_of_generate_teach(target, kind):
    online = OnlineDistillation(background=False, **EAGER)
    drafter = new_drafter(kind, target)
    before = [item.clone() for item in drafter.parameters()]
    for _ in range(3):
        generate(target, online, drafter)
    (counts,) = online.statistics.values()
    assert (counts.requests, counts.tokens, counts.updates, counts.swaps) == (6, 72, 3, 3)
    assert not all(torch.equal(*pair) for pair in zip(before, drafter.parameters()))
    assert "6 requests" in online.report()


def test_at_the_same_requests_weights_are_the_same(target):
    found = []
    for _ in range(2):
        online, drafter = OnlineDistillation(background=False, **EAGER), new_drafter("draft", target)
        for _ in range(3):
            generate(target, online, drafter)
        found.append([item.clone() for item in drafter.parameters()])
    assert all(torch.equal(*pair) for pair in zip(*found))


def test_several_drafters_learn_each_by_itself(target):
    online = OnlineDistillation(background=False, **EAGER)
    first, second = new_drafter("draft", target), new_drafter("draft", target)
    generate(target, online, first)
    generate(target, online, first)
    generate(target, online, second)
    assert [item.requests for item in online.statistics.values()] == [4, 2]
    assert len(online.statistics) == 2


def test_of_routed_requests_each_teaches_the_drafter_that_it_went_to(target):
    online = OnlineDistillation(background=False, **EAGER)
    drafters = {"a": new_drafter("draft", target), "b": new_drafter("medusa", target)}
    routed = RoutedCandidates(drafters)
    ids = torch.tensor([[5, 6, 7, 8], [9, 10, 11, 12], [13, 14, 15, 16]])
    assistant = SmartSpecConfig(routed, tag=["a", "b", "b"], online=online)
    before = {name: weights_of(drafter) for name, drafter in drafters.items()}
    output = target.generate(ids, assistant=assistant, max_new_tokens=12)
    assert torch.equal(output, GenerationMixin.generate(target, ids, max_new_tokens=12))
    assert sorted(item.requests for item in online.statistics.values()) == [1, 2]
    assert not any(are_equal(weights_of(drafter), before[name]) for name, drafter in drafters.items())


class Told(FixedLength):
    """A policy that keeps what it is told of sources that have learnt."""

    def __init__(self):
        super().__init__(3)
        self.renewals = []

    def renew(self, source, number):
        self.renewals.append((source, number))


def test_policies_are_told_of_drafters_that_have_become_better(target):
    policy, draft = Told(), new_drafter("draft", target)
    online = OnlineDistillation(background=False, **EAGER)
    with Engine(target, SmartSpecConfig(draft, policy=policy), online=online) as engine:
        name = engine._assistant.source.name
        for _ in range(3):
            engine.get_result(engine.add_request([5, 6, 7], max_new_tokens=6))
        gates = engine._runner.loop.drafting.sources.gates
        first = gates[name]
        (learner,) = online._learners.values()
        learner._num_renewals += 1
        learner._pending = learner.student.weights()
        for _ in range(2):
            engine.get_result(engine.add_request([5, 6, 7], max_new_tokens=6))
    numbers = [number for source, number in policy.renewals if source == name]
    assert numbers == sorted(numbers) and len(set(numbers)) > 1
    assert gates[name] is not first


def test_in_a_list_the_drafter_learns_from_all_requests(target):
    online = OnlineDistillation(background=False, **EAGER)
    generate(target, online, ["suffix", new_drafter("draft", target)])
    (counts,) = online.statistics.values()
    assert counts.requests == 2


def test_presets_have_nothing_to_learn(target):
    with pytest.raises(ValueError, match="nothing that can learn"):
        generate(target, OnlineDistillation(), "suffix")
    with pytest.raises(ValueError, match="nothing that can learn"):
        Engine(target, "auto", online=OnlineDistillation())
    with pytest.raises(TypeError, match="`online` must be an OnlineDistillation"):
        SmartSpecConfig("suffix", online=True)


def test_a_target_that_drafts_for_itself_is_left_as_it_is(target):
    before = weights_of(target)
    with pytest.raises(ValueError, match="is the target's own"):
        generate(target, OnlineDistillation(background=False, **EAGER), target)
    with pytest.raises(ValueError, match="is the target's own"):
        Engine(target, RoutedCandidates({"a": new_drafter("draft", target), "b": target}), online=OnlineDistillation())
    assert are_equal(weights_of(target), before)


@pytest.mark.parametrize("kind", KINDS)
def test_targets_get_no_gradients(target, kind):
    target.requires_grad_(True)
    online = OnlineDistillation(background=False, **EAGER)
    generate(target, online, new_drafter(kind, target))
    assert [item.updates for item in online.statistics.values()] == [1]
    assert all(item.grad is None for item in target.parameters())


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_calls_in_inference_mode_teach(target, kind, background):
    online = OnlineDistillation(background=background, **EAGER)
    drafter = new_drafter(kind, target)
    for _ in range(2):
        with torch.inference_mode():
            generate(target, online, drafter)
        assert online.wait(TIMEOUT)
    online.close()
    (counts,) = online.statistics.values()
    assert counts.updates >= counts.swaps >= 2


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("verb", ["_learn", "publish"])
def test_where_one_drafter_fails_to_learn_the_others_go_on(target, monkeypatch, caplog, verb, background):
    original, failing = getattr(Learner, verb), set()

    def fail(self, *args):
        if self in failing:
            raise RuntimeError("no memory")
        return original(self, *args)

    monkeypatch.setattr(Learner, verb, fail)
    online = OnlineDistillation(background=background, **EAGER)
    drafters = {"a": new_drafter("draft", target), "b": new_drafter("medusa", target)}
    assistant = SmartSpecConfig(RoutedCandidates(drafters), tag=["a", "b"], online=online)
    ids = torch.tensor([[5, 6, 7, 8], [9, 10, 11, 12]])
    for _ in range(4):
        output = target.generate(ids, assistant=assistant, max_new_tokens=12)
        assert torch.equal(output, GenerationMixin.generate(target, ids, max_new_tokens=12))
        failing.add(next(iter(online._learners.values())))
        assert online.wait(TIMEOUT)
    online.close()
    broken, sound = online.statistics.values()
    assert "no memory" in broken.failure and broken.buffer_bytes == 0 and broken.requests < 4
    assert not sound.failure and sound.swaps >= 3
    assert [record.message.count("learns no more") for record in caplog.records].count(1) == 1
    assert "learns no more: RuntimeError" in online.report()


def test_drafters_that_nobody_uses_any_more_are_let_go(target, tmp_path):
    online, path = OnlineDistillation(background=False, checkpoint=tmp_path, **EAGER), None
    for _ in range(2):
        draft = new_drafter("draft", target)
        generate(target, online, draft)
        (learner,), (path,) = online._learners.values(), tmp_path.iterdir()
        assert learner.checkpoint.path == path  # what one has learnt, the next one of this name goes on with
        weights = [weakref.ref(draft), *map(weakref.ref, learner.student.copy.parameters()), weakref.ref(learner)]
        del draft, learner
        gc.collect()
        gc.collect()  # what goes with it
        assert not any(item() is not None for item in weights) and not online.statistics
