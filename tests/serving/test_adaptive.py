"""The goodput auction in the loop: the same tokens, drafts where they pay, and none where they do not."""

from functools import partial

import numpy as np
import pytest
import torch

import hf_smartspec
from hf_smartspec import (
    DraftModelCandidates,
    DraftTree,
    Engine,
    FixedLength,
    SmartSpecConfig,
    SuffixTreeCandidates,
)
from hf_smartspec.candidates import StagedCandidates
from hf_smartspec.goodput import ConfidenceGoodput, GoodputAuction, RequestGoodput, StepGoodput, TreeGoodput
from hf_smartspec.prepare import decode
from hf_smartspec.simulator.clock import EventClock

from ..costs import UnmovedCost
from ..covering import exhaustive
from ..generate.helpers import VOCAB_SIZE, Oracle, Spy, noisy_copy, prompts, tiny_llama
from .helpers import random_requests
from .test_engine import check_all

pytestmark = pytest.mark.adaptive


@pytest.fixture
def model():
    return tiny_llama()


def speculate(model, source, **arguments):
    arguments = prompts([3, 9, 5, 7]) | {"max_new_tokens": 60, "eos_token_id": None} | arguments
    expected = model.generate(**arguments)
    with hf_smartspec.enabled(model):
        output = model.generate(**arguments, assistant=source, return_dict_in_generate=True)
    assert torch.equal(output.sequences, expected)
    return output.statistics


def test_generate_speculates_without_being_told_how_much(model):
    arguments = prompts([3, 9, 5, 7])
    known = model.generate(**arguments, max_new_tokens=60, eos_token_id=None)
    statistics = speculate(model, Oracle(known, arguments["attention_mask"]))
    assert statistics.mean_accepted_length > 3


@pytest.mark.parametrize("make", [StepGoodput, RequestGoodput, TreeGoodput, ConfidenceGoodput])
def test_smartspecs_policies_serve_the_plain_tokens(model, make):
    """Algorithm 2's batches, where a third row makes steps long, and algorithm 3, which has none."""
    cost = UnmovedCost(0.0, 0.0, 0.0, knots=(1, 2, 3, 400), curve=(1e-3, 1e-3, 1.0, 100.0))
    policy, sizes = make(cost), []
    shapes = policy.shapes
    policy.shapes = lambda rows: sizes.append(len(rows)) or shapes(rows)
    with Engine(model, SmartSpecConfig(noisy_copy(model), policy=policy), max_batch_size=5) as engine:
        check_all(engine, model, random_requests(12))
    assert max(sizes) == (5 if make is ConfidenceGoodput else 2)


def test_policies_remember_from_call_to_call(model):
    source = Wrong()
    drafted = [speculate(model, source).drafted_tokens for _ in range(4)]
    assert drafted[0] > 0 and drafted[-1] < drafted[0]


@pytest.mark.parametrize("assistant", ["draft", "suffix"])
def test_requests_get_their_own_tokens(model, assistant):
    makes = {"draft": lambda: DraftModelCandidates(noisy_copy(model)), "suffix": SuffixTreeCandidates}
    source = makes[assistant]()
    with Engine(model, source, max_batch_size=5) as engine:
        check_all(engine, model, random_requests(30))
    assert isinstance(engine._runner.loop.policy.policy, GoodputAuction)


class Wrong(Oracle):
    """Knows nothing, and is sure of it."""

    def __init__(self):
        super().__init__(torch.zeros(1, 1, dtype=torch.long))

    def _propose(self, text, limit):
        return DraftTree.chain([(text[-1] + 1) % VOCAB_SIZE] * limit)


def test_a_source_that_is_always_wrong_is_hardly_asked_any_more(model):
    """Verification stops when every token has a cost; the source is tried again now and then."""
    policy = GoodputAuction(UnmovedCost(alpha=0.0, gamma=1e-3, delta=1e-2))
    spy = Spy(Wrong())
    config = SmartSpecConfig(spy, policy=policy)
    statistics = speculate(model, config, max_new_tokens=200)
    assert 0 < statistics.drafted_tokens < 0.1 * statistics.generated_tokens
    assert statistics.steps >= 0.97 * statistics.generated_tokens


