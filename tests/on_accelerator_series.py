"""
All levels of a draft as one launch, where the same comes again, with the same trees. `test_accelerator.py` runs this
file in a process of its own.
"""
# ruff: noqa: F401, F811  (fixtures)

import numpy as np
import pytest
import torch

from hf_smartspec import DraftModelCandidates, SmartSpecConfig
from hf_smartspec.drafts.price import LevelPrice
from hf_smartspec.goodput.policy import FixedLength
from hf_smartspec.target_model.graphs import recorder
from hf_smartspec.target_model.model_state import state_of

from .accelerator import DEVICE, Recorder
from .accelerator_cases import LENGTHS, OPTIONS, SOURCES, TREE, generate, tokens_of
from .covering import exhaustive
from .generate.helpers import noisy_copy
from .on_accelerator import (
    accelerator,
    on_cpu,
    on_device,
    steps,
    without_inference_mode,
)

pytestmark = pytest.mark.usefixtures("every_trial")


class Trusting(FixedLength):
    """Drafts as deep and wide as they are worth; by how much probabilities are corrected differs at every step."""

    def __init__(self):
        super().__init__(TREE)
        self._steps = 0

    def price(self, rows, stage):
        self._steps += 1
        trust = 0.5 + self._steps % 5 / 4
        return LevelPrice(call=0.1, row=0.0, node=0.02, trust=trust)


@pytest.fixture
def trees(monkeypatch):
    """All that draft models propose."""
    proposed, propose = [], DraftModelCandidates.propose

    def noting(source, *args, **kwargs):
        found = propose(source, *args, **kwargs)
        proposed.extend(found)
        return found

    monkeypatch.setattr(DraftModelCandidates, "propose", noting)
    monkeypatch.setitem(SOURCES, "trusting", lambda draft: SmartSpecConfig(draft, policy=Trusting()))
    return proposed


def unrecorded(models, trees, monkeypatch, *args):
    """`drafted`, launched call by call."""
    with monkeypatch.context() as patch:
        patch.setenv("HF_SMARTSPEC_GRAPHS", "0")
        return drafted(models, trees, *args)


def check_same(found, others):
    assert len(found) == len(others) > 3
    for tree, other in zip(found, others):
        assert tree.tokens.tolist() == other.tokens.tolist() and tree.parents.tolist() == other.parents.tolist()
        np.testing.assert_allclose(tree.probs, other.probs, rtol=1e-4, atol=1e-6)


class SeriesRecorder(Recorder):
    """Counts what series are recorded, which are known by what they find, and replayed; some at fault."""

    num_series = num_series_replays = 0
    fault = None

    def record(self, function):
        replay, result = super().record(function)
        if result.dtype != torch.int32:
            return replay, result
        self.num_series += 1
        if self.fault is refuse:
            raise RuntimeError("not to be recorded")

        def counted():
            self.num_series_replays += 1
            if self.fault is None:
                replay()
            else:
                self.fault(replay, result)

        return counted, result


def refuse():
    """Series are not recorded."""


@pytest.fixture
def recorders(on_device, accelerator, monkeypatch):
    """All that are made; what other tests have recorded is forgotten."""
    made: list[SeriesRecorder] = []
    monkeypatch.setitem(recorder._RECORDERS, DEVICE, lambda device: made.append(SeriesRecorder(device)) or made[-1])
    for model in on_device:
        state_of(model).memory = None
    yield made
    for model in on_device:
        state_of(model).memory = None


def drafted(models, trees, source, name, lengths=LENGTHS):
    """Tokens and trees of one call."""
    trees.clear()
    output = generate(models, source, OPTIONS[name], lengths=lengths)
    assert output.statistics.accepted_tokens > 0
    return tokens_of(output), list(trees)


CASES = [("tree", "greedy"), ("trusting", "sampled")]
MORE = [("chain", "greedy"), ("chain", "warped"), ("tree", "sampled"), ("trusting", "greedy")]


@pytest.mark.parametrize(("source", "name"), [*CASES, *exhaustive(*MORE)])
def test_a_draft_is_one_launch_whatever_its_levels(on_device, steps, trees, recorders, monkeypatch, source, name):
    tokens, own = unrecorded(on_device, trees, monkeypatch, source, name, (9,))
    assert max(max(tree.depths.tolist(), default=0) for tree in own) > 2
    for _ in range(6):
        steps.clear()
        found, again = drafted(on_device, trees, source, name, (9,))
        assert found == tokens
        check_same(again, own)
    replays = [counts["replays"] for counts in steps[1:]]  # without the first one, which finds memory anew
    num_drafts = sum(len(tree) > 0 for tree in again[1:])
    assert sum(replays) == len(replays) + num_drafts and max(replays) == 2, "one of the target, and one of the draft"
    assert max(counts["waits"] for counts in steps) == 2
    assert max(counts["uploads"] for counts in steps) <= 2 + 3 * (name != "greedy" or source != "chain")
    if name == "greedy":
        assert min(counts["dispatched"] for counts in steps) < 30, (
            "what is left are copies, and moves of accepted nodes"
        )


@pytest.mark.parametrize(
    ("source", "name"), [("chain", "sampled"), *exhaustive(*CASES, ("chain", "greedy"), ("chain", "warped"))]
)
def test_many_rows(on_device, trees, recorders, monkeypatch, source, name):
    tokens, own = unrecorded(on_device, trees, monkeypatch, source, name)
    num_series = []
    for _ in range(5):
        found, again = drafted(on_device, trees, source, name)
        assert found == tokens
        check_same(again, own)
        num_series.append(sum(item.num_series_replays for item in recorders))
    assert num_series[-1] > num_series[-2] > 0


def wrong(replay, result):
    """The next token in place of each."""
    replay()
    result.add_(1)


def idle(replay, result):
    """Nothing is done."""


@pytest.mark.parametrize("fault", [wrong, *exhaustive([idle], [refuse])])
def test_series_that_cannot_be_recorded_or_find_something_else_are_launched(
    on_device, trees, recorders, monkeypatch, fault
):
    """Of single forwards, recordings serve all the same."""
    tokens, own = unrecorded(on_device, trees, monkeypatch, "chain", "greedy", (9,))
    monkeypatch.setattr(SeriesRecorder, "fault", staticmethod(fault))
    numbers = []
    for _ in range(6):
        found, again = drafted(on_device, trees, "chain", "greedy", (9,))
        assert found == tokens
        check_same(again, own)
        numbers.append([sum(getattr(item, name) for item in recorders) for name in ("num_series", "num_replays")])
    (*_, (earlier, fewer), (num_series, num_replays)) = numbers
    assert earlier == num_series > 0, "of each shape once, or of none"
    assert num_replays > fewer + len(again), "level by level"


def test_series_of_other_weights_are_forgotten(on_cpu, on_device, trees, recorders, monkeypatch):
    draft = noisy_copy(on_cpu[1], 0.0).to(DEVICE)
    models = on_device[0], draft
    for _ in range(5):
        before = drafted(models, trees, "chain", "greedy", (9,))
    num_series = sum(item.num_series_replays for item in recorders)
    assert num_series > 0
    draft.lm_head.weight = torch.nn.Parameter(draft.lm_head.weight.detach().roll(1, 0))
    trees.clear()
    generate(models, "chain", {}, lengths=(9,))
    own = list(trees)
    trees.clear()
    monkeypatch.setenv("HF_SMARTSPEC_GRAPHS", "0")
    generate(models, "chain", {}, lengths=(9,))
    check_same(own, trees)
    assert [tree.tokens.tolist() for tree in own] != [tree.tokens.tolist() for tree in before[1]]
