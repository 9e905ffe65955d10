"""Sources with needs are shown all that they ask for in engines too, whatever is reused, and beside other sources."""

import numpy as np
import pytest
import torch

from hf_smartspec import Engine, FixedLength, PromptLookupCandidates, SmartSpecConfig, TreeCandidateGenerator
from hf_smartspec.candidates import FusedCandidates, StagedCandidates
from hf_smartspec.serving.memory import weights

from ..candidates.toy_hidden_states import NearestStates
from ..cases import left_padded
from ..models import new_model, shared_model
from ..serving import helpers
from ..serving.helpers import TIMEOUT
from ..sources import Oracle, Random, WithDecoys
from ..watching import Watching
from .shown import LENGTH, OnlyTokens, decoded, plain


def served(engine, prompts, length=LENGTH, **arguments) -> list[list[int]]:
    names = [engine.add_request(prompt, max_new_tokens=length, **arguments) for prompt in prompts]
    return [engine.get_result(name, timeout=TIMEOUT).generated_tokens for name in names]


def all_alone(model, prompts, length=LENGTH) -> list[list[int]]:
    return helpers.all_alone(model, [helpers.Asked(prompt, {"max_new_tokens": length}) for prompt in prompts])


def alone(model, prompt, length=LENGTH) -> list[int]:
    return all_alone(model, [prompt], length)[0]


def known(model, prompts, length=LENGTH) -> TreeCandidateGenerator:
    tokens = all_alone(model, prompts, length)
    return WithDecoys(Oracle([prompt + continued for prompt, continued in zip(prompts, tokens)]), seed=1)