def test_draft_models_that_are_hardly_asked_are_spared_new_requests(model):
    """A draft model's prefill costs: where drafts do not pay, most new requests are served without one."""
    spy = Spy(DraftModelCandidates(noisy_copy(model, scale=5.0)))  # knows nothing
    spy.is_autoregressive = True
    policy = GoodputAuction(UnmovedCost(alpha=0.0, gamma=5e-3, delta=1e-2))
    requests = random_requests(80)
    with Engine(model, SmartSpecConfig(spy, policy=policy), max_batch_size=2) as engine:
        check_all(engine, model, requests)
    assert 8 < spy.started < 40, "the first ones, and a group that is let through to see whether things have changed"


def test_models_that_cannot_be_measured_are_served_all_the_same(model, monkeypatch):
    def fails(model):
        raise torch.OutOfMemoryError("no room for 16 rows")

    monkeypatch.setattr("hf_smartspec.prepare.call.load_or_profile", fails)
    source = DraftModelCandidates(noisy_copy(model), num_nodes=3)
    assert speculate(model, source).drafted_tokens > 0
    with Engine(model, source) as engine:
        check_all(engine, model, random_requests(5))
    assert engine.statistics.drafted_tokens > 0


@pytest.mark.parametrize(
    "probs",
    [
        [0.5, 0.5],
        np.array(["a", "b"]),
        *exhaustive([torch.ones(2, dtype=torch.bfloat16)], [np.ones((2, 1))], [np.ones(3)]),
    ],
)
def test_probabilities_that_are_none(model, probs):
    """They cost the request its drafts, not its tokens."""

    class Odd(Wrong):
        def _propose(self, text, limit):
            return DraftTree(np.array([3, 4]), np.array([-1, 0]), probs)

    assert speculate(model, Odd()).drafted_tokens == 0


@pytest.mark.parametrize("value", [np.nan, 7.0, *exhaustive([-1.0], [np.inf], [-np.inf], [1e300])])
def test_probabilities_out_of_bounds(model, value):
    class Odd(Wrong):
        def _propose(self, text, limit):
            return DraftTree(np.array([3, 4]), np.array([-1, 0]), np.array([value, 0.5]))

    speculate(model, Odd())
    with Engine(model, Odd()) as engine:
        check_all(engine, model, random_requests(3))


# --- Two sources, of which one costs more -----------------------------------------------------------------------------


def hybrid(model, first, drafter):
    """Both with what they were asked for."""
    first, drafter = Spy(first), Spy(drafter)
    return StagedCandidates([first, drafter]), first, drafter


@pytest.mark.parametrize("is_adaptive", [False, True])
def test_the_drafter_speaks_where_the_first_source_is_silent(model, monkeypatch, is_adaptive):
    # The price of drafting is measured: on a slow machine, some nodes would be drafted and not verified.
    monkeypatch.setattr(decode, "DecodingLoop", partial(decode.DecodingLoop, clock=EventClock()))  # it stands still
    arguments = prompts([3, 9, 5, 7])
    known = model.generate(**arguments, max_new_tokens=60, eos_token_id=None)
    source, first, drafter = hybrid(model, Silent(), Oracle(known, arguments["attention_mask"]))
    statistics = speculate(model, SmartSpecConfig(source, num_nodes=None if is_adaptive else 4))
    assert first.drafted == 0 and drafter.accepted == statistics.accepted_tokens
    assert statistics.mean_accepted_length > 3


@pytest.mark.parametrize("is_adaptive", [False, True])
@pytest.mark.parametrize(("threshold", "is_asked"), [(1e9, True), (0.0, False)])
def test_the_published_hybrid_heeds_tau_under_every_policy(model, threshold, is_asked, is_adaptive):
    """SuffixDecoding, appendix B.1: the fallback drafts, alone, where the first source's SCORE is at most τ."""
    arguments = prompts([3, 9, 5, 7])
    known = model.generate(**arguments, max_new_tokens=60, eos_token_id=None)
    right, wrong = Oracle(known, arguments["attention_mask"]), Wrong()
    first, drafter = Spy(wrong if is_asked else right), Spy(right if is_asked else wrong)
    source = StagedCandidates([first, drafter], threshold, replaces=True)
    policy = GoodputAuction(UnmovedCost(alpha=0.0, gamma=1e-5, delta=1e-2)) if is_adaptive else FixedLength(4)
    statistics = speculate(model, SmartSpecConfig(source, policy=policy))
    assert (drafter.drafted > 0) == is_asked
    if is_asked and not is_adaptive:
        assert statistics.accepted_tokens == statistics.drafted_tokens == drafter.accepted > 0, "none of the first"


