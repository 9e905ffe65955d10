"""
What policies and sources learn from steps on an accelerator, without a wait of their own. `test_accelerator.py` runs
this file in a process of its own.
"""
# ruff: noqa: F401, F811  (fixtures)

from collections import Counter

import pytest

from hf_smartspec import PromptLookupCandidates, SmartSpecConfig
from hf_smartspec.target_model.forward.packed import PackedForward

from .accelerator import DEVICE
from .accelerator import counts as counted
from .accelerator_cases import (
    CHAIN,
    LENGTHS,
    OPTIONS,
    SOURCES,
    Priced,
    generate,
    tokens_of,
)
from .covering import exhaustive
from .on_accelerator import accelerator, expected, on_cpu, on_device, steps, without_inference_mode

pytestmark = pytest.mark.usefixtures("every_trial")


class Learning(Priced):
    """Notes what it learns, how many forwards had been launched by then, and whether the latest had been waited for."""

    def __init__(self, learns_late, launched):
        super().__init__(CHAIN)
        self.learns_late, self._launched, self.learnt, self.moments = learns_late, launched, [], []

    def observe(self, outcome):
        self.learnt.append((outcome.sizes, list(outcome.accepted), [line.tolist() for line in outcome.tokens]))
        self.moments.append((len(self._launched), counted["waits"] > self._launched[-1]))


@pytest.mark.parametrize(
    ("source", "name"),
    [
        *[("lookup", "warped"), ("chain", "greedy")],
        *exhaustive(("lookup", "greedy"), ("chain", "warped"), ("lookup", "penalty"), ("chain", "penalty")),
    ],
)
def test_policies_learn_while_the_device_computes(on_device, expected, accelerator, monkeypatch, source, name):
    """Of each step behind the launch of the next forward, and before its picks are waited for; the same, in order."""
    generate(on_device, source, OPTIONS[name])  # whatever there is to try out has been
    launched, run = [], PackedForward.run

    def noting(forward, planned):
        logits = run(forward, planned)
        if forward.model is on_device[0]:
            launched.append(counted["waits"])
        return logits

    monkeypatch.setattr(PackedForward, "run", noting)
    policies = []
    for learns_late in (False, True):
        launched.clear()
        policies.append(Learning(learns_late, launched))
        drafter = "prompt_lookup" if source == "lookup" else on_device[1]
        config = SmartSpecConfig(drafter, policy=policies[-1])
        monkeypatch.setitem(SOURCES, "learning", lambda draft, config=config: config)
        output = generate(on_device, "learning", OPTIONS[name])
        assert tokens_of(output) == tokens_of(expected[name])
        # What was looked up is what the penalty is on.
        assert output.statistics.accepted_tokens > 0 or (source, name) == ("lookup", "penalty")
        moments = policies[-1].moments
        at_once = [moment == (number, True) for number, moment in enumerate(moments, start=1)]
        late = [moment == (number + 1, False) for number, moment in enumerate(moments, start=1)]
        assert len(moments) == len(launched) and all(map(max, at_once, late))
        assert at_once[-1] and sum(late) >= 3 * learns_late and learns_late >= any(late)
    assert policies[0].learnt == policies[1].learnt


class Looking(PromptLookupCandidates):
    """Is shown hidden states, and leaves them where they are."""

    needs = frozenset({"hidden_states"})

    def __init__(self, layers):
        super().__init__()
        self.hidden_layers, self.num_shown = layers, Counter()

    def begin(self, request):
        super().begin(request)
        return request.num_cached

    def observe(self, request_id, committed):
        for layer, states in committed.hidden_states.items():
            assert states.device.type == DEVICE
            self.num_shown[layer] += len(states)
        if len(committed.tokens):
            super().observe(request_id, committed.tokens)


def test_hidden_states_are_sent_for_once_whatever_the_number_of_layers(on_device, expected, steps, monkeypatch):
    counted = []
    for layers in ((-1,), (-1, 0, 1)):
        steps.clear()
        source = Looking(layers)
        monkeypatch.setitem(SOURCES, "looking", lambda draft, source=source: SmartSpecConfig(source, num_nodes=CHAIN))
        output = generate(on_device, "looking", OPTIONS["greedy"])
        assert tokens_of(output) == tokens_of(expected["greedy"]) and output.statistics.accepted_tokens > 0
        assert source.num_shown.keys() == set(layers) and min(source.num_shown.values()) > sum(LENGTHS)
        assert max(counts["waits"] for counts in steps) == 1 and max(counts["uploads"] for counts in steps) == 2
        counted.append([(counts["uploads"], counts["waits"]) for counts in steps])
    assert counted[0] == counted[1]