@pytest.fixture(scope="module")
def nine():
    """Prompts, and what follows each by itself."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, 97, rng.integers(1, 30)).tolist() for _ in range(9)]
    return prompts, all_alone(shared_model("llama"), prompts)


@pytest.mark.parametrize("max_batch_size", [1, 2, 8])
@pytest.mark.parametrize("max_prefill_tokens", [3, 7, 512])
def test_engines_with_pieces_of_prompts(nine, max_batch_size, max_prefill_tokens):
    """Requests join and leave; prompts are run in pieces while others decode."""
    model, (prompts, expected) = shared_model("llama"), nine
    texts = [prompt + tokens for prompt, tokens in zip(prompts, expected)]
    watching = Watching(WithDecoys(Oracle(texts), seed=1))
    with Engine(model, watching, max_batch_size=max_batch_size, max_prefill_tokens=max_prefill_tokens) as engine:
        assert served(engine, prompts) == expected
    watching.check(model)
    assert len(watching.ended) == 9 and watching.num_accepted > LENGTH
    if max_prefill_tokens < 30:
        assert any(not len(step.tokens) for _, step in watching.steps), "no piece of a prompt was shown"


@pytest.mark.parametrize("keeps", [True, False])
def test_prompts_that_begin_alike(keeps):
    """What a source has kept is not run again, and what it has not is."""
    model = shared_model("llama")
    common = list(range(3, 33))
    prompts = [[*common, *tail] for tail in ([5, 6], [7], [5, 6, 8], [90], [])]
    watching = Watching(known(model, prompts), keeps=keeps)
    with Engine(model, watching, max_batch_size=2, max_prefill_tokens=16) as engine:
        fed, forward = [], engine._runner.memory.forward
        run = forward.forward
        forward.forward = lambda inputs: fed.append(sum(len(item.feed) for item in inputs)) or run(inputs)
        for prompt in prompts:
            assert served(engine, [prompt]) == [alone(model, prompt)]
        num_reused = engine._runner.memory.num_reused
        assert len(watching.states) <= 2, "states are kept whose keys and values have gone"
    watching.check(model)
    assert len(watching.reused) == 4 and num_reused == sum(watching.reused)
    assert (min(watching.reused) >= 29) if keeps else (num_reused == 0)
    assert sum(fed) >= sum(map(len, prompts)) - num_reused


def test_prompts_that_begin_as_a_running_text():
    model = shared_model("llama")
    prompts = [[*range(3, 33), tail] for tail in (5, 6, 7)]
    watching = Watching(known(model, prompts, 40))
    with Engine(model, watching, max_batch_size=4, max_prefill_tokens=8) as engine:
        assert served(engine, prompts, 40) == all_alone(model, prompts, 40)
        assert served(engine, prompts, 40) == all_alone(model, prompts, 40)
    watching.check(model)
    assert max(watching.reused) >= 30


def test_sources_of_others_have_kept_nothing():
    """A prefix that a request without such a source has left is run again for one that needs its states."""
    model = shared_model("llama")
    prompt = list(range(3, 33))
    watching = Watching(known(model, [prompt]))
    with Engine(model, "none", max_batch_size=2) as engine:
        assert served(engine, [prompt]) == [alone(model, prompt)]
        assert served(engine, [prompt], assistant=watching) == [alone(model, prompt)]
        assert engine._runner.memory.num_reused == 0
        assert served(engine, [prompt], assistant=watching) == [alone(model, prompt)]
        assert engine._runner.memory.num_reused == 29
        assert served(engine, [prompt]) == [alone(model, prompt)]
    watching.check(model)
    assert watching.reused == [0, 29]


class Forgetful(Watching):
    """Keeps hidden states of the first tokens only."""

    def begin(self, request):
        request.num_cached = min(request.num_cached, 10)
        return super().begin(request)


@pytest.mark.parametrize("together", [False, True])
def test_sources_that_have_kept_more_than_others_are_shown_it_again(together):
    """`start` of the step tells so: what they have kept of it is of no use any more."""
    model = shared_model("llama")
    prompt = list(range(3, 33))
    more, fewer = Watching(known(model, [prompt])), Forgetful(known(model, [prompt]))
    with Engine(model, (FusedCandidates if together else StagedCandidates)([more, fewer]), max_batch_size=2) as engine:
        assert served(engine, [prompt]) == [alone(model, prompt)]
        assert served(engine, [prompt]) == [alone(model, prompt)]
        assert engine._runner.memory.num_reused == 10
    more.check(model)
    fewer.check(model)
    assert more.reused == [29] and fewer.reused == [10] and more.num_restarts == 1


def test_cancellation_in_flight():
    model = shared_model("llama")
    prompts = [[*range(3, 40), tail] for tail in range(50, 58)]
    watching = Watching(known(model, prompts, 60))
    with Engine(model, watching, max_batch_size=4, max_prefill_tokens=5) as engine:
        step, steps = engine._runner.loop.step, []

        def cancelling():
            steps.append(len(steps))
            if steps[-1] in (2, 9, 14, 21):  # some while their prompts are run, some later
                engine.cancel_request(names[steps[-1] % 8])
            return step()

        engine._runner.loop.step = cancelling
        with engine.pause():
            names = [engine.add_request(prompt, max_new_tokens=60) for prompt in prompts]
        outputs = [engine.get_result(name, timeout=TIMEOUT) for name in names]
    cancelled = [output.finish_reason == "cancelled" for output in outputs]
    assert sum(cancelled) == 4
    for prompt, output in zip(prompts, outputs):
        expected = alone(model, prompt, 60)
        assert output.generated_tokens == expected[: len(output.generated_tokens)]
    watching.check(model)


def test_weights_that_change_while_a_request_runs(monkeypatch):
    """Its text is run anew, and the states with it, from the first token on."""
    monkeypatch.setattr(weights, "_PAUSE", 0.0)
    model = new_model("llama")
    watching = Watching(PromptLookupCandidates(), scores=False)
    with Engine(model, watching, max_prefill_tokens=4) as engine:
        step, steps = engine._runner.loop.step, []

        def changing():
            steps.append(len(steps))
            if steps[-1] == 9:
                with torch.no_grad():
                    model.model.layers[0].mlp.down_proj.weight.mul_(1.1)
            return step()

        engine._runner.loop.step = changing
        served(engine, [[5, 9, 5, 9, 5, 9, 8, 7]], 30)
    assert watching.num_restarts == 1
    watching.check(model)  # of the new weights: nothing is left of the old ones


def test_the_toy_drafts_what_comes_true():
    """States find the places where a text that repeats itself goes on alike."""
    model = new_model("llama", std=0.1)
    prompts = [[5, 9, 5, 9, 5], [3, 4, 5, 6, 7, 3, 4]]
    for width in (1, 2):
        toy = NearestStates(width=width)
        with Engine(model, SmartSpecConfig(toy, policy=FixedLength(4 * width)), max_batch_size=2) as engine:
            assert served(engine, prompts, 60) == all_alone(model, prompts, 60)
            assert engine.statistics.accepted_tokens > 20
        inputs = left_padded(prompts)
        assert torch.equal(decoded(model, toy, inputs, 60), plain(model, inputs, 60))
        assert not toy.texts and len(toy.states) <= 2, "`generate` keeps nothing"


# --- Several sources as one -------------------------------------------------------------------------------------------


def test_fused_sources_get_what_each_has_asked_for():
    """Hidden states of different layers, scores, or tokens alone; prefixes are reused as far as all can do without."""
    model = shared_model("llama")
    common = list(range(3, 33))
    prompts = [[*common, *tail] for tail in ([5, 6], [7], [5, 6, 8])]
    sources = [
        Watching(known(model, prompts), (-1, 1), scores=False),
        Watching(Random(0, is_tree=True), (0,), scores=True),
        Watching(Random(1, is_tree=True), (), scores=True),
        OnlyTokens(2, is_tree=True),
    ]
    with Engine(model, SmartSpecConfig(sources, num_nodes=8), max_batch_size=2, max_prefill_tokens=7) as engine:
        for prompt in prompts:
            assert served(engine, [prompt]) == [alone(model, prompt)]
        assert engine.statistics.accepted_tokens > LENGTH
        assert engine._runner.memory.num_reused == sum(sources[0].reused) >= 2 * 29
    for watching in sources[:3]:
        watching.check(model)
        assert len(watching.ended) == 3 and all(
            set(states) <= set(watching.hidden_layers) for _, states in watching.ended
        )
    assert all(len(step.tokens) for _, step in sources[2].steps), "pieces of prompts have no scores"


def test_a_fused_source_that_keeps_nothing_has_its_states_computed():
    model = shared_model("llama")
    prompts = [[*range(3, 33), tail] for tail in (5, 6)]
    sources = [Watching(known(model, prompts), keeps=keeps) for keeps in (True, False)]
    with Engine(model, SmartSpecConfig(sources, num_nodes=6), max_batch_size=2) as engine:
        for prompt in prompts:
            assert served(engine, [prompt]) == [alone(model, prompt)]
        assert engine._runner.memory.num_reused == 0
    for watching in sources:
        watching.check(model)
    assert sources[0].num_restarts == 1 and sources[1].reused == [0], "`start` tells that its states come once more"