def test_the_drafter_is_silent_where_the_first_source_knows(model):
    arguments = prompts([3, 9, 5, 7])
    known = model.generate(**arguments, max_new_tokens=60, eos_token_id=None)
    draft = DraftModelCandidates(noisy_copy(model))
    source, first, drafter = hybrid(model, Oracle(known, arguments["attention_mask"]), draft)
    speculate(model, source)
    assert first.accepted > 100 and drafter.drafted < 20


def test_a_small_draft_of_the_drafter_takes_nothing_from_the_first_sources(model):
    arguments = prompts([3, 9, 5, 7])
    known = model.generate(**arguments, max_new_tokens=60, eos_token_id=None)
    first = Oracle(known, arguments["attention_mask"])
    first.default_num_nodes = 12
    drafter = DraftModelCandidates(noisy_copy(model), num_nodes=2)
    selected = []

    class Asks(FixedLength):
        """The drafter for every row."""

        def max_nodes(self, rows, stage, trees):
            return np.minimum(stage.caps, 2 if stage.position else 12)

        def select(self, rows, trees):
            selected.append(max(map(len, trees), default=0))
            return super().select(rows, trees)

    policy = Asks(12)
    statistics = speculate(model, SmartSpecConfig(StagedCandidates([first, drafter]), policy=policy))
    assert max(selected) == 12 and statistics.mean_accepted_length > 8


def test_what_a_drafter_that_is_always_wrong_drafts_is_hardly_verified(model):
    source, _, drafter = hybrid(model, Silent(), Wrong())
    policy = GoodputAuction(UnmovedCost(alpha=0.0, gamma=1e-3, delta=1e-2))
    statistics = speculate(model, SmartSpecConfig(source, policy=policy), max_new_tokens=200)
    assert drafter.drafted > 0 and statistics.drafted_tokens < 0.1 * statistics.generated_tokens


@pytest.mark.parametrize("fails", ["first", "drafter"])
def test_a_source_that_fails_leaves_the_other_one(model, fails):
    class Failing(Silent):
        def propose(self, request_ids, max_nodes):
            raise RuntimeError("no idea")

    draft = DraftModelCandidates(noisy_copy(model))
    first, drafter = (Failing(), Spy(draft)) if fails == "first" else (Spy(SuffixTreeCandidates()), Failing())
    source = StagedCandidates([first, drafter])
    with Engine(model, source, max_batch_size=3) as engine:
        check_all(engine, model, random_requests(12))
    assert engine.statistics.accepted_tokens > 0
    assert (drafter if fails == "first" else first).accepted > 0


class Silent(Oracle):
    def __init__(self):
        super().__init__(torch.zeros(1, 1, dtype=torch.long))

    def _propose(self, text, limit):
        return DraftTree.empty()


def test_a_source_may_have_a_drafter_of_its_own(model):
    """An attribute of that name makes no hybrid."""
    source = SuffixTreeCandidates()
    source.drafter = noisy_copy(model)
    speculate(model, source)


def test_prompts_in_pieces_where_only_tokens_cost(model):
    policy = GoodputAuction(UnmovedCost(alpha=0.0, gamma=1e-3, delta=0.0))
    config = SmartSpecConfig(SuffixTreeCandidates(), policy=policy)
    with Engine(model, config, max_batch_size=3, max_prefill_tokens=4) as engine:
        check_all(engine, model, random_requests(8))


def test_requests_without_speculation_do_not_stand_for_the_others(model):
    spy = Spy(DraftModelCandidates(noisy_copy(model)))
    spy.is_autoregressive = True
    kinds = []

    class Watched(GoodputAuction):
        def max_nodes(self, rows, stage, trees):
            if stage.caps.any():
                kinds.append(stage.cost.is_autoregressive)
            return super().max_nodes(rows, stage, trees)

    policy = Watched(UnmovedCost(alpha=0.0, gamma=1e-5, delta=1e-2))
    with Engine(model, SmartSpecConfig(spy, policy=policy), max_batch_size=4) as engine:
        for index in range(8):
            assistant = "none" if index % 2 == 0 else None
            engine.add_request([3, 4, 5 + index], max_new_tokens=12, **({"assistant": assistant} if assistant else {}))
        list(engine)
    assert kinds and all(kinds)
